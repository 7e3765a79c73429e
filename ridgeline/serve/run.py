"""Listening, serving, and stopping without breaking a promise.

The socket is bound before the model is loaded, so that a taken port costs no minute. SIGINT or
SIGTERM stops accepting, lets running answers finish for up to `shutdown_timeout_s`, aborts the
rest, and returns; a second SIGINT does not wait.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import uvicorn
from fastapi import FastAPI

from ridgeline.errors import BadInput

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `[server]` table of a `ridgeline.toml`, and the flags of the same names."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    api_key: str | None = None
    shutdown_timeout_s: int = 30
    log_requests: bool = False
    batch_store: str | None = None
    batch_window: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise BadInput("--port is out of range", value=self.port, limit="0 (any free)..65535")
        if self.shutdown_timeout_s < 0:
            raise BadInput("--shutdown-timeout-s is negative", value=self.shutdown_timeout_s)


def options_from(table: dict[str, Any], flags: dict[str, Any]) -> ServerOptions:
    """Options from a file's `[server]` table; a flag that was given (not None) overrides it."""
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        return msgspec.convert({**table, **given}, ServerOptions)
    except msgspec.ValidationError as error:
        known = ", ".join(field.name for field in msgspec.structs.fields(ServerOptions))
        raise BadInput(f"[server]: {error}", limit=f"known options: {known}") from None


def listen(options: ServerOptions) -> socket.socket:
    """A listening socket; UserError where the address cannot be had.

    Its connections inherit TCP_NODELAY: tokens are small packets, and Nagle's algorithm with
    delayed acknowledgements would hold every second one back for 40 ms. (asyncio sets the option
    itself only on sockets made with an explicit protocol number.)
    """
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        listener = socket.create_server((options.host, options.port), family=family, backlog=2048)
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
    app: FastAPI,
    listener: socket.socket,
    options: ServerOptions,
    *,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve until SIGINT or SIGTERM; `ready` is called once requests are answered."""
    config = uvicorn.Config(
        app,
        log_level="info" if options.log_requests else "warning",
        access_log=options.log_requests,
        timeout_graceful_shutdown=options.shutdown_timeout_s,
        server_header=False,
        ws="none",
    )
    Server(config, ready).run(sockets=[listener])


class Server(uvicorn.Server):
    """uvicorn's server, which tells when it is ready and ends normally after a signal."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
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
