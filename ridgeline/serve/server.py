"""Listening, serving, and stopping without breaking a promise.

The socket is bound before the model is loaded, so that a taken port costs no minute. SIGINT or
SIGTERM begins to drain (see `lifecycle.py`): nothing new is begun, running answers finish for up to
`shutdown_timeout_s`, the rest is aborted, and `run` returns; a second signal does not wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NamedTuple

import uvicorn
from starlette.applications import Starlette

from ridgeline.errors import BadInput
from ridgeline.serve.auth.middleware import is_loopback
from ridgeline.serve.config import ServerOptions
from ridgeline.serve.connection import ConnectionLimits, bounded_protocol
from ridgeline.serve.service import Service

_BACKLOG = 2048  # connections that wait in the system
_ACCEPTS_AT_ONCE = 32
"""asyncio accepts as many in one turn of its loop as it was told is the backlog. Thousands at once
would stand in everybody's way, and take some 16 KB each; in the system they take nearly nothing."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def check_exposed(options: ServerOptions) -> None:
    """BadInput where strangers could reach the port and nobody would ask them for a key."""
    has_key = options.api_key is not None or options.api_keys_file is not None
    if not is_loopback(options.host) and not has_key and not options.insecure:
        raise BadInput(
            "this address can be reached from other machines, and no API key is asked for",
            value=options.host,
            fix="give --api-key (or RIDGELINE_API_KEY, or --api-keys-file), or say --insecure",
        )


def listen(options: ServerOptions) -> socket.socket:
    """A listening socket; UserError where the address cannot be had.

    Its connections inherit TCP_NODELAY: tokens are small packets, and Nagle's algorithm with
    delayed acknowledgements would hold every second one back for 40 ms. (asyncio sets the option
    itself only on sockets made with an explicit protocol number.)
    """
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        address = options.host, options.port
        listener = socket.create_server(address, family=family, backlog=_BACKLOG)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        raise BadInput(
            f"cannot listen on this address: {error.strerror or error}",
            value=f"{options.host}:{options.port}",
            fix="choose another --port or --host (--port 0 takes any free port)",
        ) from None


def url_of(listener: socket.socket) -> str:
    """The address a client on this machine would use."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(
    app: Starlette,
    listener: socket.socket,
    options: ServerOptions,
    *,
    ready: Callable[[], None] = lambda: None,
    admin: Admin | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM; `ready` is called once requests are answered."""
    service: Service = app.state.service
    Server(server_config(app, options), service, ready, admin).run(sockets=[listener])


def server_config(app: Starlette, options: ServerOptions) -> uvicorn.Config:
    """uvicorn as this server runs it. The drain has the patience; uvicorn then needs little."""
    limits = ConnectionLimits(
        max_connections=options.max_num_connections,
        header_timeout_s=options.header_timeout_s,
        send_timeout_s=options.send_timeout_s,
        linger_s=options.body_timeout_s,
    )
    return uvicorn.Config(
        app,
        http=bounded_protocol(limits),
        log_level="info" if options.log_requests else "warning",
        access_log=options.log_requests,
        backlog=_ACCEPTS_AT_ONCE,
        timeout_keep_alive=options.keep_alive_s,
        timeout_graceful_shutdown=1,
        server_header=False,
        ws="none",
    )


class Admin(NamedTuple):
    """The operator's app and the socket it is served on."""

    app: Starlette
    listener: socket.socket


class Server(uvicorn.Server):
    """uvicorn's server, which drains before it stops and ends normally after a signal."""

    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        ready: Callable[[], None],
        admin: Admin | None = None,
    ) -> None:
        super().__init__(config)
        self._service, self._ready, self._admin = service, ready, admin
        self._beside: tuple[uvicorn.Server, asyncio.Task[None]] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal begins to drain, the second stops at once."""
        if self._service.drain.is_draining:
            self.should_exit = self.force_exit = True
        self._service.drain.begin(self._service.options.shutdown_timeout_s)

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._service.drain.is_over

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """What still runs ends with an error that tells why, then uvicorn closes all."""
        self._service.cut_off()
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn would leave the app's own tasks to be torn off
            await self.lifespan.shutdown()
        if self._beside is not None:
            self._beside[0].should_exit = True
            self._beside[0].force_exit = self.force_exit
            await self._beside[1]

    async def _serve_admin(self, admin: Admin) -> None:
        config = server_config(admin.app, self._service.options)
        server = _Beside(config)
        task = asyncio.create_task(server.serve(sockets=[admin.listener]))
        self._beside = server, task

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        for listener in sockets or []:
            listener.listen(_BACKLOG)  # asyncio has set it to what it accepts at once
        gc.collect()
        gc.freeze()  # the model's modules live as long as the server: no collection walks them
        if self._admin is not None:
            await self._serve_admin(self._admin)
        self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but a drained server returns instead of raising the signal again."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class _Beside(uvicorn.Server):
    """A second server in the same loop; signals are the first one's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
