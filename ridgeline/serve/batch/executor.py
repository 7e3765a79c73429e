"""Run leased batch requests through an app in this process, without a socket.

The app's response is what the client would have got online. A refusal that will pass (429, 503)
makes the request wait; any other response is final: 2xx for the output file, the rest for the error
file.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, cast

import msgspec
from starlette.types import ASGIApp, Message, Scope

from ridgeline.errors import DECODE_ERRORS
from ridgeline.records import EngineInfo, Sampling
from ridgeline.serve.auth.keys import ANONYMOUS, Caller
from ridgeline.serve.auth.middleware import CALLER
from ridgeline.serve.batch.records import BatchResult, Lease
from ridgeline.serve.batch.worker import EngineBusy, failed_result
from ridgeline.serve.bodies.json_bounds import SMALL_BODY_BYTES
from ridgeline.serve.engine_protocol import EventSink, ServedEngine
from ridgeline.serve.generation.resume import (
    LOG_KEY,
    RESUMABLE_HEADER,
    RESUME_FIELD,
    ResumePoint,
    TokenLog,
)

_RETRY_STATUSES = (429, 503)
_ID_PREFIXES = {
    "/v1/chat/completions": "chatcmpl-",
    "/v1/completions": "cmpl-",
    "/v1/responses": "resp_",
}
"""Of the endpoints whose requests can be continued."""
_HOST = b"127.0.0.1"


class _BatchLine(msgspec.Struct):
    body: msgspec.Raw


class _BatchBody(msgspec.Struct):
    """What is read of a body before the app reads it: a large one would hold the event loop."""

    stream: msgspec.Raw = msgspec.Raw(b"null")


class _TokenDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _ResponseTokens(msgspec.Struct):
    """Usage of a completion, or under the names of the Responses API."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens_details: _TokenDetails | None = None
    input_tokens_details: _TokenDetails | None = None


class _ResponseBody(msgspec.Struct):
    usage: _ResponseTokens | None = None


class InProcessExecutor:
    """Runs batch requests with `app`, each as the caller that `caller_named` gives its tenant."""

    def __init__(
        self,
        app: ASGIApp,
        caller_named: Callable[[str], Caller] = lambda _: ANONYMOUS,
        *,
        served: str = "",
        max_body_bytes: float = math.inf,
    ) -> None:
        """`served`: what tells the model and its settings from others; "" for an app that cannot
        continue a request from its tokens. `max_body_bytes`: the app refuses longer bodies."""
        self._app, self._caller_named, self._served = app, caller_named, served
        self._max_body_bytes = max_body_bytes

    async def __call__(self, lease: Lease) -> BatchResult:
        is_small = len(lease.text) <= SMALL_BODY_BYTES
        body = _body(lease) if is_small else await asyncio.to_thread(_body, lease)
        if len(body) > self._max_body_bytes:
            return _result(lease, *await post(self._app, lease.endpoint, body))
        if _is_streamed(body):
            return failed_result(lease, "invalid_request", "a batch request cannot be streamed")
        progress = lease.progress
        if progress.served != self._served:  # tokens of another model
            progress.tokens, progress.served = [], self._served
        has_progress = any(progress.tokens)
        status, response = await self._post(lease, body)
        if has_progress and status == 400:  # what was kept is of no use: from the beginning
            progress.tokens = []
            status, response = await self._post(lease, body)
        if status in _RETRY_STATUSES:
            raise EngineBusy
        return _result(lease, status, response)

    async def _post(self, lease: Lease, body: bytes) -> tuple[int, bytes]:
        caller, prefix = self._caller_named(lease.tenant), _ID_PREFIXES.get(lease.endpoint)
        if prefix is None or not self._served:
            return await post(self._app, lease.endpoint, body, caller)
        digest = blake2b(lease.request_id.encode(), digest_size=16).digest()
        point = ResumePoint(
            id=prefix + digest.hex(),
            created=int(time.time()),
            seed=int.from_bytes(digest[:8], "little") >> 2,  # the same in whichever process
            tokens=tuple(map(tuple, lease.progress.tokens)),
        )
        log = TokenLog(lease.progress.tokens)
        lease.progress.tokens = log.choices
        data = with_field(body, RESUME_FIELD, point)
        return await post(self._app, lease.endpoint, data, caller, log)


async def post(
    app: ASGIApp,
    path: str,
    body: bytes,
    caller: Caller = ANONYMOUS,
    log: TokenLog | None = None,
) -> tuple[int, bytes]:
    """Status and body of the response to `POST path`. The client never disconnects.

    `log` gets the tokens of a body with a resume point.
    """
    sent: list[Message] = []
    incoming: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not incoming:
            await asyncio.Event().wait()  # until the response is complete and this is cancelled
        return incoming.pop()

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {**_scope(path, len(body)), CALLER: caller}
    if log is not None:
        scope[LOG_KEY] = log
        scope["headers"] = [*scope["headers"], (RESUMABLE_HEADER.encode(), b"1")]
    await app(scope, receive, send)
    start = next(message for message in sent if message["type"] == "http.response.start")
    chunks = (m.get("body", b"") for m in sent if m["type"] == "http.response.body")
    return int(start["status"]), b"".join(chunks)


def _body(lease: Lease) -> bytes:
    return bytes(msgspec.json.decode(lease.text, type=_BatchLine).body)


def _is_streamed(body: bytes) -> bool:
    """Whether a body asks for a stream. What cannot be read is left for the app to refuse."""
    try:
        stream = msgspec.json.decode(body, type=_BatchBody).stream
    except DECODE_ERRORS:
        return False
    return bytes(stream) not in (b"null", b"false", b"0")


def with_field(body: bytes, name: str, value: Any) -> bytes:
    """A JSON object with one more field, which counts if the object has it already."""
    head, field = body.rstrip()[:-1].rstrip(), msgspec.json.encode({name: value})[1:]
    return head + (b"" if head.endswith(b"{") else b",") + field


def fingerprint(info: EngineInfo) -> str:
    """What has to be equal for one process to continue another's answer."""
    return f"{info.model} {info.weight_bytes} {info.compute_dtype} {info.device}"


class _BackgroundEngine:
    """Delegates to an engine, and submits requests in the background class."""

    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def listen(
        self, prompt: str | Sequence[int], sampling: Sampling, sink: EventSink, **terms: Any
    ) -> Callable[[], None]:
        return await self._engine.listen(prompt, sampling, sink, **{**terms, "background": True})


def background_engine(engine: ServedEngine) -> ServedEngine:
    """`engine`, to which every request is submitted in the background class.

    An app over it responds as the online app does: with the same checks, defaults and fields. It
    has separate metrics, so that latencies of batch requests do not mix with interactive ones.
    """
    return cast("ServedEngine", _BackgroundEngine(engine))


def _scope(path: str, length: int) -> Scope:
    headers = {b"host": _HOST, b"content-type": b"application/json"}
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [*headers.items(), (b"content-length", str(length).encode())],
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 80),
    }


def _result(lease: Lease, status: int, response: bytes) -> BatchResult:
    """The line of the output or error file, and the tokens to charge."""
    try:
        usage = msgspec.json.decode(response, type=_ResponseBody).usage or _ResponseTokens()
    except DECODE_ERRORS:
        return failed_result(lease, "server_error", "the server's response is not JSON")
    line = {
        "id": lease.request_id,
        "custom_id": lease.custom_id,
        "response": {
            "status_code": status,
            "request_id": lease.request_id,
            "body": msgspec.Raw(response),
        },
        "error": None,
    }
    details = usage.prompt_tokens_details or usage.input_tokens_details or _TokenDetails()
    return BatchResult(
        lease=lease,
        succeeded=200 <= status < 300,
        line=msgspec.json.encode(line),
        prompt_tokens=usage.prompt_tokens or usage.input_tokens or 0,
        cached_tokens=details.cached_tokens or 0,
        completion_tokens=usage.completion_tokens or usage.output_tokens or 0,
    )
