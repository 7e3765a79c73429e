"""Backends whose connections break at random bytes, before one real server in this process.

    gateway ─▶ CuttingBackend ─▶ server (real engine, scheduler, HTTP)

A cut is what a gateway sees of a killed server: every connection breaks, the one that is counted
after an exact number of bytes of its answer, and new ones are refused for a while. The server
itself goes on, unlike one that is killed: only its requests are lost.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
from uvicorn.server import ServerState

from ridgeline.config.server import ServerOptions
from ridgeline.config.settings import settings_from
from ridgeline.serve.app import create_app
from ridgeline.serve.server import uvicorn_config
from ridgeline.workflows.open_engine import open_engine
from tests.fleet.kill_load import KillReport

_CHUNK_BYTES = 65536


class CuttingBackend:
    """Passes connections on to `port`. `arm` cuts the next answer that has enough bytes."""

    def __init__(self, port: int, down_s: float) -> None:
        self._port, self._down_s, self.url = port, down_s, ""
        self._until_cut: int | None = None
        self._up_at_s = 0.0
        self._writers: set[asyncio.StreamWriter] = set()
        self.num_cuts = self.num_streams = 0
        self.has_cut = asyncio.Event()

    def arm(self, num_bytes: int) -> None:
        """Cut once `num_bytes` of answers have passed from now on."""
        self._until_cut = num_bytes
        self.has_cut.clear()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if asyncio.get_running_loop().time() < self._up_at_s:
            writer.transport.abort()
            return
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers |= {writer, up_writer}
        is_post = asyncio.Event()
        try:
            await asyncio.gather(
                self._pass_requests(reader, up_writer, is_post),
                self._pass_answers(up_reader, writer, is_post),
            )
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            for end in (writer, up_writer):
                self._writers.discard(end)
                end.transport.abort()

    async def _pass_requests(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_post: asyncio.Event
    ) -> None:
        while data := await reader.read(_CHUNK_BYTES):
            if data.startswith(b"POST"):
                is_post.set()
            writer.write(data)
            await writer.drain()
        writer.transport.abort()

    async def _pass_answers(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_post: asyncio.Event
    ) -> None:
        while data := await reader.read(_CHUNK_BYTES):
            if self._until_cut is not None and is_post.is_set():
                if len(data) > self._until_cut:
                    writer.write(data[: self._until_cut])
                    await writer.drain()
                    self.cut()
                    return
                self._until_cut -= len(data)
            writer.write(data)
            await writer.drain()
        writer.transport.abort()

    def cut(self) -> None:
        """Break every connection, and refuse new ones for a while."""
        self._until_cut = None
        self._up_at_s = asyncio.get_running_loop().time() + self._down_s
        self.num_cuts += 1
        self.has_cut.set()
        self.abort()

    def abort(self) -> None:
        for writer in tuple(self._writers):
            writer.transport.abort()


@asynccontextmanager
async def real_server(**settings: Any) -> AsyncIterator[int]:
    """The port of a server in this process."""
    values = {"model": "demo", "kv_cache_memory_bytes": 32 << 20, "num_threads": 1, **settings}
    engine = open_engine(settings_from(values))
    try:
        config = uvicorn_config(create_app(engine, ServerOptions()), ServerOptions())
        config.load()
        kind: Any = config.http_protocol_class
        state = ServerState()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            server = await asyncio.get_running_loop().create_server(
                lambda: kind(config=config, server_state=state, app_state={}), sock=listener
            )
            try:
                yield int(listener.getsockname()[1])
            finally:
                server.close()
                for connection in tuple(state.connections):
                    with suppress(Exception):
                        connection.transport.abort()
                await asyncio.gather(*state.tasks, return_exceptions=True)
    finally:
        engine.close()


async def run_with_cuts(
    http: httpx.AsyncClient,
    right: dict[str, bytes],
    backends: Sequence[CuttingBackend],
    num_cuts: int,
    num_clients: int,
    rng: random.Random,
) -> KillReport:
    """Cut connections of random backends at random bytes while clients ask."""
    report, is_over = KillReport(), asyncio.Event()
    clients = [
        asyncio.create_task(report.ask_until(http, right, number, is_over))
        for number in range(num_clients)
    ]
    for _ in range(num_cuts):
        victim = rng.choice(backends)
        victim.arm(rng.randrange(1, 20_000))
        await victim.has_cut.wait()
    is_over.set()
    await asyncio.gather(*clients)
    return report
