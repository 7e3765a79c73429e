"""Bytes on the connection: server-sent events, and noticing that the client has hung up.

Starlette runs a plain handler to its end even when nobody is left to read the answer. Here every
wait on the engine races the client's `http.disconnect`, for streams and for plain answers alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ridgeline.serve.errors import ApiError, ClientGone, as_api_error, body
from ridgeline.serve.outlet import outlet

Result = TypeVar("Result")
log = logging.getLogger("ridgeline.serve")

DONE = b"data: [DONE]\n\n"


def encode(payload: object) -> bytes:
    """JSON bytes of plain builtins."""
    return msgspec.json.encode(payload)


def sse(payload: object) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(payload) + b"\n\n"


@dataclass(frozen=True, slots=True)
class Frames:
    """How a stream tells that it broke, and that it is over."""

    error: Callable[[ApiError], bytes]
    end: bytes


OPENAI_FRAMES = Frames(lambda error: sse(body(error)), DONE)


async def read_body(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """The request's body. ApiError 413 before more than `max_bytes` are in memory, 408 where it
    takes longer than `timeout_s` to come."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            return await _read(request, max_bytes)
    except TimeoutError:
        message = f"the request body did not come within {timeout_s:g} s"
        raise ApiError(408, message, headers={"connection": "close"}) from None


async def _read(request: Request, max_bytes: int) -> bytes:
    chunks, size = [], 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > max_bytes:
                raise _too_large(max_bytes)
            chunks.append(chunk)
    except ClientDisconnect:
        raise ClientGone from None
    return b"".join(chunks)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the request body is too large; limit: {max_bytes} bytes")


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`; if the client hangs up first, `work` is cancelled: ClientGone.

    The body must have been read: from then on `receive` answers only with the disconnect.
    """
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            return worker.result()
        raise ClientGone
    finally:
        watcher.cancel()
        worker.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


class Source(Protocol):
    """Where a stream's events come from."""

    frames: Frames

    async def run(self, put: Callable[[bytes], None]) -> bytes:
        """Put what comes, as it comes; what is left to say at the end."""
        ...

    def close(self) -> None: ...


class EventStream(Response):
    """A stream of server-sent events; whatever happens, `source` is closed when it ends.

    An error after the headers are out becomes an error object in the stream, as clients expect.
    """

    media_type = "text/event-stream"

    def __init__(self, source: Source, headers: Mapping[str, str]) -> None:
        super().__init__(headers={**headers, "cache-control": "no-cache"})
        del self.headers["content-length"]
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.closing(self._source), contextlib.suppress(ClientGone, OSError):
            await unless_gone(receive, self._send_all(scope, send))

    async def _send_all(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with outlet(scope, send) as body:
            try:
                last = await self._source.run(body.put)
            except Exception as error:
                told = as_api_error(error)
                if told.status == 500:
                    log.exception("a stream failed")
                last = self._source.frames.error(told)
            body.end(last + self._source.frames.end)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
