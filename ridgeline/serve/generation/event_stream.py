"""Bytes on the connection: bodies as they come in, server-sent events as they go out.

Starlette runs a plain handler to its end even when nobody is left to read the answer. Here every
wait on the engine ends when the client hangs up (`UntilGone`), for streams and plain answers alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ridgeline.serve.errors import ApiError, ClientGone, as_api_error, body
from ridgeline.serve.http.stream_writer import Outlet, UntilGone, connection_of

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
    connection = connection_of(request.scope)
    if connection is not None and connection.has_whole_body:
        return await _read(request, max_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            return await _read(request, max_bytes)
    except TimeoutError:
        message = f"the request body did not come within {timeout_s:g} s"
        raise ApiError(408, message, headers={"connection": "close"}) from None


async def _read(request: Request, max_bytes: int) -> bytes:
    chunks, size, more = [], 0, True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk, more = message.get("body", b""), message.get("more_body", False)
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the request body is too large; limit: {max_bytes} bytes")


class Source(Protocol):
    """Where a stream's events come from."""

    frames: Frames

    async def run(self, outlet: Outlet) -> bytes:
        """Put what comes, as it comes; what is left to say at the end."""
        ...

    def close(self) -> None: ...


_STREAM_HEADERS = (
    (b"cache-control", b"no-cache"),
    (b"content-type", b"text/event-stream; charset=utf-8"),
)


class EventStream(Response):
    """A stream of server-sent events; whatever happens, `source` is closed when it ends.

    The headers go out with the first piece: an error before it is an answer with a status of its
    own, one after it an error object in the stream, as clients expect.
    """

    def __init__(self, source: Source, headers: Mapping[str, str]) -> None:
        super().__init__(headers=headers)
        self._source = source

    def init_headers(self, headers: Mapping[str, str] | None = None) -> None:
        """Starlette's names a length, which a stream has not."""
        given = [
            (name.encode(), value.encode("latin-1")) for name, value in (headers or {}).items()
        ]
        self.raw_headers = [*given, *_STREAM_HEADERS]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        outlet = Outlet(send, connection_of(scope), start)
        with contextlib.suppress(ClientGone, OSError):
            try:
                async with UntilGone(scope, receive):
                    await outlet.end(await self._all(outlet) + self._source.frames.end)
            finally:
                self._source.close()  # first: what a courier has sent is the outlet's to know
                await outlet.close()

    async def _all(self, outlet: Outlet) -> bytes:
        """What is left to say at the end."""
        try:
            return await self._source.run(outlet)
        except ClientGone:
            raise
        except Exception as error:
            told = as_api_error(error)
            if told.status == 500:
                log.exception("a stream failed")
            if not outlet.has_begun:
                raise told from None
            return self._source.frames.error(told)
