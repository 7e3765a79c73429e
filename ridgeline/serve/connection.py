"""uvicorn's HTTP protocol with a clock and a scale: for clients that never finish their headers.

uvicorn closes idle connections but waits without end for a request that has begun, and its parser
gathers a header of any length. Here a request's headers must be complete within `header_timeout_s`
and `max_header_bytes`. Only `max_connections` connections are kept, and no more requests than that
are under way: whoever hangs up frees the connection at once, but the request only when its turn
comes to notice, and a flood of such must not fill the memory. Bodies have their own limits
(`ridgeline.serve.generation.event_stream.read_body`): by then somebody is there to answer. A body that was answered
before its end (413, 401) is read on and forgotten for `linger_s`, because closing on unread bytes
resets the connection, and the client would lose the answer with it (RFC 9112, 9.6).

And for clients that never read: where what is written stays unread for `send_timeout_s`, the
connection is cut off, and with it whatever was computed for it. A stream writes to the connection
directly (`ridgeline.serve.http.stream_writer`), together with the others of its step
(`ridgeline.serve.http.batched_writes`).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.types import Message, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from ridgeline.serve.errors import ApiError, body
from ridgeline.serve.http.batched_writes import Post
from ridgeline.serve.http.native_writer import Lent, chunk
from ridgeline.serve.http.stream_writer import ADDED_HEADERS, CONNECTION


class ConnectionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a connection may cost before it has said what it wants."""

    max_connections: int = 4096
    header_timeout_s: float = 15.0
    max_header_bytes: int = 64 << 10
    send_timeout_s: float = 30.0
    linger_s: float = 5.0


class BoundedProtocol(HttpToolsProtocol):
    """See the head of this file."""

    limits = ConnectionLimits()
    post = Post()
    _timer: asyncio.TimerHandle | None = None
    _num_bytes = 0  # of the headers that are coming
    _in_headers = True
    _in_body = False
    gone: Callable[[], None] | None = None  # whom to call when the connection is lost
    lost: Callable[[], None] | None = None  # and before that, while its socket is lent
    _linger: asyncio.TimerHandle | None = None
    _unread: tuple[asyncio.TimerHandle, int] | None = None  # and how much it was at the last look

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if max(len(self.connections), len(self.tasks)) > self.limits.max_connections:
            self._refuse(ApiError(503, "the server has too many connections"))
        else:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.lost is not None:  # the socket is closed, and its number another's, once we return
            self.lost()
            self.lost = None
        self._unwatch()
        self._body_over()
        self.resume_writing()
        super().connection_lost(exc)
        if self.gone is not None:
            self.gone()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._in_headers:
            self._num_bytes += len(data)
        super().data_received(data)
        if not (self._in_headers and self._num_bytes):
            return  # most requests come in one piece: nobody has to wait for the rest
        self._watch()
        if self._num_bytes > self.limits.max_header_bytes:
            self._refuse(ApiError(431, "the request's headers are too large"))

    def on_message_begin(self) -> None:
        self._in_headers = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_headers, self._num_bytes = False, 0
        self._in_body = True
        self._unwatch()
        super().on_headers_complete()
        cycle: Any = self.cycle
        if cycle is not None and cycle.scope is self.scope:  # else an upgrade that is not served
            scope: Any = cycle.scope
            if scope["http_version"] == "1.0":
                cycle.send = _without_chunks(cycle)
            scope["extensions"] = {CONNECTION: Exchange(self, cycle)}

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_headers, self._num_bytes = True, 0  # whatever comes next opens a request
        self._body_over()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        cycle: Any = self.cycle  # another one where the next request is being sent already
        if self._in_body and cycle.response_complete and not self.transport.is_closing():
            self._linger = self.loop.call_later(self.limits.linger_s, self.cut)

    def _body_over(self) -> None:
        self._in_body = False
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None

    # -- clients that do not read

    def cut(self) -> None:
        """End the connection without a word: nobody is reading."""
        self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look_again()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread[0].cancel()
            self._unread = None

    def timeout_keep_alive_handler(self) -> None:
        """The answer is complete; what has not been read of it by now is not waited for."""
        if self.transport.get_write_buffer_size():
            self.cut()
        else:
            super().timeout_keep_alive_handler()

    def _look_again(self) -> None:
        timer = self.loop.call_later(self.limits.send_timeout_s, self._still_unread)
        self._unread = timer, self.transport.get_write_buffer_size()

    def _still_unread(self) -> None:
        before = 0 if self._unread is None else self._unread[1]
        if self.transport.get_write_buffer_size() < before:
            self._look_again()  # slow, but reading
        else:
            self.cut()

    # -- clients that do not write, or nothing that can be read

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP gets the same error body as everything else."""
        self._refuse(ApiError(400, msg))

    def _watch(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.limits.header_timeout_s, self._late)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        self._refuse(ApiError(408, "the request's headers did not come in time"))

    def _refuse(self, error: ApiError) -> None:
        if not self.transport.is_closing():
            self._unwatch()
            self.transport.write(_raw(error))
            self.transport.close()


class Exchange:
    """What one answer may do to its connection: see `ridgeline.serve.http.stream_writer.Connection`."""

    __slots__ = ("_cycle", "_protocol")

    def __init__(self, protocol: BoundedProtocol, cycle: Any) -> None:
        self._protocol, self._cycle = protocol, cycle

    @property
    def has_begun(self) -> bool:
        """See `Connection`."""
        return bool(self._cycle.response_started)

    @property
    def has_whole_body(self) -> bool:
        """See `Connection`."""
        return not self._cycle.more_body

    @property
    def _has_chunks(self) -> bool:
        """What is written here has a frame that clients of HTTP/1.0 do not know."""
        return bool(self._cycle.scope["http_version"] != "1.0")

    def begin(self, start: Callable[[], Awaitable[None]], data: bytes) -> bool:
        """uvicorn writes the head by itself; here it is kept back for the first chunk."""
        if self._protocol.flow.write_paused or not self._has_chunks:
            return False
        head, transport = self._head(start), self._protocol.transport
        if not transport.is_closing():
            transport.write(head + (chunk(data) if data else b""))
        return True

    def lend(self, start: Message, lost: Callable[[], None]) -> Lent | None:
        """The head is put together beside the app and uvicorn, which have not begun an answer by
        it: until somebody has written it, the answer may still be another one."""
        protocol, cycle = self._protocol, self._cycle
        transport, added = protocol.transport, cycle.scope.get(ADDED_HEADERS)
        plain = transport.get_extra_info("ssl_object") is None
        if (
            added is None
            or not (plain and self._has_chunks)
            or transport.is_closing()
            or transport.get_write_buffer_size()
        ):
            return None
        headers = [*cycle.default_headers, *start["headers"], *added]
        if _BREAK.search(b"".join([value for _, value in headers])):
            return None  # uvicorn has a word to say on that
        if not cycle.keep_alive:
            headers.append((b"connection", b"close"))
        headers.append((b"transfer-encoding", b"chunked"))
        protocol.lost = lost
        head = b"".join([b"%b: %b\r\n" % header for header in headers])
        number = transport.get_extra_info("socket").fileno()
        return Lent(number, STATUS_LINE[start["status"]] + head + b"\r\n")

    def take_back(self, start: Callable[[], Awaitable[None]] | None, left: bytes) -> None:
        """See `Connection`."""
        protocol = self._protocol
        if protocol.lost is not None:
            protocol.lost()
            protocol.lost = None
        if start is None:
            return
        self._head(start)
        if left and not protocol.transport.is_closing():
            protocol.transport.write(left)

    def _head(self, start: Callable[[], Awaitable[None]]) -> bytes:
        """What `start` would write."""
        kept, cycle = _Kept(), self._cycle
        transport, cycle.transport = cycle.transport, kept
        try:
            _run_now(start())
        finally:
            cycle.transport = transport
        return b"".join(kept.parts)

    def write_chunk(self, data: bytes) -> bool:
        """See `Connection`."""
        protocol = self._protocol
        if protocol.flow.write_paused or not self._has_chunks:
            return False
        protocol.post.add(protocol.transport, chunk(data))
        return True

    def cut(self) -> None:
        """See `Connection`."""
        self._protocol.cut()

    def watch(self, gone: Callable[[], None] | None) -> None:
        """See `Connection`."""
        protocol = self._protocol
        protocol.gone = gone
        if gone is not None and protocol.transport.is_closing():
            protocol.loop.call_soon(gone)


def _without_chunks(cycle: Any) -> Send:
    """uvicorn's `send` for a client of HTTP/1.0, which must not be sent chunks (RFC 9112, 6.1): an
    answer without a length is as long as its connection lasts, and uvicorn keeps none of theirs."""
    send, has_length = cycle.send, True

    async def sending(message: Message) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            names = [name.lower() for name, _ in message.get("headers", ())]
            has_length = b"content-length" in names
            if not has_length:
                cycle.chunked_encoding = False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return sending


_BREAK = re.compile(b"[\r\n\0]")


class _Kept:
    """Stands in for a transport while the head of an answer is put together."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.parts.append(data)


def _run_now(awaitable: Awaitable[None]) -> None:
    """To its end, at once: it has nothing to wait for while the connection takes what is sent."""
    for _ in awaitable.__await__():
        raise AssertionError("it waits")


def bounded_protocol(limits: ConnectionLimits) -> type[HttpToolsProtocol]:
    """The protocol class for `uvicorn.Config(http=…)`, which makes one object per connection."""
    return type("BoundedProtocol", (BoundedProtocol,), {"limits": limits, "post": Post()})


def _raw(error: ApiError) -> bytes:
    """A whole response without an app."""
    payload = msgspec.json.encode(body(error))
    phrase = HTTPStatus(error.status).phrase
    again = "retry-after: 1\r\n" if error.status == 503 else ""
    head = (
        f"HTTP/1.1 {error.status} {phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(payload)}\r\n{again}connection: close\r\n\r\n"
    )
    return head.encode() + payload
