"""Scripted servers behind the real gateway, in memory and on virtual time: they crash, some
requests crash them, and they are slow."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from typing import Any

import msgspec

from ridgeline.fleet.backends import Backends
from ridgeline.fleet.gateway import Gateway, GatewayConfig
from ridgeline.fleet.parking import Parking
from ridgeline.fleet.retry_budget import RetryBudget
from ridgeline.fleet.upstream import BackendAddress
from ridgeline.routing import make_router
from tests.fleet.scripted import HEAD, chunk
from tests.fleet.twin_fleet import FIRST_PORT, FleetLoop

_CLIENT_PAUSE_S = 200.0
_IDENTITY = b'x-ridgeline-resume: {"id":"c-1","created":1,"seed":1}\r\n\r\n'


class Asked(msgspec.Struct, kw_only=True):
    """A request: a token every `pace_s`; `fatal_s`: it ends its server after that time."""

    name: int
    num_tokens: int
    pace_s: float
    fatal_s: float | None = None
    stream: bool = True
    ridgeline_resume: dict[str, Any] = {}

    @property
    def answer(self) -> bytes:
        return b"".join(map(_event, range(self.num_tokens))) + b"data: [DONE]\n\n"


def _event(token: int) -> bytes:
    return b'data: {"t":%d}\n\n' % token


class VirtualServer:
    """A server at a port. `names_itself`: its probes carry an id of the process.

    `probe_s`: how long a probe waits for its answer, `first_s` a request for its first byte.
    While it `is_stopping` it refuses new requests, and while it `is_full` too; while it `hangs`,
    nothing comes from it. A stream that begins before `stalled_at_s` stands still from then on, and
    no other server can continue one of a server that is not `resumable`. With `opening`, a stream
    begins with that, `opened_s` before its first token.
    """

    probe_s = first_s = opened_s = 0.0
    opening = b""
    stalled_at_s, resumable = -1.0, True
    is_stopping = is_full = hangs = False

    def __init__(
        self, loop: FleetLoop, port: int, repair_s: float, *, names_itself: bool = True
    ) -> None:
        self._loop, self.port, self._repair_s = loop, port, repair_s
        self._names_itself = names_itself
        self.pipes: list[Any] = []
        self.num_started = self.num_fatal = 0
        self.start()

    def start(self) -> None:
        self.num_started += 1
        self._loop.twins[self.port] = self  # type: ignore[assignment]

    def make_protocol(self) -> _Served:
        return _Served(self)

    @property
    def is_up(self) -> bool:
        return self.port in self._loop.twins

    def kill(self) -> None:
        """The process ends; another one listens after the time of repair."""
        if self.is_up:
            del self._loop.twins[self.port]
            self.cut()
            self._loop.call_later(self._repair_s, self.start)

    def cut(self) -> None:
        """Every connection breaks; the process goes on."""
        for pipe in self.pipes:
            pipe.reset()
            pipe.protocol.stop()
        self.pipes.clear()

    def probe_head(self) -> bytes:
        name = b"x-ridgeline-instance: %d\r\n" % self.num_started if self._names_itself else b""
        return (b"HTTP/1.1 503 No\r\n" if self.is_stopping else b"HTTP/1.1 200 OK\r\n") + name


class _Served(asyncio.Protocol):
    """A connection of a client to a server."""

    def __init__(self, server: VirtualServer) -> None:
        self._server, self._data = server, b""
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.stop()

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, end, body = self._data.partition(b"\r\n\r\n")
        if not end:
            return
        if head.startswith(b"GET"):
            self._data = b""
            self._run(self._answer_probe())
            return
        length_at = head.lower().index(b"content-length:") + 15
        if len(body) >= int(head[length_at:].split(b"\r\n")[0]):
            self._data = b""
            asked = msgspec.json.decode(body, type=Asked)
            self._run(self._answer(asked))
            if asked.fatal_s is not None:
                self._run(self._crash(asked.fatal_s))

    def _run(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _crash(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        self._server.num_fatal += 1
        asyncio.get_running_loop().call_soon(self._server.kill)

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        while self._server.hangs:
            await asyncio.sleep(1.0)

    async def _answer_probe(self) -> None:
        if self._server.probe_s or self._server.hangs:
            await self._pause(self._server.probe_s)
        page = b'{"data":[{"id":"m"}]}'
        length = b"content-length: %d\r\n\r\n" % len(page)
        self._transport.write(self._server.probe_head() + length + page)

    async def _answer(self, asked: Asked) -> None:
        sent = sum(map(len, asked.ridgeline_resume.get("tokens", ())))
        await self._pause(asked.pace_s)
        if self._server.is_stopping or self._server.is_full:
            close = b"connection: close\r\n" if self._server.is_stopping else b""
            head = b"HTTP/1.1 503 No\r\ncontent-length: 2\r\n" + close
            self._transport.write(head + b"\r\n{}")
            return
        began_s = asyncio.get_running_loop().time()
        await self._pause(self._server.first_s)
        self._transport.write(HEAD + (_IDENTITY if self._server.resumable else b"\r\n"))
        if self._server.opening:
            self._transport.write(chunk(self._server.opening))
            await self._pause(self._server.opened_s)
        for token in range(sent, asked.num_tokens):
            await self._pause(asked.pace_s)
            if began_s < self._server.stalled_at_s:
                await asyncio.Event().wait()
            if self._server.is_stopping:
                self._transport.write(chunk(b": migrate\n\n") + b"0\r\n\r\n")
                return
            mark = b": 0:%d\n\n" % token if self._server.resumable else b""
            self._transport.write(chunk(_event(token) + mark))
        end = b": end\n\n" if self._server.resumable else b""
        self._transport.write(chunk(b"data: [DONE]\n\n" + end) + b"0\r\n\r\n")
        self.stop()


class VirtualFleet:
    """Servers, the gateway, and what became of requests."""

    def __init__(
        self,
        count: int,
        *,
        repair_s: float = 2.0,
        names_itself: bool = True,
        park_s: float = 120.0,
        retry_share: float = 1.0,
    ) -> None:
        self.loop = FleetLoop()
        self._park_s, self._retry_share = park_s, retry_share
        self.servers = [
            VirtualServer(self.loop, FIRST_PORT + i, repair_s, names_itself=names_itself)
            for i in range(count)
        ]
        self.wrong: list[str] = []
        self.num_right = 0

    def run(self, scene: Any) -> None:
        """Run a coroutine function of this fleet."""
        try:
            self.loop.run_until_complete(self._run(scene))
        finally:
            self.loop.close()

    async def _run(self, scene: Any) -> None:
        addresses = [BackendAddress("127.0.0.1", server.port) for server in self.servers]
        self.backends = Backends(addresses, make_router("least-loaded", 0))
        self.gateway = Gateway(
            self.backends,
            Parking(1000, self._park_s),
            RetryBudget(self._retry_share),
            GatewayConfig(),
        )
        await self.backends.start()
        await asyncio.sleep(1.0)
        try:
            await scene(self)
        finally:
            await self.backends.stop()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def ask(
        self,
        asked: Asked,
        *,
        reads_for_s: float = math.inf,
        path: str = "/v1/completions",
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> tuple[int, bytes]:
        """Status and body of the gateway's answer. From `reads_for_s` on, the client reads nothing
        for a while."""
        until_s = self.loop.time() + reads_for_s
        body = msgspec.json.encode(asked)
        incoming = [{"type": "http.request", "body": body}]
        status, parts = 0, []

        async def receive() -> dict[str, Any]:
            if incoming:
                return incoming.pop()
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Any) -> None:
            nonlocal status, until_s
            if self.loop.time() >= until_s:
                until_s = math.inf
                await asyncio.sleep(_CLIENT_PAUSE_S)
            status = message.get("status", status)
            parts.append(message.get("body", b""))

        sent = [(b"content-type", b"application/json"), *headers]
        scope = {"type": "http", "method": "POST", "path": path, "headers": sent}
        await self.gateway(scope, receive, send)
        return status, b"".join(parts)

    async def ask_innocent(self, asked: Asked) -> None:
        """Ask, and note whether the answer is right."""
        status, answer = await self.ask(asked)
        if (status, answer) == (200, asked.answer):
            self.num_right += 1
        else:
            self.wrong.append(f"{asked}: {status} {answer[-200:]!r}")

    async def clients(self, rng: random.Random, count: int, until_s: float) -> None:
        """Clients that send requests one after another; few different ones, short and long."""

        async def client() -> None:
            while self.loop.time() < until_s:
                name = rng.randrange(12)
                asked = Asked(name=name, num_tokens=1 + name * 3, pace_s=0.02 + 0.04 * (name % 4))
                await self.ask_innocent(asked)
                await asyncio.sleep(rng.expovariate(5.0))

        await asyncio.gather(*[client() for _ in range(count)])
