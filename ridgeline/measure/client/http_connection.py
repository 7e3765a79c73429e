"""HTTP/1.1 as a load client needs it: one POST, a streamed answer, instants taken at the socket.

A general client (httpx, aiohttp) costs 1 to 2 ms of a core per streamed request, and hands each
read to a coroutine that is woken some turns of the event loop later: the client becomes the
bottleneck at a few hundred requests per second, and its own queue is charged to the server. Here
the body's bytes go to a plain callback inside `data_received`, in the very turn in which the
socket became readable, and a request costs one future. Measured in benchmarks/load_client.py.

Kept open: connections that ended an answer cleanly wait for the next request (no limit: the load
client alone limits concurrency, a hidden queue here would be charged to the server). A server may
close a waiting connection in the moment in which it is used again; then, and only if not one byte
of the answer came, the request is sent once more on a new connection.

Not here: redirects, proxies, compression (none is asked for), HTTP/2.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

CONNECT_TIMEOUT_S = 10.0
MAX_HEAD_BYTES = 65536
MAX_KEPT_BODY_BYTES = 4096
OK = 200


class WireError(Exception):
    """The exchange broke off: refused, reset, timed out while connecting, or not HTTP."""


class Origin(msgspec.Struct, frozen=True):
    """Where a server listens."""

    host: str
    port: int
    tls: bool = False


Body = Callable[[bytes], None]


class Dial(Protocol):
    """Opens one connection: the seam at which tests put a server in memory."""

    async def __call__(self, origin: Origin, protocol: asyncio.Protocol) -> asyncio.Transport: ...


async def dial(origin: Origin, protocol: asyncio.Protocol) -> asyncio.Transport:
    """Over TCP, and TLS where the address says https. Raises WireError."""
    loop = asyncio.get_running_loop()
    secure = ssl.create_default_context() if origin.tls else None
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            made = await loop.create_connection(
                lambda: protocol, origin.host, origin.port, ssl=secure
            )
    except TimeoutError:
        raise WireError(f"ConnectTimeout: no answer in {CONNECT_TIMEOUT_S:g} s") from None
    except OSError as error:
        raise WireError(f"ConnectError: {error}") from None
    return made[0]


class Reply(msgspec.Struct, frozen=True):
    """The end of an exchange. `body` is kept (its beginning) only where the status is not 200."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""


class Wire:
    """A pool of connections to one server."""

    def __init__(self, origin: Origin, headers: Mapping[str, str], dial: Dial = dial) -> None:
        self._origin, self._dial = origin, dial
        host = origin.host if ":" not in origin.host else f"[{origin.host}]"
        fixed = {"Host": f"{host}:{origin.port}", "Content-Type": "application/json", **headers}
        lines = "".join(f"{name}: {value}\r\n" for name, value in fixed.items())
        self._head = lines.encode("latin-1")
        self._idle: list[_Connection] = []

    async def post(self, path: str, body: bytes, sink: Body) -> Reply:
        """Send `body`; every piece of a 200's body goes to `sink` as it arrives."""
        start = f"POST {path} HTTP/1.1\r\n".encode("latin-1")
        length = b"Content-Length: %d\r\n\r\n" % len(body)
        return await self._exchange(b"".join((start, self._head, length, body)), sink)

    async def get(self, path: str) -> Reply:
        """A small answer, whole."""
        parts: list[bytes] = []
        request = f"GET {path} HTTP/1.1\r\n".encode("latin-1") + self._head + b"\r\n"
        reply = await self._exchange(request, parts.append)
        return Reply(reply.status, reply.headers, b"".join(parts) or reply.body)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _exchange(self, request: bytes, sink: Body) -> Reply:
        connection = self._waiting()
        if connection is not None:
            try:
                return await self._on(connection, request, sink)
            except WireError:
                if connection.heard:
                    raise
        connection = _Connection()
        connection.transport = await self._dial(self._origin, connection)
        return await self._on(connection, request, sink)

    def _waiting(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        return None

    async def _on(self, connection: _Connection, request: bytes, sink: Body) -> Reply:
        try:
            reply = await connection.exchange(request, sink)
        except BaseException:
            connection.close()  # a cancelled request must end at the server too
            raise
        if connection.usable:
            self._idle.append(connection)
        return reply


class _Connection(asyncio.Protocol):
    """One connection, one exchange at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.heard = False  # some byte of this exchange's answer came
        self._answer: _Answer | None = None
        self._done: asyncio.Future[Reply] | None = None
        self._keep = True

    @property
    def usable(self) -> bool:
        return self._keep and self.transport is not None and not self.transport.is_closing()

    async def exchange(self, request: bytes, sink: Body) -> Reply:
        assert self.transport is not None
        self.heard, self._answer = False, _Answer(sink)
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        try:
            return await self._done
        finally:
            self._answer = self._done = None

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        self.heard = True
        if self._answer is None:
            return self.close()  # bytes that nobody asked for: this connection is not in step
        try:
            ended = self._answer.feed(data)
        except WireError as error:
            return self._fail(error)
        if ended:
            self._keep = self._answer.keep_alive
            self._end(self._answer.reply())
            if not self._keep:
                self.close()
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self._keep = False
        if self._done is None or self._done.done():
            return
        assert self._answer is not None
        if exc is None and self._answer.ends_with_connection:
            self._end(self._answer.reply())
        else:
            reason = f": {exc}" if exc is not None else ": the server closed the connection"
            self._fail(WireError(f"ReadError{reason}"))

    def _end(self, reply: Reply) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(reply)

    def _fail(self, error: WireError) -> None:
        self._keep = False
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
        self.close()


class _Answer:
    """One HTTP answer as its bytes come in: head, then a body of one of three framings."""

    def __init__(self, sink: Body) -> None:
        self._sink = sink
        self._head = b""
        self._status = 0
        self._headers: dict[str, str] = {}
        self._kept: list[bytes] = []
        self._left: int | None = None  # bytes of the body (of the chunk) that are still to come
        self._chunks: _Chunks | None = None
        self._ended = False
        self.keep_alive = True

    @property
    def ends_with_connection(self) -> bool:
        """A body without length lasts until the server hangs up."""
        return bool(self._status) and self._chunks is None and self._left is None

    def reply(self) -> Reply:
        return Reply(self._status, self._headers, b"".join(self._kept))

    def feed(self, data: bytes) -> bool:
        """Take bytes in; True once the answer is whole."""
        if not self._status:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                if len(self._head) > MAX_HEAD_BYTES:
                    raise WireError("ProtocolError: the answer's head has no end")
                return False
            head, data, self._head = self._head[:end], self._head[end + 4 :], b""
            self._read_head(head)
            if not self._status:
                return self.feed(data)  # 100 Continue and the like come before the answer
        return self._body(data)

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.split(b"\r\n")
        words = first.split(b" ", 2)
        if not first.startswith(b"HTTP/1.") or len(words) < 2 or not words[1].isdigit():
            raise WireError(f"ProtocolError: not an HTTP answer: {first[:60]!r}")
        status = int(words[1])
        if 100 <= status < 200:
            return
        pairs = (line.decode("latin-1").partition(":") for line in lines)
        self._headers = {name.lower(): value.strip() for name, _, value in pairs}
        self._status = status
        self._framing(http10=first.startswith(b"HTTP/1.0"))

    def _framing(self, *, http10: bool) -> None:
        headers = self._headers
        self.keep_alive = not http10 and headers.get("connection", "").lower() != "close"
        if self._status in (204, 304):
            self._left = 0
        elif "chunked" in headers.get("transfer-encoding", "").lower():
            self._chunks = _Chunks()
        elif headers.get("content-length", "").isdigit():
            self._left = int(headers["content-length"])
        else:
            self.keep_alive = False

    def _body(self, data: bytes) -> bool:
        if self._chunks is not None:
            self._give(self._chunks.feed(data))
            return self._chunks.ended
        if self._left is None:
            self._give(data)
            return False
        self._give(data[: self._left])
        self._left -= min(self._left, len(data))
        return self._left == 0

    def _give(self, data: bytes) -> None:
        if not data:
            return
        if self._status == OK:
            self._sink(data)
        elif sum(map(len, self._kept)) < MAX_KEPT_BODY_BYTES:
            self._kept.append(data)


class _Chunks:
    """Chunked transfer coding: sizes and line ends taken out of the stream."""

    def __init__(self) -> None:
        self._rest = b""
        self._left = 0  # bytes of the present chunk, with its line end
        self._last = False  # the chunk of size zero came: trailers, then an empty line
        self.ended = False

    def feed(self, data: bytes) -> bytes:
        """The payload in `data`, in one piece."""
        if self._rest:
            data, self._rest = self._rest + data, b""
        payload: list[bytes] = []
        at = 0
        while at < len(data) and not self.ended:
            if self._left:
                at = self._payload(data, at, payload)
            elif (at := self._line(data, at)) < 0:
                break
        return payload[0] if len(payload) == 1 else b"".join(payload)

    def _payload(self, data: bytes, at: int, payload: list[bytes]) -> int:
        end = min(len(data), at + self._left)
        text_end = min(end, at + self._left - 2)  # the last two bytes are the line end
        if text_end > at:
            payload.append(data[at:text_end])
        self._left -= end - at
        return end

    def _line(self, data: bytes, at: int) -> int:
        """Read a size line or a trailer; -1 (and the rest kept) where it is not there in full."""
        end = data.find(b"\r\n", at)
        if end < 0:
            self._rest = data[at:]
            return -1
        if self._last:
            self.ended = end == at
        else:
            self._size(data[at:end])
        return end + 2

    def _size(self, line: bytes) -> None:
        try:
            size = int(line.partition(b";")[0], 16)
        except ValueError:
            raise WireError(f"ProtocolError: not a chunk size: {line[:20]!r}") from None
        self._last, self._left = size == 0, size + 2 if size else 0
