"""Limits per connection, which uvicorn does not have: for clients that send or read too slowly.

    headers      complete within `header_timeout_s`, and not larger than `max_header_bytes`
    body         at least `MIN_BODY_BYTES` per `body_timeout_s` until it is complete. Routes have
                 shorter limits; this one also holds after a response that did not wait for the body
    response     read by the client at any speed; cut off if nothing is read for `send_timeout_s`
    connections  at most `max_connections`

`LimitedProtocol` is an `asyncio.Protocol` in front of uvicorn's: it forwards every call, and
follows the framing of requests with a second `httptools` parser. Nothing inside uvicorn is touched.

A request that offers another protocol (`Upgrade: h2c`, as curl --http2 and Java's HttpClient send)
is served as HTTP/1.1, which RFC 9110, 7.8 allows: the offer is removed before uvicorn's parser,
which would lose the request's body, sees it.

A request whose target is a whole URL (`GET http://host/path`) is for the host of that URL, whatever
its Host header says (RFC 9112, 3.2.2).
"""

from __future__ import annotations

import asyncio
import contextlib
from enum import Enum
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ridgeline.serve.errors import ApiError, error_body

MIN_BODY_BYTES = 64 << 10


class ConnectionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Times are in seconds."""

    max_connections: int = 4096
    header_timeout_s: float = 15.0
    max_header_bytes: int = 64 << 10
    body_timeout_s: float = 60.0
    send_timeout_s: float = 30.0


class _Phase(Enum):
    IDLE = "idle"  # between requests, where uvicorn's keep-alive timeout applies
    HEADERS = "headers"
    BODY = "body"


class OpenConnections:
    """The number of open connections of one server."""

    def __init__(self) -> None:
        self.count = 0


class LimitedProtocol(asyncio.Protocol):
    """One connection. `inner` is uvicorn's protocol for it."""

    def __init__(
        self, inner: asyncio.Protocol, limits: ConnectionLimits, connections: OpenConnections
    ) -> None:
        self._inner, self._limits, self._connections = inner, limits, connections
        self._parser: Any = _new_parser(self)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._phase = self._timed_phase = _Phase.IDLE
        self._read_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._num_bytes = 0  # of the headers, or of the body since the timer was started
        self._is_finished = False  # data that follows is dropped
        self._held = b""  # of a head that is not complete
        self._has_head = False  # since the last data
        self._is_whole = True  # `_held` begins with the head's first byte

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        # `pause_writing` is then called whenever the client has not read everything
        self._transport.set_write_buffer_limits(high=0)
        self._connections.count += 1
        self._inner.connection_made(transport)
        if self._connections.count > self._limits.max_connections:
            limit = f"limit: {self._limits.max_connections} (--max-num-connections)"
            self._refuse(ApiError(503, f"too many connections; {limit}"))
        else:
            self._phase = _Phase.HEADERS
            self._update_read_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.count -= 1
        self._stop_read_timer()
        self._stop_send_timer()
        self._inner.connection_lost(exc)
        self._parser = None  # breaks a reference cycle

    def data_received(self, data: bytes) -> None:
        if self._is_finished:
            return
        # Only a head that is held whole can be changed, not one behind another request's body.
        is_whole = self._phase is _Phase.IDLE or (self._phase is _Phase.HEADERS and self._is_whole)
        begins_in_body = self._phase is _Phase.BODY
        if self._phase is _Phase.IDLE:
            self._phase = _Phase.HEADERS
        self._num_bytes += len(data)
        self._held += data
        try:
            self._parse(data, can_change=is_whole)
        except httptools.HttpParserError:
            self._refuse(ApiError(400, "the request is not valid HTTP"))
            return
        if self._phase is _Phase.HEADERS and self._num_bytes > self._limits.max_header_bytes:
            limit = f"limit: {self._limits.max_header_bytes} bytes"
            self._refuse(ApiError(431, f"the request's headers are too large; {limit}"))
            return
        self._update_read_timer()
        if self._phase is _Phase.HEADERS and not self._has_head and not begins_in_body:
            return  # an offer of another protocol may still follow
        self._is_whole = self._phase is not _Phase.HEADERS
        held, self._held = self._held, b""
        self._inner.data_received(held)

    def _parse(self, data: bytes, *, can_change: bool) -> None:
        self._has_head = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            if can_change:
                self._held = _without_upgrade(self._held)
                self._parser = _new_parser(self)
                self._phase = _Phase.HEADERS
                with contextlib.suppress(httptools.HttpParserUpgrade):  # CONNECT
                    self._parser.feed_data(self._held)
                    return
            self._is_finished, self._phase = True, _Phase.IDLE  # uvicorn's parser stops here, too

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()
        self._start_send_timer()

    def resume_writing(self) -> None:
        self._stop_send_timer()
        self._inner.resume_writing()

    # httptools callbacks

    def on_message_begin(self) -> None:
        self._phase = _Phase.HEADERS

    def on_headers_complete(self) -> None:
        self._phase, self._num_bytes, self._has_head = _Phase.BODY, 0, True

    def on_message_complete(self) -> None:
        self._phase, self._num_bytes = _Phase.IDLE, 0

    # timers

    def _update_read_timer(self) -> None:
        """A timer runs while a request is incomplete; most requests arrive in one piece."""
        if self._phase is self._timed_phase:
            return
        self._stop_read_timer()
        if self._phase is not _Phase.IDLE:
            is_headers = self._phase is _Phase.HEADERS
            limits = self._limits
            self._start_read_timer(limits.header_timeout_s if is_headers else limits.body_timeout_s)

    def _start_read_timer(self, timeout_s: float) -> None:
        self._timed_phase = self._phase
        self._read_timer = self._loop.call_later(timeout_s, self._check_read)

    def _stop_read_timer(self) -> None:
        self._timed_phase = _Phase.IDLE
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _check_read(self) -> None:
        if self._phase is _Phase.HEADERS:
            self._refuse(ApiError(408, "the request's headers did not arrive in time"))
        elif self._num_bytes < MIN_BODY_BYTES:
            self._abort()
        else:
            self._num_bytes = 0
            self._start_read_timer(self._limits.body_timeout_s)

    def _start_send_timer(self) -> None:
        assert self._transport is not None
        self._stop_send_timer()
        num_unread = self._transport.get_write_buffer_size()
        self._send_timer = self._loop.call_later(
            self._limits.send_timeout_s, self._check_send, num_unread
        )

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _check_send(self, num_unread: int) -> None:
        assert self._transport is not None
        if self._transport.get_write_buffer_size() < num_unread:
            self._start_send_timer()  # slow, but reading
        else:
            self._abort()

    # ends

    def _refuse(self, error: ApiError) -> None:
        """Answer without the app, and close."""
        assert self._transport is not None
        self._is_finished = True
        self._stop_read_timer()
        if not self._transport.is_closing():
            self._transport.write(_response(error))
            self._transport.close()

    def _abort(self) -> None:
        assert self._transport is not None
        self._transport.abort()


class AbsoluteTargetProtocol(HttpToolsProtocol):
    """uvicorn's protocol, for request targets in absolute form too."""

    def on_headers_complete(self) -> None:
        if b"://" in self.url and not self.url.startswith(b"/"):
            host, self.url = _host_and_path(self.url)
            self.headers[:] = [(name, value) for name, value in self.headers if name != b"host"]
            self.headers.append((b"host", host))
        super().on_headers_complete()


def _host_and_path(target: bytes) -> tuple[bytes, bytes]:
    """The value of the Host header and the target in origin form that say the same.

    A target that is no HTTP URL has no valid host: it is returned as one, to be refused.
    """
    try:
        url = urlsplit(target.decode("latin-1"))
    except ValueError:  # e.g. an unclosed bracket
        return target, b"/"
    if url.scheme not in ("http", "https") or not url.netloc:
        return target, b"/"
    query = f"?{url.query}" if url.query else ""
    return url.netloc.encode("latin-1"), f"{url.path or '/'}{query}".encode("latin-1")


def limited_protocol(limits: ConnectionLimits) -> type[asyncio.Protocol]:
    """The protocol factory for `uvicorn.Config(http=…)`: uvicorn's own protocol, with limits."""
    connections = OpenConnections()

    def make(**context: Any) -> LimitedProtocol:
        return LimitedProtocol(AbsoluteTargetProtocol(**context), limits, connections)

    return cast("type[asyncio.Protocol]", make)


def _new_parser(callbacks: LimitedProtocol) -> Any:
    parser = httptools.HttpRequestParser(callbacks)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
    return parser


def _without_upgrade(request: bytes) -> bytes:
    """The request without the header fields that offer another protocol."""
    head, end, rest = request.lstrip(b"\r\n").partition(b"\r\n\r\n")
    kept = []
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"connection":
            options = [option.strip() for option in value.split(b",")]
            options = [o for o in options if o.lower() not in (b"upgrade", b"http2-settings")]
            kept += [b"connection: " + b", ".join(options)] if options else []
        elif name.lower() not in (b"upgrade", b"http2-settings"):
            kept.append(line)
    return b"\r\n".join(kept) + end + rest


def _response(error: ApiError) -> bytes:
    """A whole HTTP response."""
    body = msgspec.json.encode(error_body(error))
    phrase = HTTPStatus(error.status_code).phrase
    retry_after = "retry-after: 1\r\n" if error.status_code == 503 else ""
    head = (
        f"HTTP/1.1 {error.status_code} {phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n{retry_after}connection: close\r\n\r\n"
    )
    return head.encode() + body
