"""The app over a fake engine: in process (httpx over ASGI), or on a loopback port."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp

from ridgeline.config.server import ServerOptions
from ridgeline.fleet.app import GatewayService
from ridgeline.serve.app import create_app
from ridgeline.serve.server import GracefulServer, listen, url_of, uvicorn_config
from tests.serve.fake_engine import FakeEngine


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def http(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=create_app(engine), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


@contextmanager
def running(
    app: ASGIApp, options: ServerOptions | None = None, service: GatewayService | None = None
) -> Iterator[str]:
    """The URL of a server over `app` on a loopback port, in a thread; `service` of a gateway."""
    options = options or ServerOptions()
    with listen(ServerOptions(port=0)) as listener:
        own: Any = service or app.state.service  # type: ignore[attr-defined]
        server = GracefulServer(uvicorn_config(app, options), own, lambda: None)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        deadline = time.monotonic() + 10
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.01)
        try:
            yield url_of(listener)
        finally:  # a failing test must not leave a thread that keeps the process alive
            server.should_exit = True
            thread.join(timeout=10)
        assert not thread.is_alive()


@pytest.fixture
def served(engine: FakeEngine) -> Iterator[str]:
    """The URL of a server over the fake engine."""
    with running(create_app(engine)) as url:
        yield url
