"""The front door: every request passes here before any route sees it.

    Host     a browser that was lured to this port says another name: DNS rebinding ends here
    Origin   a page of another site may not call us; CORS is empty unless origins were allowed
    headers  no more of them than a client needs
    drain    once the server is stopping, nothing new is begun
    key      deny by default: every path but `OPEN_PATHS` wants a key, routed or not

Paths are compared as the router compares them: decoded, whole, and without normalising. What is
not in the list is closed, so that a route added tomorrow is closed too.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable
from functools import lru_cache
from itertools import chain
from typing import Any
from urllib.parse import urlsplit

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ridgeline.serve import errors
from ridgeline.serve.auth.keys import NOBODY, Caller, KeyRing
from ridgeline.serve.drain import Drain
from ridgeline.serve.errors import ApiError
from ridgeline.serve.http.stream_writer import ADDED_HEADERS, Connection, connection_of

OPEN_PATHS = frozenset(("/", "/health", "/ping", "/ready"))  # "/" is a page without data
CALLER = "ridgeline.caller"  # where a scope keeps its Caller

_MAX_HEADER_BYTES = 32 << 10
_MAX_HEADERS = 100


class Door(msgspec.Struct, frozen=True, kw_only=True):
    """Who may come in. `hosts` empty: IP addresses and localhost, or any name that has a key."""

    ring: KeyRing
    drain: Drain
    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()
    open_paths: frozenset[str] = OPEN_PATHS
    admin_only: bool = False
    refused: Callable[[str], None] = lambda _reason: None


class Guard:
    """See the head of this file."""

    def __init__(self, app: ASGIApp, door: Door) -> None:
        self._app, self._door = app, door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return  # nothing else is served
        headers = dict(scope["headers"])
        origin = headers.get(b"origin", b"").decode("latin-1")
        allowed = origin if origin in self._door.origins else ""
        if allowed:
            send = _adding(send, _origin_headers(allowed))
        try:
            preflight = self._check(scope, headers, origin)
        except ApiError as error:
            self._door.refused(_REASONS.get(error.status, "other"))
            await errors.response(error, scope["path"])(scope, receive, send)
            return
        if preflight:
            await _preflight_answer()(scope, receive, send)
            return
        with self._door.drain:
            scope[ADDED_HEADERS] = [*_SAFE_HEADERS, *(_origin_headers(allowed) if allowed else ())]
            send = _adding(send, _SAFE_HEADERS)
            try:
                await self._app(scope, receive, send)
            except asyncio.CancelledError:  # by a server that stops: nobody else cancels a request
                connection = connection_of(scope)
                if connection is None:
                    raise  # a batch line, whose worker gives it back
                await self._cut_off(connection, scope, receive, send)

    async def _cut_off(
        self, connection: Connection, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """The last word to whoever is still here: there is no second one in an answer."""
        if connection.has_begun:
            connection.cut()
            await asyncio.sleep(0)  # uvicorn hears of it, and does not miss the end of the answer
        else:
            refusal = self._door.drain.refusal()
            await errors.response(refusal, scope["path"])(scope, receive, send)

    def _check(self, scope: Scope, headers: dict[bytes, bytes], origin: str) -> bool:
        """True for a CORS preflight that is welcome; ApiError for whoever is not."""
        _check_size(scope)
        host = headers.get(b"host", b"").decode("latin-1")
        self._check_host(host)
        if origin:
            self._check_origin(origin, host)
        if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
            return True
        is_open = scope["path"] in self._door.open_paths
        if not is_open:
            scope[CALLER] = self._caller(scope, headers)
            if self._door.drain.is_draining and scope["method"] not in ("GET", "HEAD"):
                raise self._door.drain.refusal()
        return False

    def _caller(self, scope: Scope, headers: dict[bytes, bytes]) -> Caller:
        ring = self._door.ring
        if not ring:
            return caller_of(scope)  # a batch line brings whose it is; a connection brings nobody
        found = ring.find(_given_key(headers))
        if found is None:
            raise ApiError(
                401, "the API key is missing or wrong", headers={"www-authenticate": "Bearer"}
            )
        if self._door.admin_only and not found.admin:
            raise ApiError(403, "this key is not an administrator's")
        return found

    def _check_host(self, host: str) -> None:
        door, name = self._door, _host_name(host)
        if name in door.hosts or (not door.hosts and door.ring):
            return
        if not _is_local_name(name):
            raise ApiError(403, "this server does not answer to that Host; see --allowed-hosts")

    def _check_origin(self, origin: str, host: str) -> None:
        if origin not in self._door.origins and urlsplit(origin).netloc != host:
            raise ApiError(403, "pages of that Origin may not call this server")


_REASONS = {401: "key", 403: "forbidden", 431: "headers", 503: "draining"}


def caller_of(scope: Scope) -> Caller:
    """Who sent a request that has passed the guard."""
    found: Any = scope.get(CALLER, NOBODY)
    return found if isinstance(found, Caller) else NOBODY


def _given_key(headers: dict[bytes, bytes]) -> bytes:
    """`Authorization: Bearer KEY`, or Anthropic's `x-api-key: KEY`."""
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return key if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")


def _check_size(scope: Scope) -> None:
    headers = scope["headers"]
    size = sum(map(len, chain.from_iterable(headers))) + len(scope["query_string"])
    if len(headers) > _MAX_HEADERS or size + len(scope["path"]) > _MAX_HEADER_BYTES:
        limit = f"{_MAX_HEADERS} headers, {_MAX_HEADER_BYTES} bytes"
        raise ApiError(431, f"the request's headers are too large; limit: {limit}")


def _host_name(host: str) -> str:
    """The name without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


@lru_cache(maxsize=64)  # nearly every request says the same one
def _is_local_name(name: str) -> bool:
    """Names that nobody can rebind: an address is itself, localhost is this machine."""
    if name == "localhost":
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether an address to listen on is reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


_SAFE_HEADERS = [(b"x-content-type-options", b"nosniff")]


def _origin_headers(origin: str) -> list[tuple[bytes, bytes]]:
    return [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"origin")]


def _adding(send: Send, headers: list[tuple[bytes, bytes]]) -> Send:
    async def adding(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), *headers]}
        await send(message)

    return adding


def _preflight_answer() -> Response:
    return Response(
        status_code=204,
        headers={
            "access-control-allow-methods": "GET, POST, DELETE",
            "access-control-allow-headers": "authorization, content-type, x-api-key, x-request-id",
            "access-control-max-age": "600",
        },
    )
