"""How routes read their bodies: as JSON whatever the content type, within limits of size and time.

FastAPI validates a body against the route's model; errors are translated by `app.py`.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Callable, Coroutine
from contextlib import closing
from functools import partial
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.types import Message

from ridgeline.serve.auth.middleware import caller_of
from ridgeline.serve.bodies.json_bounds import (
    BYTES_PER_VALUE,
    MAX_FIELDS,
    SMALL_BODY_BYTES,
    check_json_bounds,
)
from ridgeline.serve.bodies.memory import BodyMemory, BodyReservation
from ridgeline.serve.bodies.turns import BodyTurns
from ridgeline.serve.errors import ApiError, ClientDisconnected
from ridgeline.serve.generation.handover import (
    TRANSFER_FIELD,
    TRANSFER_KEY,
    read_transfer_params,
)
from ridgeline.serve.generation.resume import (
    RESUMABLE_HEADER,
    RESUME_FIELD,
    SCOPE_KEY,
    read_resume_point,
)

_CLOSE = {"connection": "close"}


class BodyLimits(msgspec.Struct, frozen=True):
    """Largest JSON body, and how long it may take to arrive. In `app.state.body_limits`."""

    max_bytes: int
    timeout_s: float


class JsonRequest(Request):
    """A request whose body is JSON.

    `body` raises ApiError 415 for a compressed body, 413 before more than `max_bytes` are in
    memory, 503 if all bodies that are held leave no room for it, and 408 if it takes longer than
    `timeout_s` to arrive. `json` raises 400 for a body with too many values before it is parsed.
    """

    reservation: BodyReservation

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            limits: BodyLimits = self.app.state.body_limits
            refuse_compressed(self.headers.get("content-encoding", ""))
            declared = self.headers.get("content-length", "")
            if declared.isdecimal() and int(declared) > limits.max_bytes:
                raise _too_large(limits)
            try:
                async with asyncio.timeout(limits.timeout_s):
                    self._body = await self._read(limits)
            except TimeoutError:
                message = f"the request body did not arrive within {limits.timeout_s:g} s"
                raise ApiError(408, message, headers=_CLOSE) from None
        return self._body

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            body = (await self.body()).removeprefix(codecs.BOM_UTF8)
            limits: BodyLimits = self.app.state.body_limits
            parse = partial(_parse, body, limits.max_bytes // BYTES_PER_VALUE)
            try:
                is_small = len(body) <= SMALL_BODY_BYTES
                turns: BodyTurns = self.app.state.body_turns
                self._json = parse() if is_small else await turns.parse(parse)
            except ValueError as error:
                message = f"the request body is not a JSON object: {error}"
                raise ApiError(400, message) from None
            self._take_private_fields(self._json)
        return self._json

    def _take_private_fields(self, body: Any) -> None:
        """Move a gateway's fields from the body, which no API defines, to the scope."""
        if not isinstance(body, dict):
            return
        if RESUMABLE_HEADER in self.headers and RESUME_FIELD in body:
            self.scope[SCOPE_KEY] = read_resume_point(body.pop(RESUME_FIELD))
        if TRANSFER_FIELD in body:
            self.scope[TRANSFER_KEY] = read_transfer_params(body.pop(TRANSFER_FIELD))

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
            self.reservation.add(len(chunk))
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
            json_request = JsonRequest({**request.scope, "headers": headers}, request.receive)
            memory: BodyMemory = request.app.state.body_memory
            with closing(memory.reserve(caller_of(request.scope).name)) as reservation:
                json_request.reservation = reservation
                return await handle(json_request)

        return handle_json


def _parse(body: bytes, max_values: int) -> Any:
    check_json_bounds(body, max_values)
    fields = from_json(body)
    if isinstance(fields, dict) and len(fields) > MAX_FIELDS:
        message = f"the JSON of the request body has too many fields: {len(fields)}"
        raise ApiError(400, f"{message}; limit: {MAX_FIELDS}; fix: leave unknown fields out")
    return fields


def refuse_compressed(encoding: str) -> None:
    """ApiError 415 for a body whose Content-Encoding says that it is compressed."""
    if encoding.strip().lower() not in ("", "identity"):
        message = f"a request body cannot be compressed; got Content-Encoding: {encoding[:40]}"
        raise ApiError(415, f"{message}; fix: send it as it is", headers=_CLOSE)


def _too_large(limits: BodyLimits) -> ApiError:
    return ApiError(413, f"the request body is too large; limit: {limits.max_bytes} bytes")
