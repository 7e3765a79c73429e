"""From a leased line to its outcome: a request to an app within this process, without a socket.

What the app answers is what the line's client would have got online. A refusal that will pass (429,
503) makes the line wait; any other answer is final: 2xx for the output file, the rest for the error
file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Scope

from ridgeline.serve.auth.keys import NOBODY, Caller
from ridgeline.serve.auth.middleware import CALLER
from ridgeline.serve.batch.records import Lease, Outcome
from ridgeline.serve.batch.worker import Busy, failed

_PASSING = (429, 503)
_HOST = b"127.0.0.1"


class _Request(msgspec.Struct):
    body: dict[str, Any]


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    """Of a completion, or under the Responses API's names."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


class InProcess:
    """Answers lines with `app`; `caller` says who a tenant is there."""

    def __init__(self, app: ASGIApp, caller: Callable[[str], Caller] = lambda _: NOBODY) -> None:
        self._app, self._caller = app, caller

    async def __call__(self, lease: Lease) -> Outcome:
        body = msgspec.json.decode(lease.text, type=_Request).body
        if body.get("stream"):
            return failed(lease, "invalid_request", "a batch line cannot be streamed")
        sent = msgspec.json.encode(body)
        status, answer = await post(self._app, lease.endpoint, sent, self._caller(lease.tenant))
        if status in _PASSING:
            raise Busy
        return _outcome(lease, status, answer)


async def post(app: ASGIApp, path: str, body: bytes, caller: Caller = NOBODY) -> tuple[int, bytes]:
    """Status and body of `POST path` by `caller`. It never hangs up before the answer."""
    sent: list[Message] = []
    incoming: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not incoming:
            await asyncio.Event().wait()  # until the answer is there, and this is cancelled
        return incoming.pop()

    async def send(message: Message) -> None:
        sent.append(message)

    await app({**_scope(path, len(body)), CALLER: caller}, receive, send)
    start = next(message for message in sent if message["type"] == "http.response.start")
    pieces = (m.get("body", b"") for m in sent if m["type"] == "http.response.body")
    return int(start["status"]), b"".join(pieces)


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


def _outcome(lease: Lease, status: int, answer: bytes) -> Outcome:
    """The line of the output or error file, and what it is charged for."""
    try:
        usage = msgspec.json.decode(answer, type=_Answer).usage or _Usage()
        body = msgspec.Raw(answer)
    except msgspec.DecodeError:
        return failed(lease, "server_error", "the server's answer is not JSON")
    result = {
        "id": lease.request_id,
        "custom_id": lease.custom_id,
        "response": {"status_code": status, "request_id": lease.request_id, "body": body},
        "error": None,
    }
    succeeded = 200 <= status < 300
    details = usage.prompt_tokens_details or usage.input_tokens_details or _Details()
    return Outcome(
        lease=lease,
        succeeded=succeeded,
        result=msgspec.json.encode(result),
        prompt_tokens=usage.prompt_tokens or usage.input_tokens or 0,
        cached_tokens=details.cached_tokens or 0,
        completion_tokens=usage.completion_tokens or usage.output_tokens or 0,
    )
