"""The checks that every request passes before any route.

    Host     a web page lured to this port names another host: DNS rebinding ends here
    Origin   pages of other sites may not call us; CORS is empty unless origins were allowed
    headers  limited in number and size
    drain    a server that is stopping starts nothing new
    budget   every POST and DELETE is charged to its key before its body is read
    key      required for every path but `OPEN_PATHS`, whether a route exists or not

Paths are compared as the router compares them: decoded, whole, not normalised. A path that is not
in the list needs a key, so that a route added later is protected too.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections.abc import Awaitable, Callable, Iterable
from functools import lru_cache
from itertools import chain
from urllib.parse import urlsplit

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ridgeline.serve.auth.keys import ANONYMOUS, Caller, KeyRing
from ridgeline.serve.drain import DrainState
from ridgeline.serve.errors import ApiError, error_response

OPEN_PATHS = frozenset(("/", "/health", "/ping", "/ready"))
"""Paths without a key; `/` is a page without data."""
CALLER = "ridgeline.caller"
"""Where a scope keeps its `Caller`. A batch request, which comes from no connection, brings it."""

_MAX_HEADER_BYTES = 32 << 10
_MAX_HEADERS = 100
_MAX_SHOWN_HOST = 100  # characters of a refused Host in the error
_HOST = re.compile(rb"(\[[0-9A-Fa-f:.]+(%[\w.~-]+)?\]|[\w.~%!$&'()*+,;=-]*)(:[0-9]*)?", re.ASCII)
_REFUSAL_REASONS = {
    400: "host",
    401: "key",
    403: "forbidden",
    429: "rate_limit",
    431: "headers",
    503: "draining",
}
_HIDDEN_HEADERS = {b"date", b"connection", b"content-length", b"content-type", b"cache-control"}
_DEFAULT_HEADERS = b"authorization, content-type, x-api-key, x-request-id"
_SAFE_HEADERS = [(b"x-content-type-options", b"nosniff")]


class AccessPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Who may send requests. `hosts` empty: IP addresses and localhost, or any name with a key;
    `*` among them: any name.

    `charge` is called with the caller of every POST and DELETE that needs a key, and raises
    ApiError 429 if its budget is used up. `count_refused` is called with the reason of every
    refusal.
    """

    keys: KeyRing
    drain: DrainState
    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()
    admin_only: bool = False
    charge: Callable[[Caller], None] | None = None
    count_refused: Callable[[str], None] = lambda _reason: None


class AccessMiddleware:
    """ASGI middleware that applies an `AccessPolicy`, and puts the `Caller` into the scope."""

    def __init__(self, app: ASGIApp, policy: AccessPolicy) -> None:
        self._app, self._policy = app, policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        policy, is_batch_request, has_started = self._policy, CALLER in scope, False
        headers = dict(scope["headers"])
        origin = headers.get(b"origin", b"").decode("latin-1")
        added = [*_SAFE_HEADERS, *(_cors_headers(origin) if origin in policy.origins else ())]

        def send_with_headers(message: Message) -> Awaitable[None]:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                sent = message.get("headers", ())
                exposed = _exposed_headers(sent) if origin in policy.origins else ()
                message = {**message, "headers": [*sent, *added, *exposed]}
            return send(message)  # not awaited here: a coroutine less for every token

        try:
            is_preflight = self._check(scope, headers, origin)
        except ApiError as error:
            policy.count_refused(_REFUSAL_REASONS.get(error.status_code, "other"))
            await error_response(error, scope["path"])(scope, receive, send_with_headers)
            return
        if is_preflight:
            await _preflight_response(headers)(scope, receive, send_with_headers)
            return
        with policy.drain:
            try:
                await self._app(scope, receive, send_with_headers)
            except asyncio.CancelledError:  # the server stops and does not wait any longer
                if is_batch_request:
                    raise
                if not has_started:  # else the server closes the connection: it is incomplete
                    refusal = error_response(policy.drain.refusal(), scope["path"])
                    await refusal(scope, receive, send_with_headers)

    def _check(self, scope: Scope, headers: dict[bytes, bytes], origin: str) -> bool:
        """True for a CORS preflight that is allowed; ApiError for a request that is not."""
        _check_header_size(scope)
        _check_host_header(scope, headers)
        host = headers.get(b"host", b"").decode("latin-1")
        # Load balancers probe in HTTP/1.0 without a Host; browsers, which can be lured, send one.
        if b"host" in headers or self._policy.hosts:
            self._check_host(host)
        if origin and origin not in self._policy.origins and _authority(origin) != host:
            raise ApiError(403, "pages of this Origin may not call this server")
        if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
            return True
        if scope["path"] not in OPEN_PATHS:
            scope[CALLER] = self._authenticate(scope, headers)
            if self._policy.drain.is_draining and scope["method"] not in ("GET", "HEAD"):
                raise self._policy.drain.refusal()
            if self._policy.charge is not None and scope["method"] in ("POST", "DELETE"):
                self._policy.charge(scope[CALLER])
        return False

    def _authenticate(self, scope: Scope, headers: dict[bytes, bytes]) -> Caller:
        keys = self._policy.keys
        if not keys:
            return caller_of(scope)
        caller = keys.find(_sent_key(headers))
        if caller is None:
            challenge = {"www-authenticate": "Bearer"}
            raise ApiError(401, "the API key is missing or wrong", headers=challenge)
        if self._policy.admin_only and not caller.admin:
            raise ApiError(403, "this API key is not an administrator's")
        return caller

    def _check_host(self, host: str) -> None:
        policy, name = self._policy, _host_name(host)
        if name in policy.hosts or "*" in policy.hosts or (not policy.hosts and policy.keys):
            return
        if not _is_local_name(name):
            raise ApiError(
                403,
                f"this server does not serve the Host {name[:_MAX_SHOWN_HOST]!r}; "
                "fix: start it with --allowed-hosts and this name",
            )


def caller_of(scope: Scope) -> Caller:
    """Who sent a request that has passed the middleware."""
    caller = scope.get(CALLER)
    return caller if isinstance(caller, Caller) else ANONYMOUS


def is_loopback(host: str) -> bool:
    """Whether an address to listen on can only be reached from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _authority(origin: str) -> str | None:
    """Host and port of an Origin; None if it is malformed."""
    try:
        return urlsplit(origin).netloc
    except ValueError:  # e.g. an unclosed bracket
        return None


def _sent_key(headers: dict[bytes, bytes]) -> bytes:
    """`Authorization: Bearer KEY`, or Anthropic's `x-api-key: KEY`."""
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return key if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")


def _check_host_header(scope: Scope, headers: dict[bytes, bytes]) -> None:
    """One valid Host header, as RFC 9112, 3.2 demands; ApiError 400 otherwise."""
    if sum(name == b"host" for name, _ in scope["headers"]) > 1:
        raise ApiError(400, "the request has several Host headers")
    if b"host" not in headers and scope["http_version"] == "1.1":
        raise ApiError(400, "the request has no Host header")
    if not _HOST.fullmatch(headers.get(b"host", b"")):
        raise ApiError(400, "the Host header is neither HOST nor HOST:PORT")


def _check_header_size(scope: Scope) -> None:
    headers = scope["headers"]
    size = sum(map(len, chain.from_iterable(headers))) + len(scope["query_string"])
    if len(headers) > _MAX_HEADERS or size + len(scope["path"]) > _MAX_HEADER_BYTES:
        limit = f"{_MAX_HEADERS} headers, {_MAX_HEADER_BYTES} bytes"
        raise ApiError(431, f"the request's headers are too large; limit: {limit}")


def _host_name(host: str) -> str:
    """The name or address of a valid Host header, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


@lru_cache(maxsize=64)
def _is_local_name(name: str) -> bool:
    """Whether no DNS server can rebind the name: an IP address, or localhost."""
    if name == "localhost":
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _cors_headers(origin: str) -> list[tuple[bytes, bytes]]:
    return [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"origin")]


def _exposed_headers(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The header that lets pages read the response's others, but for those that browsers manage."""
    names = sorted({name.lower() for name, _ in headers} - _HIDDEN_HEADERS)
    return [(b"access-control-expose-headers", b", ".join(names))] if names else []


def _preflight_response(headers: dict[bytes, bytes]) -> Response:
    """Whatever headers an allowed origin asks to send: clients add new ones in every version."""
    requested = headers.get(b"access-control-request-headers", _DEFAULT_HEADERS).decode("latin-1")
    allowed = {
        "access-control-allow-methods": "GET, POST, DELETE",
        "access-control-allow-headers": requested,
        "access-control-max-age": "600",
        "vary": "access-control-request-headers",
    }
    if headers.get(b"access-control-request-private-network") == b"true":
        allowed["access-control-allow-private-network"] = "true"
    return Response(status_code=204, headers=allowed)
