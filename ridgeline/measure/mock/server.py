"""The scripted server: HTTP/1.1 over any asyncio transport, TCP or a pipe in memory.

The model's name chooses the script: a case of cases.py, or `steady` (the server's own pace).
Answers are written as they are due, and the instants at which they were written are kept: a test
over a real socket compares the client's figures with these, and not with the intention. `/metrics`
speaks vLLM's dialect.

The server keeps to its script whatever the client does; it ignores sampling parameters.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from typing import Any

import msgspec

from ridgeline.measure.mock.cases import CASES
from ridgeline.measure.mock.pace import Pace
from ridgeline.measure.mock.script import Encode, Ending, Script, ScriptedPart, encoder

STEADY = "steady"
MAX_SERVED = 100_000  # records kept
_PAGES = {"/health": b"{}", "/v1/health": b"{}"}


class ServedCounts(msgspec.Struct, kw_only=True):
    """One answer as it was given: loop instants of the request's arrival and of its tokens."""

    model: str
    path: str
    received_s: float
    token_s: list[float] = []
    token_counts: list[int] = []


class _Body(msgspec.Struct):
    model: str = STEADY
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool = False
    prompt: Any = None
    messages: Any = None


_DECODER = msgspec.json.Decoder(_Body)


class MockServer:
    """What all connections share: scripts, slots, and the record of what was served."""

    def __init__(self, pace: Pace | None = None, cases: Mapping[str, Script] = CASES) -> None:
        self.pace, self.cases = pace or Pace(), cases
        self.served: deque[ServedCounts] = deque(maxlen=MAX_SERVED)
        self.num_running = 0
        self.prompt_tokens = self.output_tokens = 0
        self._waiting: deque[Callable[[], None]] = deque()

    def protocol(self) -> asyncio.Protocol:
        """A new connection's protocol."""
        return _Connection(self)

    async def listen(self, host: str, port: int) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        return await loop.create_server(self.protocol, host, port, backlog=4096)

    def slot(self, begin: Callable[[], None]) -> None:
        """Call `begin` now, or when a slot is free."""
        slots = self.pace.slots
        if slots is not None and self.num_running >= slots:
            self._waiting.append(begin)
            return
        self.num_running += 1
        begin()

    def free(self) -> None:
        self.num_running -= 1
        if self._waiting:
            self.num_running += 1
            self._waiting.popleft()()

    def page(self, path: str) -> bytes | None:
        """The body of a GET, None where there is no such page."""
        if path == "/v1/models":
            rows = [{"id": name, "object": "model"} for name in (STEADY, *self.cases)]
            return msgspec.json.encode({"object": "list", "data": rows})
        if path == "/metrics":
            return self._metrics().encode()
        return _PAGES.get(path)

    def _metrics(self) -> str:
        rows = {
            "vllm:num_requests_running": self.num_running,
            "vllm:num_requests_waiting": len(self._waiting),
            "vllm:prompt_tokens_total": self.prompt_tokens,
            "vllm:generation_tokens_total": self.output_tokens,
        }
        return "".join(f'{name}{{model_name="{STEADY}"}} {value}\n' for name, value in rows.items())


class _Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, server: MockServer) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._buffer = b""
        self._transport: asyncio.Transport | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._seated = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        for timer in self._timers:
            timer.cancel()
        self._leave()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = self._buffer[:end]
        size = _content_length(head)
        if len(self._buffer) < end + 4 + size:
            return
        body = self._buffer[end + 4 : end + 4 + size]
        self._buffer = self._buffer[end + 4 + size :]
        method, path = head.split(b" ", 2)[:2]
        if method == b"GET":
            page = self._server.page(path.decode("latin-1"))
            self._whole(404 if page is None else 200, page or b"no such page")
        else:
            self._answer(path.decode("latin-1"), body)

    def _answer(self, path: str, raw: bytes) -> None:
        try:
            asked = _DECODER.decode(raw)
        except msgspec.MsgspecError as error:
            return self._whole(400, str(error).encode())
        script = self._server.cases.get(asked.model)
        if script is not None and script.status != 200:
            return self._whole(script.status, script.body)
        served = ServedCounts(model=asked.model, path=path, received_s=self._loop.time())
        self._server.served.append(served)
        stream = _Stream(asked, script, self._server.pace)
        if not asked.stream:
            return self._whole(200, stream.unstreamed())
        return self._server.slot(lambda: self._begin(stream, served, path))

    def _begin(self, stream: _Stream, served: ServedCounts, path: str) -> None:
        self._seated = True
        self._timers.clear()
        encode = encoder(path, stream.model, stream.prompt_tokens)
        self._server.prompt_tokens += stream.prompt_tokens
        self._write(_STREAM_HEAD)
        origin_s = self._loop.time()
        groups = [
            (origin_s + at_s, list(parts))
            for at_s, parts in groupby(stream.parts, key=lambda part: part.at_s)
        ]
        for i, (due_s, parts) in enumerate(groups, 1):
            ending = stream.ending if i == len(groups) else None
            if due_s <= self._loop.time():
                self._emit(parts, encode, served, ending)
            else:
                timer = self._loop.call_at(due_s, self._emit, parts, encode, served, ending)
                self._timers.append(timer)

    def _emit(
        self, parts: list[ScriptedPart], encode: Encode, served: ServedCounts, ending: Ending | None
    ) -> None:
        """Write what is due at one instant; `ending` comes with the last of it."""
        data, num_tokens = b"", 0
        for part in parts:
            written = encode(part)
            if part.pieces > 1:
                self._in_pieces(written, part.pieces)
                written = b""
            data += written
            num_tokens += part.tokens if part.kind != "usage" else 0
        if num_tokens:
            served.token_s.append(self._loop.time())
            served.token_counts.append(num_tokens)
            self._server.output_tokens += num_tokens
        if data:
            self._write(b"%x\r\n%s\r\n" % (len(data), data))
        if ending is not None:
            self._end(ending)

    def _in_pieces(self, data: bytes, num_pieces: int) -> None:
        """As many writes at once, cut at odd places, each a chunk of the transfer coding."""
        size = -(-len(data) // num_pieces)
        for start in range(0, len(data), size):
            piece = data[start : start + size]
            self._write(b"%x\r\n%s\r\n" % (len(piece), piece))

    def _end(self, ending: Ending) -> None:
        if ending == "hang":
            return
        if ending == "cut" and self._transport is not None:
            self._transport.abort()
        else:
            self._write(b"0\r\n\r\n")
        self._leave()

    def _leave(self) -> None:
        if self._seated:
            self._seated = False
            self._server.free()

    def _whole(self, status: int, body: bytes) -> None:
        head = b"HTTP/1.1 %d .\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        self._write(head % (status, len(body)) + body)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)


class _Stream:
    """What one request is answered with."""

    def __init__(self, asked: _Body, script: Script | None, pace: Pace) -> None:
        self.model = asked.model
        self.num_tokens = asked.max_tokens or asked.max_completion_tokens or 16
        self.parts: Iterable[ScriptedPart] = script.parts if script else pace.parts(self.num_tokens)
        self.ending: Ending = script.ending if script else "whole"
        self.prompt_tokens = script.prompt_tokens if script else _prompt_tokens(asked)

    def unstreamed(self) -> bytes:
        text = "".join(part.text for part in self.parts)
        usage = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.num_tokens}
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "text": text, "finish_reason": "length"}
        return msgspec.json.encode({"model": self.model, "choices": [choice], "usage": usage})


def _prompt_tokens(asked: _Body) -> int:
    """Token ids are counted; of text, the words."""
    if isinstance(asked.prompt, list):
        return len(asked.prompt)
    if isinstance(asked.prompt, str):
        return len(asked.prompt.split())
    return sum(len(str(turn.get("content", "")).split()) for turn in asked.messages or ())


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0
