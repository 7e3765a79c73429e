"""The scripted server: HTTP/1.1 over any asyncio transport, TCP or in memory.

The model name selects the script: a case of cases.py, or `steady` (the pace of the server). The
times at which answers were actually written are recorded, so that tests over a real socket can
compare the client's figures with them. `/metrics` uses vLLM's names. Sampling parameters are
ignored.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from typing import Any

import msgspec

from ridgeline.measure.mock.cases import CASES
from ridgeline.measure.mock.pace import MockPace
from ridgeline.measure.mock.script import Encode, Ending, Script, ScriptedPart, encoder

STEADY = "steady"
MAX_SERVED = 100_000  # most recent records that are kept
_PAGES = {"/health": b"{}", "/v1/health": b"{}"}


class ServedAnswer(msgspec.Struct, kw_only=True):
    """An answer as it was sent: event-loop times of the request's arrival and of its tokens."""

    model: str
    path: str
    received_s: float
    token_s: list[float] = []
    token_counts: list[int] = []


class _MockRequest(msgspec.Struct):
    model: str = STEADY
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool = False
    prompt: Any = None
    messages: Any = None


_DECODER = msgspec.json.Decoder(_MockRequest)


class MockServer:
    """State shared by all connections: scripts, slots, and the record of served answers."""

    def __init__(self, pace: MockPace | None = None, cases: Mapping[str, Script] = CASES) -> None:
        self.pace, self.cases = pace or MockPace(), cases
        self.served: deque[ServedAnswer] = deque(maxlen=MAX_SERVED)
        self.num_running = 0
        self.prompt_tokens = self.output_tokens = 0
        self._waiting: deque[Callable[[], None]] = deque()
        self.transports: set[asyncio.Transport] = set()

    def protocol(self) -> asyncio.Protocol:
        """The protocol of a new connection."""
        return _MockConnection(self)

    async def listen(self, host: str, port: int) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        return await loop.create_server(self.protocol, host, port, backlog=4096)

    def close_connections(self) -> None:
        """Drop all connections, also idle ones that a client keeps alive."""
        for transport in tuple(self.transports):
            transport.abort()

    def acquire_slot(self, begin: Callable[[], None]) -> None:
        """Call `begin` as soon as a slot is free."""
        slots = self.pace.slots
        if slots is not None and self.num_running >= slots:
            self._waiting.append(begin)
            return
        self.num_running += 1
        begin()

    def release_slot(self) -> None:
        self.num_running -= 1
        if self._waiting:
            self.num_running += 1
            self._waiting.popleft()()

    def refusal(self, path: str, body: bytes) -> tuple[int, bytes] | None:
        """Status and message for a request that this server refuses; None serves it.

        Subclasses refuse what other servers refuse.
        """
        return None

    def page(self, path: str) -> bytes | None:
        """The body of a GET request; None if there is no such page."""
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


class _MockConnection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, server: MockServer) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._buffer = b""
        self._transport: asyncio.Transport | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._holds_slot = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._server.transports.add(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self._server.transports.discard(self._transport)
        self._transport = None
        for timer in self._timers:
            timer.cancel()
        self._release_slot()

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
            self._send_response(404 if page is None else 200, page or b"no such page")
        else:
            self._answer(path.decode("latin-1"), body)

    def _answer(self, path: str, raw: bytes) -> None:
        try:
            request = _DECODER.decode(raw)
        except msgspec.MsgspecError as error:
            return self._send_response(400, str(error).encode())
        script = self._server.cases.get(request.model)
        if script is not None and script.status != 200:
            return self._send_response(script.status, script.body)
        refusal = self._server.refusal(path, raw)
        if refusal is not None:
            return self._send_response(*refusal)
        served = ServedAnswer(model=request.model, path=path, received_s=self._loop.time())
        self._server.served.append(served)
        stream = _ScriptedStream(request, script, self._server.pace)
        if not request.stream:
            return self._send_response(200, stream.to_response_body())
        return self._server.acquire_slot(lambda: self._begin(stream, served, path))

    def _begin(self, stream: _ScriptedStream, served: ServedAnswer, path: str) -> None:
        self._holds_slot = True
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
        self, parts: list[ScriptedPart], encode: Encode, served: ServedAnswer, ending: Ending | None
    ) -> None:
        """Write the parts that are due; `ending` is given with the last ones."""
        data, num_tokens = b"", 0
        for part in parts:
            written = encode(part)
            if part.pieces > 1:
                self._write_in_pieces(written, part.pieces)
                written = b""
            data += written
            num_tokens += part.num_tokens if part.kind != "usage" else 0
        if num_tokens:
            served.token_s.append(self._loop.time())
            served.token_counts.append(num_tokens)
            self._server.output_tokens += num_tokens
        if data:
            self._write(b"%x\r\n%s\r\n" % (len(data), data))
        if ending is not None:
            self._end(ending)

    def _write_in_pieces(self, data: bytes, num_pieces: int) -> None:
        """Split `data` at arbitrary places into writes, each a chunk of the transfer coding."""
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
        self._release_slot()

    def _release_slot(self) -> None:
        if self._holds_slot:
            self._holds_slot = False
            self._server.release_slot()

    def _send_response(self, status: int, body: bytes) -> None:
        head = b"HTTP/1.1 %d .\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        self._write(head % (status, len(body)) + body)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)


class _ScriptedStream:
    """The answer to one request."""

    def __init__(self, request: _MockRequest, script: Script | None, pace: MockPace) -> None:
        self.model = request.model
        self.num_tokens = request.max_tokens or request.max_completion_tokens or 16
        self.parts: Iterable[ScriptedPart] = script.parts if script else pace.parts(self.num_tokens)
        self.ending: Ending = script.ending if script else "whole"
        self.prompt_tokens = script.prompt_tokens if script else _prompt_tokens(request)

    def to_response_body(self) -> bytes:
        text = "".join(part.text for part in self.parts)
        usage = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.num_tokens}
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "text": text, "finish_reason": "length"}
        return msgspec.json.encode({"model": self.model, "choices": [choice], "usage": usage})


def _prompt_tokens(request: _MockRequest) -> int:
    """Number of token ids, or of words in text."""
    if isinstance(request.prompt, list):
        return len(request.prompt)
    if isinstance(request.prompt, str):
        return len(request.prompt.split())
    return sum(len(str(turn.get("content", "")).split()) for turn in request.messages or ())


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0
