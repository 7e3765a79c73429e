"""Connections in memory: a client's and a server's asyncio protocols, joined without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ridgeline.measure.mock.server import MockServer


class PipeEnd(asyncio.Transport):
    """One end; written data arrives at the other end in a later iteration of the event loop."""

    def __init__(self, protocol):
        super().__init__()
        self.protocol, self.other, self.closed = protocol, None, False
        self.loop = asyncio.get_running_loop()

    def write(self, data):
        if not self.closed and not self.other.closed:
            self.loop.call_soon(self.other._receive, bytes(data))

    def _receive(self, data):
        if not self.closed:
            self.protocol.data_received(data)

    def is_closing(self):
        return self.closed

    def close(self):
        self._hang_up(None)

    def abort(self):
        self._hang_up(ConnectionResetError("reset"))

    def _hang_up(self, error):
        if self.closed:
            return
        self.closed = True
        self.loop.call_soon(self.protocol.connection_lost, None)
        self.loop.call_soon(self.other._lost, error)

    def _lost(self, error):
        if not self.closed:
            self.closed = True
            self.protocol.connection_lost(error)


def connect_to(make: Callable[[], asyncio.Protocol]):
    """A `Connect` that joins each new connection to a fresh protocol of the server."""

    async def connect(origin, protocol):
        near, far = PipeEnd(protocol), PipeEnd(make())
        near.other, far.other = far, near
        far.protocol.connection_made(far)
        protocol.connection_made(near)
        return near

    return connect


def connect_to_mock(server: MockServer):
    return connect_to(server.protocol)


class Answering(asyncio.Protocol):
    """A server of one canned answer: bytes (or an ending) at instants after each request."""

    def __init__(self, parts, seen):
        self.parts, self.seen, self.transport, self.got = parts, seen, None, b""

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.got += data
        head, found, body = self.got.partition(b"\r\n\r\n")
        fields = head.lower().split(b"content-length: ")
        size = int(fields[1].split(b"\r\n")[0]) if len(fields) > 1 else 0
        if not found or len(body) < size:
            return
        self.got = b""
        self.seen.append((head, body))
        loop = asyncio.get_running_loop()
        for at_s, part in self.parts:
            loop.call_later(at_s, self._give, part)

    def _give(self, part):
        if part is None:
            self.transport.close()
        elif isinstance(part, Exception):
            self.transport.abort()
        else:
            self.transport.write(part)
