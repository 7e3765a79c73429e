"""Connections to a backend: one request at a time, kept open after a complete response.

Received bytes are parsed by `httptools` inside `data_received` and wait for `read`; the connection
stops reading while more than `MAX_UNREAD_BYTES` wait, so that a slow client slows its backend and
fills no memory. A connection that breaks raises `BackendLost`, which says whether a byte of the
response had come, and whether the backend broke it or was only given up. An idle connection that
the backend closes at the moment of its reuse has not reached it: the request is sent again on a new
one.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from ridgeline.errors import BadInput

MAX_UNREAD_BYTES = 256 << 10
_MAX_HEADERS = 100
_MAX_IDLE = 64
_KEEP_ALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds without a packet until the peer is asked for one, seconds between questions, and how many
remain without an answer: a connection that a firewall has forgotten breaks after half a minute."""

Headers = list[tuple[bytes, bytes]]


class BackendLost(Exception):
    """The backend broke the connection. `has_begun`: it had sent something; `is_refusal`: it never
    accepted the connection; `is_late`: it broke nothing, but was silent for too long."""

    def __init__(
        self,
        why: str,
        *,
        has_begun: bool = False,
        is_refusal: bool = False,
        is_late: bool = False,
    ) -> None:
        super().__init__(why)
        self.has_begun, self.is_refusal, self.is_late = has_begun, is_refusal, is_late


class BackendAddress(msgspec.Struct, frozen=True):
    """Where a backend listens. `prefix` precedes every path."""

    host: str
    port: int
    tls: bool = False
    prefix: str = ""

    @staticmethod
    def parse(url: str, option: str = "--backend") -> BackendAddress:
        """The address in `http://host:port/prefix`. Raises BadInput, which names the option."""
        try:
            parts = urlsplit(url)
            given = parts.port
        except ValueError:
            parts, given = urlsplit(""), None
        port = (443 if parts.scheme == "https" else 80) if given is None else given
        is_address = parts.scheme in ("http", "https") and parts.hostname and port
        if not is_address or any(c.isspace() or not c.isprintable() for c in url):
            raise BadInput(
                f"{option} is not the URL of a server", value=url, fix="write http://HOST:PORT"
            )
        host = f"{parts.scheme}://{parts.hostname}"  # the rest may hold a password
        if "@" in parts.netloc:
            fix = "leave it out: keys go into --api-key"
            raise BadInput("the URL of a server has a user or a password", value=host, fix=fix)
        if "?" in url or "#" in url:
            fix = "write http://HOST:PORT/PATH"
            raise BadInput("the URL of a server has a query or a fragment", value=host, fix=fix)
        assert parts.hostname is not None
        return BackendAddress(parts.hostname, port, parts.scheme == "https", parts.path.rstrip("/"))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.prefix}"


class UpstreamConnection(asyncio.Protocol):
    """One connection; the response to its current request.

    `clock`: seconds in which the gateway ran. `patience`: by how much longer than usual the
    connection may be silent.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.is_lost, self._why_given_up, self._awaited_s = False, "", 0.0
        self.patience = 1.0
        self._is_paused = False
        self._now_s = clock
        self._can_write = asyncio.Event()
        self._can_write.set()
        self._begin()

    def _begin(self) -> None:
        self._parser: Any = httptools.HttpResponseParser(self)
        self.status, self.headers = 0, cast("Headers", [])
        self.has_headers = self.is_complete = self.has_begun = self._keeps_alive = False
        self._unread: list[bytes] = []
        self._num_unread = 0
        self._sink: Callable[[bytes], bool] | None = None
        self.last_byte_s = self._now_s()

    def send(self, request: bytes) -> None:
        """Send a request; the response to the one before must be complete."""
        self._begin()
        assert self._transport is not None
        self._transport.write(request)

    async def write(self, data: bytes) -> None:
        """Send a piece of a body, and wait until the backend has read enough of those before.
        Raises BackendLost."""
        await self._can_write.wait()
        if self.is_lost or self._transport is None:
            raise BackendLost("the connection broke", has_begun=True)
        self._transport.write(data)

    async def read_headers(self) -> None:
        """Wait for the status and the headers. Raises BackendLost."""
        while not self.has_headers:
            await self._wait()

    async def read(self) -> bytes:
        """The bytes of the body that have come; b"" at its end. Raises BackendLost."""
        while not self._unread:
            if self.is_complete:
                return b""
            await self._wait()
        return self._take_unread()

    async def pump(self, sink: Callable[[bytes], bool]) -> None:
        """Pass the bytes of the body to `sink` as they come, until their end or until it returns
        False. Called inside `data_received`, it costs no wake-up of a task per token. Raises
        BackendLost."""
        if self._unread and not sink(self._take_unread()):
            return
        self._sink = sink
        while self._sink is not None and not self.is_complete:
            await self._wait()
        self._sink = None

    def take_rest(self) -> bytes:
        """What has come and was not passed on."""
        return self._take_unread() if self._unread else b""

    def _take_unread(self) -> bytes:
        data = self._unread[0] if len(self._unread) == 1 else b"".join(self._unread)
        self._unread.clear()
        self._num_unread = 0
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return data

    async def read_all(self, max_bytes: int) -> bytes:
        """The whole body. Raises BackendLost, also for more than `max_bytes`."""
        parts, size = [], 0
        while data := await self.read():
            size += len(data)
            if size > max_bytes:
                raise BackendLost(f"its response is larger than {max_bytes} bytes", has_begun=True)
            parts.append(data)
        return b"".join(parts)

    @property
    def is_reusable(self) -> bool:
        return self.is_complete and not self.is_lost and self._keeps_alive

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def give_up(self, why: str) -> None:
        """Close the connection, and break nothing: its backend is silent, or the stream is."""
        self._why_given_up = why
        self.close()

    @property
    def awaited_for_s(self) -> float:
        """For how long a request has waited for the next byte; 0 while none does."""
        if self._waiter is None or self._waiter.done():
            return 0.0
        return self._now_s() - max(self._awaited_s, self.last_byte_s)

    async def _wait(self) -> None:
        if self.is_lost:
            raise BackendLost(
                self._why_given_up or "the connection broke",
                has_begun=self.has_begun,
                is_late=bool(self._why_given_up),
            )
        self._awaited_s = self._now_s()
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self.has_begun = True
        self.last_byte_s = self._now_s()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()
            self.is_lost = True
        if self._sink is not None and self._unread and not self._sink(self._take_unread()):
            self._sink = None
        if self._sink is None or self.is_complete or self.is_lost:
            self._wake()

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        self._can_write.set()
        if exc is None and self.has_headers:  # a body of unknown length ends with the connection
            names = {name for name, _ in self.headers}
            self.is_complete |= not names & {b"content-length", b"transfer-encoding"}
        self._wake()

    # -- httptools

    def on_message_begin(self) -> None:
        if self.is_complete:
            raise httptools.HttpParserError("a response that was not asked for")

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= _MAX_HEADERS:
            raise httptools.HttpParserError("too many headers")
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self.has_headers = not self._is_interim

    @property
    def _is_interim(self) -> bool:
        """Whether the response only precedes that to the request, as 103 Early Hints does."""
        return 100 <= self.status < 200

    def on_body(self, data: bytes) -> None:
        self._unread.append(data)
        self._num_unread += len(data)
        if self._num_unread > MAX_UNREAD_BYTES and not self._is_paused and self._transport:
            self._is_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._is_interim:
            self.headers = []
            return
        self.is_complete = True
        self._keeps_alive = self._parser.should_keep_alive()  # afterwards, the answer is always no


class UpstreamPool:
    """Connections to one backend. `clock`: seconds in which the gateway ran."""

    def __init__(
        self,
        address: BackendAddress,
        clock: Callable[[], float],
        connect_timeout_s: float = 2.0,
    ) -> None:
        self.address, self._clock = address, clock
        self._connect_timeout_s = connect_timeout_s
        self._idle: list[UpstreamConnection] = []
        self.busy: set[UpstreamConnection] = set()
        self._heard_s = -math.inf

    @property
    def heard_s(self) -> float:
        """When the last byte of any response came."""
        return max([self._heard_s, *(c.last_byte_s for c in self.busy if c.has_begun)])

    async def exchange(
        self,
        method: bytes,
        path: bytes,
        headers: Iterable[tuple[bytes, bytes]],
        body: bytes = b"",
        patience: float = 1.0,
    ) -> UpstreamConnection:
        """Send a request and wait for the headers of its response. Raises BackendLost."""
        request = self._request(method, path, headers, body)
        while self._idle:
            connection = self._idle.pop()
            if connection.is_lost:
                continue
            connection.patience = patience
            try:
                return await self._send(connection, request)
            except BackendLost as lost:
                if lost.has_begun or lost.is_late:
                    raise
                self.close()  # they were opened before it stopped, and are as stale
        connection = await self._connect()
        connection.patience = patience
        return await self._send(connection, request)

    async def upload(
        self,
        method: bytes,
        path: bytes,
        headers: Iterable[tuple[bytes, bytes]],
        body: AsyncIterator[bytes],
    ) -> UpstreamConnection:
        """Send a request once, on a connection that nothing else uses, with a body in pieces, and
        wait for the headers of its response; `discard` the connection afterwards. A response that
        comes before the end of the body, such as a refusal, ends it. Raises BackendLost."""
        connection = await self._connect()
        self.busy.add(connection)
        try:
            chunked = (b"transfer-encoding", b"chunked")
            connection.send(self._head(method, path, [*headers, chunked]))
            async for data in body:
                if connection.has_headers:
                    return connection
                await connection.write(b"%x\r\n%b\r\n" % (len(data), data))
            await connection.write(b"0\r\n\r\n")
            await connection.read_headers()
        except BackendLost:
            if not connection.has_headers:
                self.discard(connection)
                raise
        except BaseException:
            self.discard(connection)
            raise
        return connection

    def discard(self, connection: UpstreamConnection) -> None:
        """Close a connection that is not used again."""
        self._forget(connection)
        connection.close()

    def release(self, connection: UpstreamConnection) -> None:
        """Keep the connection for the next request, if its response is complete."""
        self._forget(connection)
        if connection.is_reusable and len(self._idle) < _MAX_IDLE:
            self._idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _send(self, connection: UpstreamConnection, request: bytes) -> UpstreamConnection:
        self.busy.add(connection)
        connection.send(request)
        try:
            await connection.read_headers()
        except BaseException:
            self._forget(connection)
            connection.close()
            raise
        return connection

    def _forget(self, connection: UpstreamConnection) -> None:
        if connection.has_begun:
            self._heard_s = max(self._heard_s, connection.last_byte_s)
        self.busy.discard(connection)

    async def _connect(self) -> UpstreamConnection:
        address, loop, began_s = self.address, asyncio.get_running_loop(), self._clock()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                transport, connection = await loop.create_connection(
                    lambda: UpstreamConnection(self._clock),
                    address.host,
                    address.port,
                    ssl=address.tls or None,
                )
        except TimeoutError:
            if self._clock() - began_s < self._connect_timeout_s / 2:  # the gateway was stopped
                return await self._connect()
            why = f"no connection within {self._connect_timeout_s:g} s"
            raise BackendLost(why, is_refusal=True, is_late=True) from None
        except OSError as error:
            why = f"no connection: {error.strerror or error}"
            raise BackendLost(why, is_refusal=True) from None
        _keep_alive(transport.get_extra_info("socket"))
        return connection

    def _request(
        self, method: bytes, path: bytes, headers: Iterable[tuple[bytes, bytes]], body: bytes
    ) -> bytes:
        if body or method == b"POST":
            headers = [*headers, (b"content-length", b"%d" % len(body))]
        return self._head(method, path, headers) + body

    def _head(self, method: bytes, path: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        address = self.address
        host = f"[{address.host}]" if ":" in address.host else address.host
        lines = [
            b"%b %b%b HTTP/1.1\r\nhost: %b:%d\r\n"
            % (method, address.prefix.encode(), path, host.encode(), address.port)
        ]
        lines += [b"%b: %b\r\n" % pair for pair in headers]
        return b"".join((*lines, b"\r\n"))


def _keep_alive(own: socket.socket | None) -> None:
    """Have the kernel find out whether the peer is there; None: a connection without a socket."""
    if own is None:
        return
    own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):  # Linux
            own.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
