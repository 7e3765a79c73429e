"""Listen, serve, and shut down gracefully.

The socket is bound before the model is loaded, so that a port that is in use is reported at once.
SIGINT or SIGTERM starts to drain (`drain.py`): running requests may take up to
`shutdown_timeout_s`, the rest is cut off, and `run` returns. A second signal does not wait.
An engine that has stopped by itself (a rank was killed) cannot be started again in this process:
the server then stops in the same way, and `run` raises, for a supervisor to start another.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NamedTuple, Protocol

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from ridgeline.config.server import ServerOptions
from ridgeline.errors import BadInput, EngineUnavailable
from ridgeline.hardware.open_files import connections_that_fit, raise_limit
from ridgeline.serve.auth.middleware import is_loopback
from ridgeline.serve.connections.protocol import ConnectionLimits, limited_protocol
from ridgeline.serve.drain import DrainState

_LOG = logging.getLogger(__name__)
_BACKLOG = 2048
"""Connections that may wait in the system."""
_ACCEPT_AT_ONCE = 32
"""asyncio accepts up to `backlog` connections in one iteration of its loop. Thousands at once would
delay every request, and take some 16 KB each; in the system's queue they take almost nothing."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_REPEATED_S = 1.0


def check_exposed(options: ServerOptions) -> None:
    """BadInput if other machines could reach the server without a key."""
    has_key = options.api_key is not None or options.api_keys_file is not None
    if not is_loopback(options.host) and not has_key and not options.insecure:
        raise BadInput(
            "other machines can reach this address, and no API key is configured",
            value=options.host,
            fix="set --api-key (or RIDGELINE_API_KEY, or --api-keys-file), or --insecure",
        )


def listen(options: ServerOptions, files_each: int = 1) -> socket.socket:
    """A listening socket; BadInput if the address cannot be used, or too few files may be open.

    Each connection takes `files_each` descriptors of open files.
    """
    raise_limit(options.max_num_connections, files_each)
    return listen_at(options.host, options.port)


def listen_at(host: str, port: int, flag: str = "--port") -> socket.socket:
    """A listening socket; BadInput, which names the `flag` of the port, if the address cannot be
    used.

    Connections inherit TCP_NODELAY: tokens are small packets, and Nagle's algorithm with delayed
    acknowledgements would hold back every second one for 40 ms. (asyncio sets the option only on
    sockets that were created with a protocol number.)
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        raise BadInput(
            f"cannot listen on this address: {error.strerror or error}",
            value=f"{host}:{port}",
            fix=f"choose another {flag} or --host ({flag} 0 takes any free port)",
        ) from None


def url_of(listener: socket.socket) -> str:
    """The URL for clients on this machine."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(
    app: FastAPI,
    listener: socket.socket,
    options: ServerOptions,
    *,
    on_ready: Callable[[], None] = lambda: None,
    admin: AdminListener | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM; `on_ready` is called when requests are accepted.

    Raises EngineUnavailable where an engine has stopped by itself.
    """
    config = uvicorn_config(app, options)
    server = GracefulServer(config, app.state.service, on_ready, admin)
    server.run(sockets=[listener])
    if server.loss is not None:
        raise EngineUnavailable(
            f"the server stopped, because its engine cannot go on: {server.loss}; "
            "fix: start it again, or let systemd, Kubernetes or a fleet do so"
        )


def uvicorn_config(app: ASGIApp, options: ServerOptions, files_each: int = 1) -> uvicorn.Config:
    """uvicorn's configuration. Its own graceful shutdown is short: requests had their time while
    the server drained. `files_each` as in `listen`."""
    limits = ConnectionLimits(
        max_connections=connections_that_fit(options.max_num_connections, files_each),
        header_timeout_s=options.header_timeout_s,
        body_timeout_s=2 * options.body_timeout_s,
        send_timeout_s=options.send_timeout_s,
    )
    return uvicorn.Config(
        app,
        http=limited_protocol(limits),
        log_level="info" if options.log_requests else "warning",
        access_log=options.log_requests,
        backlog=_ACCEPT_AT_ONCE,
        timeout_keep_alive=options.keep_alive_s,
        timeout_graceful_shutdown=1,
        server_header=False,
        ws="none",
    )


class AdminListener(NamedTuple):
    """The operators' app and the socket that it is served on."""

    app: FastAPI
    listener: socket.socket


class DrainedService(Protocol):
    """What a server needs of its app to stop it gracefully."""

    @property
    def drain(self) -> DrainState: ...

    @property
    def options(self) -> ServerOptions: ...

    def lost(self) -> str | None:
        """Why it can answer nothing any more until it is started again; None while it can."""
        ...

    def end_streams(self) -> None:
        """End every open response with an error that says why."""
        ...


class GracefulServer(uvicorn.Server):
    """uvicorn's server, which drains before it stops, and returns after a signal.

    `service`: whose requests are drained. `loss`: why it stopped without a signal, if it did. With
    `closes_on_stop`, the port is free while they are: a draining server does not listen.
    """

    closes_on_stop = False
    _signalled_s: float | None = None

    def __init__(
        self,
        config: uvicorn.Config,
        service: DrainedService,
        on_ready: Callable[[], None] = lambda: None,
        admin: AdminListener | None = None,
    ) -> None:
        super().__init__(config)
        self._service, self._on_ready, self._admin = service, on_ready, admin
        self._admin_server: tuple[uvicorn.Server, asyncio.Task[None]] | None = None
        self.loss: str | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal starts to drain, the second stops at once.

        With `closes_on_stop`, a SIGTERM right after the first is none: a process that is to end
        with its parent gets one from each of the parent's threads.
        """
        now_s = time.monotonic()
        if self._signalled_s is None:  # it may drain already, because an engine has died
            self._signalled_s = now_s
        elif not self.closes_on_stop or now_s - self._signalled_s > _REPEATED_S:
            self.should_exit = self.force_exit = True
        self._service.drain.start(self._service.options.shutdown_timeout_s)

    async def on_tick(self, counter: int) -> bool:
        if self.loss is None and not self._service.drain.is_draining:
            self.loss = self._service.lost()
            if self.loss is not None:  # its requests have failed; other models' may be complete
                _LOG.critical("the server stops: %s", self.loss)
                self._service.drain.start(self._service.options.shutdown_timeout_s)
        if self.closes_on_stop and self._service.drain.is_draining:
            for server in self.servers:
                server.close()
        return await super().on_tick(counter) or self._service.drain.is_over

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        for listener in sockets or []:
            listener.listen(_BACKLOG)  # asyncio has set it to _ACCEPT_AT_ONCE
        # the model's modules live as long as the server: collections need not walk them
        gc.collect()
        gc.freeze()
        if self._admin is not None:
            server = _SecondServer(uvicorn_config(self._admin.app, self._service.options))
            task = asyncio.create_task(server.serve(sockets=[self._admin.listener]))
            self._admin_server = server, task
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Open responses end with an error that says why; then uvicorn closes everything."""
        self._service.end_streams()
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn skips this, and the app's background tasks would be torn off
            await self.lifespan.shutdown()
        if self._admin_server is not None:
            server, task = self._admin_server
            server.should_exit, server.force_exit = True, self.force_exit
            await task

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but a drained server returns instead of raising the signal again."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


class _SecondServer(uvicorn.Server):
    """A server in the same event loop, which leaves signals to the first one."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
