"""Any OpenAI-compatible server as a target: streaming /v1/completions and /v1/chat/completions.

A conversation goes to the chat endpoint, text and token ids to the completions endpoint, so that
one workload may mix both. The stream is read with our own parser (sse.py), its chunks are judged
by our own rules (chunks.py), and the final usage chunk decides how many tokens there were. A
stream is complete when a finish_reason or [DONE] came; one that just stops is a failure, with the
tokens it had.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from ridgeline.errors import BadInput
from ridgeline.measure.client.http_connection import OK, Dial, Origin, Reply, Wire, WireError, dial
from ridgeline.measure.client.sse_parser import ServerEvent, SseParser
from ridgeline.measure.client.stream_chunks import (
    Chunk,
    Piece,
    Usage,
    counted,
    decode_chunk,
    error_of,
    piece_of,
)
from ridgeline.measure.client.target import Now, Recorder
from ridgeline.measure.workload.base import Chat, LoadRequest, plain_chat
from ridgeline.records import EngineInfo, StepStat

Endpoint = Literal["auto", "chat", "completions"]
MAX_ERROR_CHARS = 300
WAITED = ("x-queue-time", "x-validation-time")
CountTokens = Callable[[str], int]


class HttpTarget:
    """One server and one model on it. Timeouts belong to the load client; here only connecting
    has one. `count_tokens` serves where the server does not count. `info` is for whoever has asked
    the server what it is (measure/server/config.py).
    """

    info: EngineInfo | None = None

    def __init__(
        self,
        url: str,
        model: str,
        *,
        endpoint: Endpoint = "auto",
        api_key: str | None = None,
        count_tokens: CountTokens | None = None,
        stream: bool = True,
        dial: Dial = dial,
    ) -> None:
        self._url, self._model, self._endpoint = base_url(url), model, endpoint
        self._stream = stream
        self._count_tokens = count_tokens
        self._wire, self._prefix = wire_to(self._url, api_key, dial)

    @property
    def name(self) -> str:
        return f"{self._url} ({self._model})"

    async def send(self, request: LoadRequest, record: Recorder) -> None:
        path, body = self._request(request)
        reading = (_Reading if self._stream else _WholeAnswer)(record, self._count_tokens)
        try:
            reply = await self._wire.post(
                self._prefix + path, msgspec.json.encode(body), reading.feed
            )
            if reply.status != OK:
                record.failed(_refusal(reply))
            else:
                reading.conclude(reply.headers)
        except WireError as error:
            record.failed(str(error))
        finally:
            reading.settle()  # what came before a timeout or a broken connection is kept too

    def drain_steps(self, now: Now) -> tuple[StepStat, ...]:
        return ()

    async def close(self) -> None:
        self._wire.close()

    def _request(self, request: LoadRequest) -> tuple[str, dict[str, object]]:
        body: dict[str, object] = {
            "model": self._model,
            "max_tokens": request.max_tokens,
            "temperature": 0.0,
        }
        if self._stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if request.ignore_eos:
            body["ignore_eos"] = True
        path, prompt = _addressed(request, self._endpoint)
        return path, body | prompt


def base_url(url: str) -> str:
    """The server's root: no trailing slash, no /v1; BadInput where it is not an HTTP address."""
    try:
        parsed = urlsplit(url)
        _ = parsed.port
    except ValueError as error:
        raise BadInput("not a URL", value=url, fix=f"write http://HOST:PORT ({error})") from None
    host = parsed.hostname or ""
    if parsed.scheme not in ("http", "https") or not host or " " in host:
        raise BadInput("not an HTTP address", value=url, fix="write http://HOST:PORT")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def no_server(url: str, why: object) -> BadInput:
    """To raise where nothing answers at the address: it can be mended."""
    return BadInput(
        "no server answers", value=url, fix=f"start the server or correct the URL ({why})"
    )


async def first_model(url: str, *, api_key: str | None = None, dial: Dial = dial) -> str:
    """The name of the first model that a server lists; BadInput where no server answers."""
    wire, prefix = wire_to(base_url(url), api_key, dial)
    try:
        reply = await wire.get(f"{prefix}/v1/models")
        if reply.status != OK:
            raise LookupError(f"HTTP {reply.status}")
        return str(msgspec.json.decode(reply.body, type=dict[str, Any])["data"][0]["id"])
    except (WireError, msgspec.MsgspecError, LookupError, TypeError) as error:
        raise BadInput(
            "no OpenAI-compatible server answers /v1/models",
            value=base_url(url),
            fix=f"start the server or correct the URL ({type(error).__name__}: {error})",
        ) from None
    finally:
        wire.close()


def wire_to(url: str, api_key: str | None, dial: Dial = dial) -> tuple[Wire, str]:
    """The connections to a server's root, and the path that its root has."""
    parsed = urlsplit(base_url(url))
    tls = parsed.scheme == "https"
    origin = Origin(parsed.hostname or "", parsed.port or (443 if tls else 80), tls)
    return Wire(origin, authorization(api_key), dial), parsed.path


def authorization(api_key: str | None) -> dict[str, str]:
    """The header that shows a key, none without one; BadInput where a header cannot hold it."""
    if not api_key:
        return {}
    if not api_key.isascii() or not api_key.isprintable():
        what = "the API key holds what an HTTP header cannot"
        raise BadInput(what, limit="printable ASCII", fix="copy the key again")
    return {"Authorization": f"Bearer {api_key}"}


def _addressed(request: LoadRequest, endpoint: Endpoint) -> tuple[str, dict[str, object]]:
    prompt = request.prompt
    if isinstance(prompt, Chat) and endpoint != "completions":
        return "/v1/chat/completions", {"messages": msgspec.to_builtins(prompt.messages)}
    if isinstance(prompt, Chat):
        return "/v1/completions", {"prompt": plain_chat(prompt)}
    if endpoint != "chat":
        return "/v1/completions", {"prompt": prompt}
    if isinstance(prompt, str):
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": prompt}]}
    raise BadInput(
        "the chat endpoint takes no token ids", value=request.id, fix="use the completions endpoint"
    )


def _refusal(reply: Reply) -> str:
    body = reply.body.decode("utf-8", "replace").strip()
    return f"HTTP {reply.status}: {body[:MAX_ERROR_CHARS]}".rstrip(": ")


class _Reading:
    """One stream as it comes in; `settle` writes its pieces into the record."""

    def __init__(self, record: Recorder, count_tokens: CountTokens | None) -> None:
        self._record, self._count_tokens = record, count_tokens
        self._parser = SseParser()
        self._pieces: list[Piece] = []
        self._running_total = 0
        self._usage: Usage | None = None
        self._prefill_s: float | None = None
        self._begun_s = record.now()
        self._waited_s: float | None = None
        self._reason: str | None = None
        self._done = False

    def feed(self, received: bytes) -> None:
        """What one read of the socket brought, in the turn in which it came."""
        for event in self._parser.feed(received):
            self.take(event)

    def take(self, event: ServerEvent) -> None:
        if event.data == b"[DONE]":
            self._done = True
            return
        try:
            chunk = decode_chunk(event.data)
        except msgspec.MsgspecError as error:
            self._record.failed(f"the server sent a malformed chunk: {error}")
            return
        failure = error_of(chunk)
        if failure is not None or event.kind == "error":
            self._record.failed(failure or event.data.decode("utf-8", "replace")[:MAX_ERROR_CHARS])
            return
        self._take_chunk(chunk)

    def _take_chunk(self, chunk: Chunk) -> None:
        now_s = self._record.now()
        for choice in chunk.choices or ():
            piece = piece_of(choice, now_s)
            if piece is not None:
                self._pieces.append(self._with_growth(piece, chunk.usage))
            self._reason = choice.finish_reason or self._reason
        if chunk.usage is not None:
            self._usage = chunk.usage
        if chunk.metrics is not None or chunk.timings is not None:
            self._prefill_s = chunk.prefill_s

    def _with_growth(self, piece: Piece, usage: Usage | None) -> Piece:
        """Where the server keeps a running count, its growth is the number of tokens of this
        chunk.
        """
        total = usage.completion_tokens if usage is not None else None
        if not total:
            return piece
        grown, self._running_total = total - self._running_total, total
        if piece.count is not None or grown < 1:
            return piece
        return msgspec.structs.replace(piece, count=grown, doubtful=False)

    def conclude(self, headers: Mapping[str, str]) -> None:
        """The stream is over: was it complete?"""
        self._waited_s = waited_s(headers)
        for event in self._parser.close():
            self.take(event)
        usage, record = self._usage, self._record
        if not (self._done or self._reason):
            record.failed("the stream ended before its finish_reason")
        if record.ended:
            return
        record.finished(
            self._reason,
            prompt_tokens=usage.prompt_tokens if usage is not None else 0,
            output_tokens=self._total,
            cached_tokens=usage.cached_tokens if usage is not None else 0,
        )

    def settle(self) -> None:
        """Write the pieces down, now that the server's own count (if any) is known."""
        total = self._total
        text = "".join(piece.text for piece in self._pieces)
        if total is None:
            total = self._counted_here(text)
        for at_s, count in counted(self._pieces, total):
            self._record.chunk("", count, at_s=at_s)
        self._record.tail(text)
        started_s = self._started_s()
        if started_s is not None and self._pieces:
            self._record.started(started_s)

    def _started_s(self) -> float | None:
        """When the server first ran the request, by its own word."""
        if self._prefill_s is not None and self._pieces:
            return self._pieces[0].at_s - self._prefill_s
        return None if self._waited_s is None else self._begun_s + self._waited_s

    def _counted_here(self, text: str) -> int | None:
        """The server gave no count: ours, of a whole answer's text, and marked as such."""
        whole = bool(self._done or self._reason)
        if not (whole and self._pieces) or self._count_tokens is None:
            self._record.counted_by = "chunks"
            return None
        self._record.counted_by = "tokenizer"
        return self._count_tokens(text)

    @property
    def _total(self) -> int | None:
        return self._usage.completion_tokens if self._usage is not None else None


class _WholeAnswer(_Reading):
    """An answer that comes in one piece: its tokens are seen at its end."""

    def __init__(self, record: Recorder, count_tokens: CountTokens | None) -> None:
        super().__init__(record, count_tokens)
        self._body: list[bytes] = []

    def feed(self, received: bytes) -> None:
        self._body.append(received)

    def conclude(self, headers: Mapping[str, str]) -> None:
        self.take(ServerEvent(data=b"".join(self._body)))
        super().conclude(headers)

    def _started_s(self) -> float | None:
        """A prefill time does not say when it was: the first token was not seen."""
        return None if self._waited_s is None else self._begun_s + self._waited_s


def waited_s(headers: Mapping[str, str]) -> float | None:
    """From a request's arrival until it ran, where its answer's headers tell (TGI, and what grew
    from it, of answers that are not streamed): milliseconds of validation and of the queue.
    """
    queue, validation = (_ms(headers.get(name, "")) for name in WAITED)
    return None if queue is None else (queue + (validation or 0.0)) / 1000


def _ms(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value < math.inf else None
