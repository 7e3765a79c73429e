"""Backends behind a name in DNS: they come and go with its addresses."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from ridgeline.errors import BadInput
from ridgeline.fleet.discovery import backend_name
from ridgeline.fleet.discovery.backend_name import LOOK_UP_S, BackendName, resolve
from tests.fleet.scripted import ScriptedBackend, answering, gateway_over


class NameServer:
    """Answers with `hosts`; None: not at all."""

    def __init__(self, *hosts: str) -> None:
        self.hosts: list[str] | None = [*hosts]
        self.num_asked = 0

    async def resolve(self, host: str, port: int) -> list[str]:
        self.num_asked += 1
        if self.hosts is None:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return self.hosts


def listed(name: BackendName) -> list[str]:
    return [str(address) for address in name.addresses]


async def test_addresses_of_a_name_are_backends() -> None:
    server = NameServer("10.0.0.8", "10.0.0.7", "10.0.0.8", "fd00::9")
    name = BackendName("http://llm-server:8000/prefix", server.resolve)
    assert listed(name) == []
    await name.refresh(0)
    assert listed(name) == [
        "http://10.0.0.7:8000/prefix",
        "http://10.0.0.8:8000/prefix",
        "http://[fd00::9]:8000/prefix",
    ]


async def test_failed_look_up_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    server = NameServer("10.0.0.7")
    name = BackendName("http://llm-server:8000", server.resolve)
    await name.refresh(0)
    server.hosts = None
    for i in (1, 2):
        await name.refresh(i * LOOK_UP_S)
    assert listed(name) == ["http://10.0.0.7:8000"]
    assert caplog.text.count("llm-server cannot be looked up") == 1
    server.hosts = []
    await name.refresh(3 * LOOK_UP_S)
    assert listed(name) == []


async def test_name_is_looked_up_only_so_often() -> None:
    server = NameServer()
    name = BackendName("http://llm-server:8000", server.resolve)
    for now_s in (0, 0.3, LOOK_UP_S - 0.1, LOOK_UP_S, LOOK_UP_S + 0.1):
        await name.refresh(now_s)
    assert server.num_asked == 2


def test_certificates_are_not_for_addresses() -> None:
    with pytest.raises(BadInput, match="--backend-dns is not an http URL"):
        BackendName("https://llm-server:8000")


async def test_localhost_is_one_server() -> None:
    assert await resolve("localhost", 80) == ["127.0.0.1"]


@asynccontextmanager
async def listening(backend: ScriptedBackend, host: str, port: int = 0) -> AsyncIterator[int]:
    """The port of a backend."""
    server = await asyncio.start_server(backend.accept, host, port)
    yield int(server.sockets[0].getsockname()[1])
    server.close()
    backend.abort()
    await asyncio.sleep(0.01)


async def test_gateway_follows_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    names = NameServer("127.0.0.2")
    monkeypatch.setattr(backend_name, "LOOK_UP_S", 0.05)
    monkeypatch.setattr(BackendName.__init__, "__defaults__", (names.resolve,))
    first, second = (answering(b"{}") for _ in range(2))

    async def post_until(http: httpx.AsyncClient, backend: ScriptedBackend) -> None:
        num_before = len(backend.bodies)
        for _ in range(100):
            reply = await http.post("/v1/completions", json={"model": "m", "prompt": "x"})
            assert reply.status_code == 200
            if len(backend.bodies) > num_before:
                return
            await asyncio.sleep(0.02)
        raise AssertionError("the backend got no request")

    async with (
        listening(first, "127.0.0.2") as port,
        listening(second, "127.0.0.3", port),
        gateway_over(backend_dns=(f"http://llm-server:{port}",)) as http,
    ):
        await post_until(http, first)
        names.hosts = ["127.0.0.2", "127.0.0.3"]
        await post_until(http, second)
        names.hosts = ["127.0.0.3"]
        await asyncio.sleep(0.4)
        num_first = len(first.bodies)
        for _ in range(4):
            await post_until(http, second)
        assert len(first.bodies) == num_first
