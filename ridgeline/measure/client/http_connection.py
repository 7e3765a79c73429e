"""Minimal HTTP/1.1 client for load tests: POST requests, streamed answers, times at the socket.

httpx, the only library it was compared with (benchmarks/load_client.py), costs 1 to 2 ms of a core
per streamed request and passes each read to a coroutine that runs some event-loop iterations later:
it becomes the bottleneck at a few hundred requests per second, and its own queue is charged to the
server. Here, received bytes go to a plain callback inside `data_received`, in the iteration in
which the socket became readable, and a request costs one future. aiohttp was not measured.

Connections are kept open after a complete answer, without limit: only the load client limits
concurrency, because a hidden queue here would be charged to the server. If the server closes an
idle connection just as it is reused, and no byte of the answer has arrived, the request is sent
again on a new connection.

Not supported: redirects, proxies, compression, HTTP/2.
"""

from __future__ import annotations

import asyncio
import errno
import os
import ssl
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from ridgeline.hardware.open_files import OpenFilesError, are_used_up

CONNECT_TIMEOUT_S = 10.0
MAX_HEAD_BYTES = 65536
MAX_ERROR_BODY_BYTES = 4096
OK = 200


class HttpConnectionError(Exception):
    """A connection was refused, reset or timed out while connecting, or the answer is not HTTP."""


class Origin(msgspec.Struct, frozen=True):
    """Address of a server."""

    host: str
    port: int
    tls: bool = False


BodySink = Callable[[bytes], None]


class Connect(Protocol):
    """Opens one connection; tests replace it by an in-memory server."""

    async def __call__(self, origin: Origin, protocol: asyncio.Protocol) -> asyncio.Transport: ...


async def connect(origin: Origin, protocol: asyncio.Protocol) -> asyncio.Transport:
    """Connect over TCP, with TLS for https.

    Raises HttpConnectionError, and OpenFilesError where this process may open no further one.
    """
    loop = asyncio.get_running_loop()
    secure = ssl.create_default_context() if origin.tls else None
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            connected = await loop.create_connection(
                lambda: protocol, origin.host, origin.port, ssl=secure
            )
    except TimeoutError:
        raise HttpConnectionError(
            f"ConnectTimeout: no connection within {CONNECT_TIMEOUT_S:g} s"
        ) from None
    except ssl.SSLCertVerificationError as error:
        raise HttpConnectionError(
            f"the certificate is not trusted: {error.verify_message}; SSL_CERT_FILE=FILE trusts "
            "that of a private authority"
        ) from None
    except ssl.SSLError as error:
        raise HttpConnectionError(f"TLS failed: {error.reason or error}") from None
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE) or are_used_up():
            raise OpenFilesError from None
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise HttpConnectionError(f"ConnectError: {why}") from None
    return connected[0]


class HttpReply(msgspec.Struct, frozen=True):
    """Status and headers of an answer.

    `body` is the beginning of the body unless the status is 200.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes = b""


class HttpConnectionPool:
    """Connections to one server, reused after complete answers."""

    def __init__(
        self, origin: Origin, headers: Mapping[str, str], connect: Connect = connect
    ) -> None:
        self._origin, self._connect = origin, connect
        host = origin.host if ":" not in origin.host else f"[{origin.host}]"
        fixed = {"Host": f"{host}:{origin.port}", "Content-Type": "application/json", **headers}
        lines = "".join(f"{name}: {value}\r\n" for name, value in fixed.items())
        self._head = lines.encode("latin-1")
        self._idle: list[_PooledConnection] = []

    async def post(self, path: str, body: bytes, sink: BodySink) -> HttpReply:
        """Send `body`; the body of a 200 answer is passed to `sink` as it arrives.

        Raises HttpConnectionError.
        """
        start = f"POST {path} HTTP/1.1\r\n".encode("latin-1")
        length = b"Content-Length: %d\r\n\r\n" % len(body)
        return await self._exchange(b"".join((start, self._head, length, body)), sink)

    async def get(self, path: str) -> HttpReply:
        """Fetch a small answer as a whole. Raises HttpConnectionError."""
        parts: list[bytes] = []
        request = f"GET {path} HTTP/1.1\r\n".encode("latin-1") + self._head + b"\r\n"
        reply = await self._exchange(request, parts.append)
        return HttpReply(reply.status, reply.headers, b"".join(parts) or reply.body)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _exchange(self, request: bytes, sink: BodySink) -> HttpReply:
        connection = self._take_idle()
        if connection is not None:
            try:
                return await self._exchange_on(connection, request, sink)
            except HttpConnectionError:
                if connection.has_received:
                    raise
        connection = _PooledConnection()
        connection.transport = await self._connect(self._origin, connection)
        return await self._exchange_on(connection, request, sink)

    def _take_idle(self) -> _PooledConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable:
                return connection
        return None

    async def _exchange_on(
        self, connection: _PooledConnection, request: bytes, sink: BodySink
    ) -> HttpReply:
        try:
            reply = await connection.exchange(request, sink)
        except BaseException:
            connection.close()  # so that the server sees a cancelled request, too
            raise
        if connection.is_usable:
            self._idle.append(connection)
        return reply


class _PooledConnection(asyncio.Protocol):
    """One connection; one exchange at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.has_received = False  # at least one byte of the current answer
        self._parser: _ResponseParser | None = None
        self._done: asyncio.Future[HttpReply] | None = None
        self._keep = True

    @property
    def is_usable(self) -> bool:
        return self._keep and self.transport is not None and not self.transport.is_closing()

    async def exchange(self, request: bytes, sink: BodySink) -> HttpReply:
        assert self.transport is not None
        self.has_received, self._parser = False, _ResponseParser(sink)
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        try:
            return await self._done
        finally:
            self._parser = self._done = None

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        self.has_received = True
        if self._parser is None:
            return self.close()  # bytes without a request: the connection is out of sync
        try:
            ended = self._parser.feed(data)
        except HttpConnectionError as error:
            return self._fail(error)
        if ended:
            self._keep = self._parser.keep_alive
            self._end(self._parser.reply())
            if not self._keep:
                self.close()
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self._keep = False
        if self._done is None or self._done.done():
            return
        assert self._parser is not None
        if exc is None and self._parser.ends_with_connection:
            self._end(self._parser.reply())
        else:
            reason = f": {exc}" if exc is not None else ": the server closed the connection"
            self._fail(HttpConnectionError(f"ReadError{reason}"))

    def _end(self, reply: HttpReply) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(reply)

    def _fail(self, error: HttpConnectionError) -> None:
        self._keep = False
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
        self.close()


class _ResponseParser:
    """Incremental parser of one answer: head, then a body in one of three framings."""

    def __init__(self, sink: BodySink) -> None:
        self._sink = sink
        self._head = b""
        self._status = 0
        self._headers: dict[str, str] = {}
        self._error_body: list[bytes] = []
        self._left: int | None = None  # bytes of the body still to come
        self._chunks: _ChunkedDecoder | None = None
        self._ended = False
        self.keep_alive = True

    @property
    def ends_with_connection(self) -> bool:
        """True for a body without length, which ends when the server closes the connection."""
        return bool(self._status) and self._chunks is None and self._left is None

    def reply(self) -> HttpReply:
        return HttpReply(self._status, self._headers, b"".join(self._error_body))

    def feed(self, data: bytes) -> bool:
        """Process received bytes; True once the answer is complete."""
        if not self._status:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                if len(self._head) > MAX_HEAD_BYTES:
                    raise HttpConnectionError(
                        f"ProtocolError: the head exceeds {MAX_HEAD_BYTES} bytes"
                    )
                return False
            head, data, self._head = self._head[:end], self._head[end + 4 :], b""
            self._read_head(head)
            if not self._status:
                return self.feed(data)  # an interim answer such as 100 Continue
        return self._feed_body(data)

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.split(b"\r\n")
        words = first.split(b" ", 2)
        if not first.startswith(b"HTTP/1.") or len(words) < 2 or not words[1].isdigit():
            raise HttpConnectionError(f"ProtocolError: not an HTTP answer: {first[:60]!r}")
        status = int(words[1])
        if 100 <= status < 200:
            return
        pairs = (line.decode("latin-1").partition(":") for line in lines)
        self._headers = {name.lower(): value.strip() for name, _, value in pairs}
        self._status = status
        self._set_framing(http10=first.startswith(b"HTTP/1.0"))

    def _set_framing(self, *, http10: bool) -> None:
        headers = self._headers
        self.keep_alive = not http10 and headers.get("connection", "").lower() != "close"
        if self._status in (204, 304):
            self._left = 0
        elif "chunked" in headers.get("transfer-encoding", "").lower():
            self._chunks = _ChunkedDecoder()
        elif headers.get("content-length", "").isdigit():
            self._left = int(headers["content-length"])
        else:
            self.keep_alive = False

    def _feed_body(self, data: bytes) -> bool:
        if self._chunks is not None:
            self._deliver(self._chunks.feed(data))
            return self._chunks.ended
        if self._left is None:
            self._deliver(data)
            return False
        self._deliver(data[: self._left])
        self._left -= min(self._left, len(data))
        return self._left == 0

    def _deliver(self, data: bytes) -> None:
        if not data:
            return
        if self._status == OK:
            self._sink(data)
        elif sum(map(len, self._error_body)) < MAX_ERROR_BODY_BYTES:
            self._error_body.append(data)


class _ChunkedDecoder:
    """Removes chunk sizes and line ends of the chunked transfer coding."""

    def __init__(self) -> None:
        self._rest = b""
        self._left = 0  # bytes of the current chunk, with its line end
        self._last = False  # after the chunk of size 0: trailers, then an empty line
        self.ended = False

    def feed(self, data: bytes) -> bytes:
        """The payload in `data`."""
        if self._rest:
            data, self._rest = self._rest + data, b""
        payload: list[bytes] = []
        at = 0
        while at < len(data) and not self.ended:
            if self._left:
                at = self._read_payload(data, at, payload)
            elif (at := self._read_line(data, at)) < 0:
                break
        return payload[0] if len(payload) == 1 else b"".join(payload)

    def _read_payload(self, data: bytes, at: int, payload: list[bytes]) -> int:
        end = min(len(data), at + self._left)
        payload_end = min(end, at + self._left - 2)  # the last two bytes are the line end
        if payload_end > at:
            payload.append(data[at:payload_end])
        self._left -= end - at
        return end

    def _read_line(self, data: bytes, at: int) -> int:
        """Read a size line or a trailer; return its end, or -1 if it is incomplete."""
        end = data.find(b"\r\n", at)
        if end < 0:
            self._rest = data[at:]
            return -1
        if self._last:
            self.ended = end == at
        else:
            self._set_size(data[at:end])
        return end + 2

    def _set_size(self, line: bytes) -> None:
        try:
            size = int(line.partition(b";")[0], 16)
        except ValueError:
            raise HttpConnectionError(f"ProtocolError: not a chunk size: {line[:20]!r}") from None
        self._last, self._left = size == 0, size + 2 if size else 0
