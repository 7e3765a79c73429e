"""ASGI middleware for what HTTP asks of every route: HEAD, HTTP/1.0, and a limit on requests."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ridgeline.serve.errors import ApiError, error_response


class HttpMiddleware:
    """Answers HEAD as GET, sends HTTP/1.0 clients no chunks, and limits requests in progress.

    `max_requests`: a client that disconnects frees its connection at once, but its request only
    when the request notices. Without this limit, a flood of such clients would fill the memory.
    """

    def __init__(self, app: ASGIApp, max_requests: int) -> None:
        self._app, self._max_requests, self._num_requests = app, max_requests, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["http_version"] == "1.0":
            send = _with_content_length(send)
        if scope["method"] == "HEAD":  # the server drops the body
            scope = {**scope, "method": "GET"}
        if self._num_requests >= self._max_requests:
            limit = f"limit: {self._max_requests} (--max-num-connections)"
            error = ApiError(503, f"too many requests are in progress; {limit}")
            await error_response(error, scope["path"])(scope, receive, send)
            return
        self._num_requests += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_requests -= 1


def _with_content_length(send: Send) -> Send:
    """Collect a body of unknown length and send it with its length: HTTP/1.0 has no chunked
    encoding (RFC 9112, 6.1), which uvicorn would use all the same."""
    start: Message | None = None
    chunks: list[bytes] = []

    async def collect(message: Message) -> None:
        nonlocal start
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", ())}
            if b"content-length" not in names:
                start = message
                return
        if start is None:
            await send(message)
            return
        chunks.append(message.get("body", b""))
        if not message.get("more_body", False):
            body = b"".join(chunks)
            length = (b"content-length", str(len(body)).encode())
            await send({**start, "headers": [*start.get("headers", ()), length]})
            await send({"type": "http.response.body", "body": body})

    return collect
