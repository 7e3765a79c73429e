"""Backends that are scripted: in process, on loopback ports, with faults on demand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec

from ridgeline.config.server import CanaryOptions, FallbackOptions, RouteOptions, ServerOptions
from ridgeline.errors import BadInput
from ridgeline.fleet.app import GatewayService, create_gateway_app

Handler = Callable[["ScriptedBackend", dict[str, Any], asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class ScriptedBackend:
    """Answers POST by `handler`; its probes say that it is ready while `is_ready`, and say nothing
    while it `is_silent`."""

    def __init__(self, handler: Handler, model: str = "m") -> None:
        self.handler, self.model, self.is_ready, self.is_silent = handler, model, True, False
        self.bodies: list[dict[str, Any]] = []
        self.num_used_connections = 0  # that carried a request
        self.probe_headers = b""
        self.is_ridgeline = True
        self.url = ""
        self._writers: set[asyncio.StreamWriter] = set()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        await self.serve(reader, writer)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_used = False
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET"):
                    if self.is_silent:
                        continue
                    status = b"200 OK" if self.is_ready else b"503 Unavailable"
                    if head.startswith(b"GET /ready") and not self.is_ridgeline:
                        status = b"404 Not Found"
                    body = b'{"data":[{"id":"%b"}]}' % self.model.encode()
                    length = b"content-length: %d\r\n\r\n" % len(body)
                    writer.write(
                        b"HTTP/1.1 " + status + b"\r\n" + self.probe_headers + length + body
                    )
                    continue
                self.num_used_connections += not is_used
                is_used = True
                length_at = head.lower().index(b"content-length:") + 15
                num_bytes = int(head[length_at:].split(b"\r\n")[0])
                body = await reader.readexactly(num_bytes)
                self.bodies.append(msgspec.json.decode(body))
                await self.handler(self, self.bodies[-1], writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    def abort(self) -> None:
        """Break every connection."""
        for writer in self._writers:
            writer.transport.abort()


@asynccontextmanager
async def gateway_over(
    *backends: ScriptedBackend,
    prefill: Sequence[ScriptedBackend] = (),
    decode: Sequence[ScriptedBackend] = (),
    canary: Sequence[ScriptedBackend] = (),
    canary_options: Mapping[str, Any] = {},
    fallback: ScriptedBackend | None = None,
    fallback_options: Mapping[str, Any] = {},
    listed: bool = True,
    **options: Any,
) -> AsyncIterator[Any]:
    """A client of a gateway in this process over scripted backends, which it knows if they are
    `listed`."""
    servers = []
    scripted = [*backends, *prefill, *decode, *canary, *([fallback] if fallback else [])]
    for backend in scripted:
        server = await asyncio.start_server(backend.accept, "127.0.0.1", 0)
        backend.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        servers.append(server)
    service = GatewayService(ServerOptions())
    options.setdefault("policy", "round-robin")
    urls = tuple(backend.url for backend in backends if listed)
    try:
        app: Any = create_gateway_app(
            RouteOptions(
                backend=urls,
                prefill_backend=tuple(backend.url for backend in prefill),
                decode_backend=tuple(backend.url for backend in decode),
                **options,
            ),
            service,
            CanaryOptions(
                canary=tuple(backend.url for backend in canary),
                **{f"canary_{name}": value for name, value in canary_options.items()},
            ),
            FallbackOptions(
                fallback_url=fallback.url if fallback else None,
                **{f"fallback_{name}": value for name, value in fallback_options.items()},
            ),
        )
    except BadInput:
        for server in servers:
            server.close()
        raise
    asked: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    asked.put_nowait({"type": "lifespan.startup"})
    states: asyncio.Queue[Any] = asyncio.Queue()
    lifespan: asyncio.Task[None] = asyncio.create_task(
        app({"type": "lifespan"}, asked.get, states.put)
    )
    await states.get()
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            for _ in range(200):
                if not listed or (await http.get("/ready")).status_code == 200:
                    break
                await asyncio.sleep(0.02)
            yield http
    finally:
        asked.put_nowait({"type": "lifespan.shutdown"})
        await lifespan
        await asyncio.sleep(0.05)  # connections that were being accepted
        for server, backend in zip(servers, scripted, strict=True):
            server.close()
            backend.abort()
        await asyncio.sleep(0.01)


def answering(body: bytes) -> ScriptedBackend:
    """Answers every POST with one JSON body."""

    async def handle(_: ScriptedBackend, __: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        length = b"content-length: %d\r\n" % len(body)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n" + length + b"\r\n")
        writer.write(body)

    return ScriptedBackend(handle)
