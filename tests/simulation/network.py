"""Connections in memory: what a server's transport does, and an HTTP client at the other end."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httptools

from tests.simulation.virtual_time import VirtualLoop


@dataclass
class Link:
    """How a client's connection behaves. `window`: bytes under way before the sender must wait;
    `chunk` bytes are read every `read_s`."""

    latency_s: float = 0.0005
    window: int = 65536
    chunk: int = 65536
    read_s: float = 0.0005


class ServerTransport(asyncio.Transport):
    """The server's end of a connection."""

    def __init__(self, loop: VirtualLoop, link: Link, client: Connection) -> None:
        super().__init__()
        self._loop, self._link, self._client = loop, link, client
        self._unsent, self._under_way = bytearray(), bytearray()
        self._is_closing = self._is_lost = self._is_paused = self._is_reading = False
        self._can_receive = True
        self._inbound: list[bytes] = []
        self.protocol: Any = None
        self.max_unsent = 0
        loop.transports.append(self)

    # what the server calls

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("127.0.0.1", 40000), "sockname": ("127.0.0.1", 8000)}.get(
            name, default
        )

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_write_buffer_size(self) -> int:
        return len(self._unsent)

    def is_closing(self) -> bool:
        return self._is_closing

    def write(self, data: Any) -> None:
        if self._is_lost or (self._is_closing and not self._unsent):
            return
        self._unsent += data
        self._send()
        if self._unsent and not self._is_paused:
            self._is_paused = True
            self.protocol.pause_writing()
        self.max_unsent = max(self.max_unsent, len(self._unsent))

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            if not self._unsent:
                self._loop.call_soon(self._lose, None)

    def abort(self) -> None:
        self._is_closing = True
        self._unsent.clear()
        self._loop.call_soon(self._lose, None)

    def pause_reading(self) -> None:
        self._can_receive = False

    def resume_reading(self) -> None:
        self._can_receive = True
        self._loop.call_soon(self._receive)

    def is_reading(self) -> bool:
        return self._can_receive

    # what happens on the wire

    def deliver(self, data: bytes) -> None:
        """Bytes from the client have arrived."""
        self._inbound.append(data)
        self._receive()

    def hang_up(self, *, resets: bool) -> None:
        """The client has closed its end."""
        if self._is_lost:
            return
        self._unsent.clear()
        if resets:
            self._lose(ConnectionResetError())
        elif not self.protocol.eof_received():
            self.close()

    def cut(self) -> None:
        """The server's process has ended; what the system had sent still arrives."""
        self._unsent.clear()
        self._is_lost = self._is_closing = True
        if not self._is_reading:
            self._loop.call_later(self._link.latency_s, self._client.end)

    def _receive(self) -> None:
        while self._inbound and self._can_receive and not self._is_lost:
            self.protocol.data_received(self._inbound.pop(0))

    def _send(self) -> None:
        room = self._link.window - len(self._under_way)
        self._under_way += self._unsent[:room]
        del self._unsent[:room]
        if self._under_way and not self._is_reading:
            self._is_reading = True
            self._loop.call_later(self._link.latency_s, self._read)

    def _read(self) -> None:
        """The client reads a piece."""
        data = bytes(self._under_way[: self._link.chunk])
        del self._under_way[: self._link.chunk]
        self._client.feed(data)
        self._is_reading = bool(self._under_way or self._unsent)
        if not self._is_lost:
            self._send_rest()
        if self._is_reading:
            self._loop.call_later(self._link.read_s, self._read)
        elif self._is_lost:
            self._client.end()

    def _send_rest(self) -> None:
        room = self._link.window - len(self._under_way)
        self._under_way += self._unsent[:room]
        del self._unsent[:room]
        if self._is_paused and not self._unsent:
            self._is_paused = False
            self.protocol.resume_writing()
        if self._is_closing and not self._unsent:
            self._loop.call_soon(self._lose, None)

    def _lose(self, error: Exception | None) -> None:
        if not self._is_lost:
            self._is_lost = self._is_closing = True
            self.protocol.connection_lost(error)
            if not self._is_reading:
                self._loop.call_later(self._link.latency_s, self._client.end)


@dataclass
class Reply:
    """A response as far as it has arrived."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    is_complete: bool = False

    def json(self) -> Any:
        return json.loads(self.body)


class Connection:
    """A client's connection: one request after the other.

    `on_data` is called whenever a part of a body has arrived.
    """

    def __init__(self, loop: VirtualLoop, rng: random.Random, link: Link | None = None) -> None:
        self.loop, self.rng = loop, rng
        self.is_over, self.reply = False, Reply()
        self.on_data: Callable[[Reply], None] = lambda _: None
        self._changed = asyncio.Event()
        self._outgoing: list[bytes] = []
        self._parser = httptools.HttpResponseParser(self)
        self.transport = ServerTransport(loop, link or Link(), self)
        listeners = [listener for listener in loop.listeners if listener.is_open]
        if not listeners:
            self.is_over = True
            return
        self.transport.protocol = listeners[0].factory()
        self.transport.protocol.connection_made(self.transport)

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        *,
        timeout_s: float = 300.0,
    ) -> Reply:
        """The response, complete or as far as it came before the connection ended."""
        self.reply = Reply()
        fields = {"host": "127.0.0.1", "content-length": str(len(body)), **(headers or {})}
        head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in fields.items())
        self._write(head.encode() + b"\r\n" + body)
        return await self.wait(timeout_s)

    async def wait(self, timeout_s: float) -> Reply:
        deadline_s = self.loop.now_s + timeout_s
        while not (self.reply.is_complete or self.is_over):
            left_s = deadline_s - self.loop.now_s
            assert left_s > 0, f"no end after {timeout_s:g} s: {self.reply}"
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), left_s)
            except TimeoutError:
                continue
        return self.reply

    def hang_up(self) -> None:
        self.is_over = True
        self._changed.set()
        if self.transport.protocol is not None:
            self.transport.hang_up(resets=self.rng.random() < 0.5)

    def _write(self, data: bytes) -> None:
        """Data arrives in one piece or in several, always in order."""
        if self.is_over:
            return
        cuts = sorted(self.rng.randrange(len(data)) for _ in range(self.rng.choice((0, 0, 1, 3))))
        edges = zip([0, *cuts], [*cuts, len(data)], strict=True)
        self._deliver([data[begin:end] for begin, end in edges if begin < end])

    def _deliver(self, pieces: list[bytes]) -> None:
        is_idle = not self._outgoing  # else an earlier request, answered early, still arrives
        self._outgoing += pieces
        if is_idle:
            self.loop.call_later(self.rng.choice((0.0, 0.0005, 0.01)), self._arrive)

    def _arrive(self) -> None:
        self.transport.deliver(self._outgoing.pop(0))
        if self._outgoing:
            self.loop.call_later(self.rng.choice((0.0, 0.0005, 0.01)), self._arrive)

    # called by the transport

    def feed(self, data: bytes) -> None:
        if not self.is_over:
            self._parser.feed_data(data)
            if not self.reply.is_complete:
                self.on_data(self.reply)

    def end(self) -> None:
        self.is_over = True
        self._changed.set()

    # called by the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        self.reply.headers[name.decode().lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.reply.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self.reply.body += data

    def on_message_complete(self) -> None:
        assert not self.reply.is_complete, "two responses to one request"
        self.reply.is_complete = True
        self._changed.set()
