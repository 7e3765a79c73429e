"""How routes read their bodies: as JSON whatever the content type, within limits of size and time.

FastAPI validates a body against the route's model; errors are translated by `app.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.types import Message

from ridgeline.serve.errors import ApiError, ClientDisconnected


class BodyLimits(msgspec.Struct, frozen=True):
    """Largest JSON body, and how long it may take to arrive. In `app.state.body_limits`."""

    max_bytes: int
    timeout_s: float


class JsonRequest(Request):
    """A request whose body is JSON.

    `body` raises ApiError 413 before more than `max_bytes` are in memory, and 408 if the body takes
    longer than `timeout_s` to arrive.
    """

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            limits: BodyLimits = self.app.state.body_limits
            declared = self.headers.get("content-length", "")
            if declared.isdecimal() and int(declared) > limits.max_bytes:
                raise _too_large(limits)
            try:
                async with asyncio.timeout(limits.timeout_s):
                    self._body = await self._read(limits)
            except TimeoutError:
                message = f"the request body did not arrive within {limits.timeout_s:g} s"
                raise ApiError(408, message, headers={"connection": "close"}) from None
        return self._body

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            try:
                self._json = from_json(await self.body())
            except ValueError as error:
                message = f"the request body is not a JSON object: {error}"
                raise ApiError(400, message) from None
        return self._json

    async def _read(self, limits: BodyLimits) -> bytes:
        chunks, size, more = [], 0, True
        while more:
            message: Message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            chunk, more = message.get("body", b""), message.get("more_body", False)
            size += len(chunk)
            if size > limits.max_bytes:
                raise _too_large(limits)
            chunks.append(chunk)
        return b"".join(chunks)


class JsonRoute(APIRoute):
    """A route whose body, if it declares one, is read as a `JsonRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle

        async def handle_json(request: Request) -> Response:
            # clients leave the content type out, or send curl's default: FastAPI would refuse both
            headers = [pair for pair in request.scope["headers"] if pair[0] != b"content-type"]
            headers.append((b"content-type", b"application/json"))
            return await handle(JsonRequest({**request.scope, "headers": headers}, request.receive))

        return handle_json


def _too_large(limits: BodyLimits) -> ApiError:
    return ApiError(413, f"the request body is too large; limit: {limits.max_bytes} bytes")
