"""Files and batches through the gateway: real servers with a store each, some cut off."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import uvicorn

from ridgeline.config.server import ServerOptions
from ridgeline.fleet.upstream import BackendLost
from ridgeline.serve.server import uvicorn_config
from tests.fleet.scripted import ScriptedBackend, answering, gateway_over
from tests.serve.batch.conftest import with_batches
from tests.serve.batch.helpers import jsonl, request
from tests.serve.fake_engine import FakeEngine

KEPT = {"data": {"purpose": "batch"}}


class StoreServer:
    """A real server with a batch store, behind a proxy that can be cut."""

    def __init__(self, store: Path) -> None:
        self._store, self.url, self.is_down, self._port = store, "", False, 0
        self.cut_after: int | None = None  # bytes of answers
        self.stays_away = False  # after it was cut
        self._writers: set[asyncio.StreamWriter] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        app = with_batches(FakeEngine(), self._store)
        server = uvicorn.Server(uvicorn_config(app, ServerOptions()))
        listener = socket.create_server(("127.0.0.1", 0))
        self._port = listener.getsockname()[1]
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            yield
        finally:
            self.abort()
            server.should_exit = server.force_exit = True
            await task

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_down:
            writer.transport.abort()
            return
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers |= {writer, up_writer}
        try:
            await asyncio.gather(
                self._copy(reader, up_writer), self._copy(up_reader, writer, counts=True)
            )
        except (ConnectionError, OSError):
            pass
        finally:
            for own in (writer, up_writer):
                self._writers.discard(own)
                own.transport.abort()

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counts: bool = False
    ) -> None:
        while data := await reader.read(65536):
            if counts and self.cut_after is not None and b"HTTP/1.1 200" not in data[:12]:
                data = data[: self.cut_after]
                self.cut_after -= len(data)
                if self.cut_after <= 0:
                    self.cut_after = None
                    self.is_down = self.stays_away
                    writer.write(data)
                    await writer.drain()
                    raise ConnectionError
            writer.write(data)
            await writer.drain()
        raise ConnectionError

    def abort(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    def cut(self) -> None:
        """No connection to it any more."""
        self.is_down = True
        self.abort()


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[tuple[StoreServer, StoreServer]]:
    one, other = StoreServer(tmp_path / "one.sqlite"), StoreServer(tmp_path / "other.sqlite")
    async with one.running(), other.running():
        yield one, other


@asynccontextmanager
async def gateway(*servers: StoreServer, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    backends = cast("tuple[ScriptedBackend, ...]", servers)
    async with gateway_over(*backends, **options) as http:
        wanted = sum(not server.is_down for server in servers)
        async with asyncio.timeout(10):
            while (await ready(http)) < wanted:
                await asyncio.sleep(0.02)
        yield http


async def ready(http: httpx.AsyncClient) -> int:
    view = (await http.get("/ridgeline/fleet")).json()
    return sum(backend["state"] == "ready" for backend in view["backends"])


async def upload(http: httpx.AsyncClient, *names: str, model: str = "fake") -> str:
    lines = [request(name) for name in names]
    for line in lines:
        line["body"]["model"] = model
    reply = await http.post("/v1/files", files={"file": ("in.jsonl", jsonl(*lines))}, **KEPT)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["id"])


async def create(http: httpx.AsyncClient, file_id: str) -> httpx.Response:
    body = {
        "input_file_id": file_id,
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    }
    return await http.post("/v1/batches", json=body)


async def completed(http: httpx.AsyncClient, batch_id: str) -> dict[str, Any]:
    async with asyncio.timeout(20):
        while True:
            reply = await http.get(f"/v1/batches/{batch_id}")
            if reply.status_code == 200 and reply.json()["status"] == "completed":
                return cast("dict[str, Any]", reply.json())
            await asyncio.sleep(0.05)


async def ids(http: httpx.AsyncClient, path: str, **query: Any) -> list[str]:
    """All pages of a list."""
    found: list[str] = []
    after: dict[str, str] = {}
    while True:
        page = (await http.get(path, params={**query, **after})).json()
        found += [item["id"] for item in page["data"]]
        if not page["has_more"]:
            return found
        after = {"after": page["last_id"]}


async def test_batches_run_where_their_files_are(
    servers: tuple[StoreServer, StoreServer],
) -> None:
    async with gateway(*servers) as http:
        batches, files = [], []
        for number in range(6):
            file_id = await upload(http, f"a{number}", f"b{number}")
            files.append(file_id)
            reply = await create(http, file_id)
            assert reply.status_code == 200, reply.text
            batches.append(reply.json()["id"])
        for number, batch_id in enumerate(batches):
            batch = await completed(http, batch_id)
            output = (await http.get(f"/v1/files/{batch['output_file_id']}/content")).text
            names = [json.loads(line)["custom_id"] for line in output.splitlines()]
            assert names == [f"a{number}", f"b{number}"]
        for limit in (1, 2, 4, 100):
            assert sorted(await ids(http, "/v1/batches", limit=limit)) == sorted(batches)
        assert set(files) <= set(await ids(http, "/v1/files", limit=3, order="asc"))
        inputs = await ids(http, "/v1/files", purpose="batch", limit=2)
        assert sorted(inputs) == sorted(files)
        per_store = [len((await direct(server, "/v1/batches"))["data"]) for server in servers]
        assert per_store == [3, 3], "new files take turns while no store has more to do"
    async with gateway(*servers) as http:  # another gateway finds them by asking
        assert (await http.get(f"/v1/batches/{batches[0]}")).json()["status"] == "completed"
        assert (await http.delete(f"/v1/files/{files[0]}")).json()["deleted"]
        assert (await http.get(f"/v1/files/{files[0]}")).status_code == 404
        reply = await http.post(f"/v1/batches/{batches[1]}/cancel")
        assert reply.status_code == 409 and "cannot be cancelled" in reply.text


async def direct(server: StoreServer, path: str) -> dict[str, Any]:
    async with httpx.AsyncClient() as http:
        return cast("dict[str, Any]", (await http.get(server.url + path)).json())


async def test_store_that_is_gone_is_named_and_goes_on_when_it_is_back(
    servers: tuple[StoreServer, StoreServer],
) -> None:
    async with gateway(*servers) as http:
        first, second = await upload(http, "a"), await upload(http, "b")
        owner, other = (
            servers if (await direct(servers[0], f"/v1/files/{first}")).get("id") else servers[::-1]
        )
        owner.cut()
        gone = await http.get(f"/v1/files/{first}")
        assert gone.status_code == 503 and owner.url in gone.text and gone.headers["retry-after"]
        assert (await create(http, first)).status_code == 503
        listed = await http.get("/v1/files")
        assert listed.status_code == 503 and owner.url in listed.text, "and not a part of it"
        assert (await http.get(f"/v1/files/{second}")).status_code == 200
        for _ in range(3):
            new = await upload(http, "c")
            assert (await direct(other, f"/v1/files/{new}"))["id"] == new
        unknown = await http.get("/v1/files/file-unknown")
        assert unknown.status_code == 503, "the store that is gone may have it"
        owner.is_down = False
        async with asyncio.timeout(10):
            while (await http.get(f"/v1/files/{first}")).status_code != 200:
                await asyncio.sleep(0.05)
        assert (await http.get("/v1/files/file-unknown")).status_code == 404
        batch = (await create(http, first)).json()
        assert (await completed(http, batch["id"]))["request_counts"]["completed"] == 1


async def test_server_that_was_never_ready_is_not_forgotten(
    servers: tuple[StoreServer, StoreServer],
) -> None:
    servers[1].is_down = True
    async with gateway(*servers) as http:
        file_id = await upload(http, "a")
        assert (await http.get("/v1/files/file-x")).status_code == 503
        listed = await http.get("/v1/files")
        assert [item["id"] for item in listed.json()["data"]] == [file_id]
        assert listed.headers["x-ridgeline-not-listed"] == servers[1].url


@pytest.mark.parametrize("seed", range(3))
async def test_download_that_breaks_off_goes_on_with_the_next_byte(
    servers: tuple[StoreServer, StoreServer], seed: int
) -> None:
    rng = random.Random(seed)
    content = jsonl(*({**request(str(i)), "pad": "x" * 2000} for i in range(3000)))
    content = content.replace(b"x" * 100, rng.randbytes(50).hex().encode())
    async with gateway(*servers) as http:
        reply = await http.post("/v1/files", files={"file": ("in.jsonl", content)}, **KEPT)
        assert reply.status_code == 200, "larger than other bodies may be"
        file_id = reply.json()["id"]
        for server in servers:
            server.cut_after = rng.randrange(1, len(content))
        found = await http.get(f"/v1/files/{file_id}/content", timeout=20)
        assert found.content == content
        assert any(server.cut_after is None for server in servers)


async def test_download_that_cannot_go_on_is_cut_and_not_ended(
    servers: tuple[StoreServer, StoreServer],
) -> None:
    content = jsonl(*(request(str(i)) for i in range(3000)))
    async with gateway(*servers) as http:
        reply = await http.post("/v1/files", files={"file": ("in.jsonl", content)}, **KEPT)
        file_id = reply.json()["id"]
        for server in servers:
            server.cut_after, server.stays_away = 70_000, True
        app = cast("httpx.ASGITransport", http._transport).app
        raising = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
        with pytest.raises(BackendLost, match="is not ready"):  # uvicorn then cuts the connection
            await raising.get(f"/v1/files/{file_id}/content", timeout=20)


async def test_what_no_server_can_do_is_refused(
    servers: tuple[StoreServer, StoreServer],
) -> None:
    async with gateway(*servers) as http:
        lines = jsonl({**request("a"), "body": {"model": "another", "messages": []}})
        reply = await http.post("/v1/files", files={"file": ("in.jsonl", lines)}, **KEPT)
        assert reply.status_code == 404 and "`another`" in reply.text
        assert (await create(http, "file-unknown")).status_code == 400
        assert (await http.post("/v1/batches", content=b"{")).status_code == 400
        assert (await http.get("/v1/batches?limit=0")).status_code == 400
        assert (await http.put("/v1/files/x")).status_code == 405
        for bad in ("a%0d%0ax:%20y", "..", "a%20b", "x" * 201):
            assert (await http.get(f"/v1/files/{bad}")).status_code in (404, 405)


async def test_servers_without_a_store_are_named_as_the_reason() -> None:
    async with gateway_over(answering(b"{}")) as http:
        for method, path in (("GET", "/v1/batches"), ("GET", "/v1/files/x"), ("POST", "/v1/files")):
            reply = await http.request(method, path, content=b"")
            assert reply.status_code == 404 and "--batch-store" in reply.text
