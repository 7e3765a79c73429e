"""The client's side of a request: reading its body, and writing the response once."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from starlette.types import Receive, Send

from ridgeline.fleet.upstream import Headers
from ridgeline.serve.errors import ApiError, ClientDisconnected, anthropic_error_body, error_body
from ridgeline.serve.generation.event_stream import named_sse, sse

EVENT_IDS_HEADER = b"x-ridgeline-event-ids"
_DONE = b"data: [DONE]\n\n"


class ClientResponse:
    """The response to one request. It starts with its first bytes.

    `has_event_ids`: the client wants ids, with which it can continue after losing its connection;
    `last_event_id`: it does that now.
    """

    def __init__(self, path: str, send: Send, request_headers: Headers | None = None) -> None:
        self._path, self._send = path, send
        by_name = dict(request_headers or ())
        self.last_event_id = by_name.get(b"last-event-id", b"").decode("latin-1")
        self.has_event_ids = EVENT_IDS_HEADER in by_name or bool(self.last_event_id)
        self.has_started = False
        self._blocked: _Rest | None = None

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """The whole response."""
        length = (b"content-length", b"%d" % len(body))
        await self.start(status, [*headers, length])
        await self._send({"type": "http.response.body", "body": body})

    async def start(self, status: int, headers: Headers) -> None:
        self.has_started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    def write(self, data: bytes) -> bool:
        """Write at once; False if the client reads too slowly: call `drain` before the next."""
        sending = self._send({"type": "http.response.body", "body": data, "more_body": True})
        coroutine = sending.__await__()
        try:
            self._blocked = _Rest(coroutine, next(coroutine))
        except StopIteration:
            return True
        return False

    async def drain(self) -> None:
        """Wait until the client has read enough."""
        if self._blocked is not None:
            blocked, self._blocked = self._blocked, None
            await blocked

    async def end(self, data: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": data})

    async def fail(self, error: ApiError) -> None:
        """End a stream with an error event of its API."""
        if self._path == "/v1/messages":
            await self.end(named_sse("error", anthropic_error_body(error)))
        elif self._path == "/v1/responses":
            detail = {"type": "error", "code": str(error.status_code), "message": error.message}
            await self.end(named_sse("error", {**detail, "param": None}))
        else:
            await self.end(sse(error_body(error)) + _DONE)


class _Rest:
    """What is left of a `send` that was begun outside of a task, and waits for `future`."""

    def __init__(self, coroutine: Generator[Any, Any, None], future: Any) -> None:
        self._coroutine, self._future = coroutine, future

    def __await__(self) -> Generator[Any, Any, None]:
        yield self._future
        yield from self._coroutine


async def read_request_body(receive: Receive, max_bytes: int) -> bytes:
    """The whole body; ApiError 413 if it is too large."""
    parts, size, has_more = [], 0, True
    while has_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        part, has_more = message.get("body", b""), message.get("more_body", False)
        size += len(part)
        if size > max_bytes:
            raise ApiError(413, f"the request body is too large; limit: {max_bytes} bytes")
        parts.append(part)
    return b"".join(parts)
