"""No request without a JSON body holds the event loop: every such route of the apps is attacked.

The store holds as much as its pages can show. Bounds and clocks are those of `test_stall.py`.
"""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute, iter_route_contexts

from ridgeline.config.server import ServerOptions
from ridgeline.serve.app import create_admin_app, create_app
from ridgeline.serve.batch.attach import BatchOptions, attach_batches
from ridgeline.serve.batch.executor import background_engine
from ridgeline.serve.batch.records import InputFileError, NewBatch
from ridgeline.serve.batch.store import BatchStore
from ridgeline.serve.batch.validate import validate_file
from tests.serve.fake_engine import FakeEngine
from tests.serve.loop_time import CallbackTimes, callback_times
from tests.serve.test_stall import MAX_BYTES, MAX_HELD_S, ROUTES, TRIES, whole_app

LONG = "x" * 6000
"""Of a path or a query: longer ones are refused with the headers."""
NUM_FILES, NUM_BATCHES = 10_001, 101
"""One more than a page can show."""
FORM_TYPE = {"content-type": "multipart/form-data; boundary=B"}
Request = tuple[str, dict[str, Any]]
"""(path and query, further arguments of httpx)."""


def form(data: bytes, before: bytes = b"") -> bytes:
    file = b'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    purpose = b'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--B\r\n'
    return b"--B\r\n" + before + purpose + file + data + b"\r\n--B--\r\n"


def _uploads() -> Iterator[Request]:
    for unit in (b"x", b"\r", b"\r\n", b"\r\n-", b"\r\n--", b"\r\n--B "):
        yield "/v1/files", {"content": form(unit * (MAX_BYTES // len(unit))), "headers": FORM_TYPE}
    for before in (b"h: a\r\n" * 100_000, b"h" * MAX_BYTES, b"h: " + b"a" * MAX_BYTES):
        yield "/v1/files", {"content": form(b"{}", before), "headers": FORM_TYPE}
    for other in (b"\r\n" * MAX_BYTES, form(b"") + b"\r\n" * MAX_BYTES, form(b"") * 10_000):
        yield "/v1/files", {"content": other, "headers": FORM_TYPE}


def _by_id(pattern: str, name: str) -> Callable[[dict[str, str]], Iterator[Request]]:
    def requests(ids: dict[str, str]) -> Iterator[Request]:
        for given in (ids[name], LONG, "%2e%2e%2f" * 500):
            yield pattern.format(given), {}

    return requests


def _plain(path: str) -> Callable[[dict[str, str]], Iterator[Request]]:
    return lambda _: iter([(path, {}), (f"{path}?{LONG}", {})])


def _queries(path: str, limit: int) -> Callable[[dict[str, str]], Iterator[Request]]:
    queries = (f"limit={limit}", f"limit={limit}&after={LONG}", "limit=" + "9" * 6000)
    return lambda _: iter([(f"{path}?{query}", {}) for query in queries])


ATTACKS: dict[tuple[str, str], Callable[[dict[str, str]], Iterator[Request]]] = {
    **{
        ("GET", path): _plain(path)
        for path in (
            "/", "/health", "/ping", "/ready", "/version", "/openapi.json", "/metrics",
            "/ridgeline/config", "/v1/models", "/admin/state",
        )
    },
    ("POST", "/ping"): _plain("/ping"),
    ("GET", "/v1/models/{name:path}"): lambda _: iter([(f"/v1/models/{LONG}", {})]),
    ("GET", "/v1/responses/{response_id}"): _by_id("/v1/responses/{}", "file"),
    ("DELETE", "/v1/responses/{response_id}"): _by_id("/v1/responses/{}", "file"),
    ("GET", "/v1/responses/{response_id}/input_items"): _by_id(
        "/v1/responses/{}/input_items", "file"
    ),
    ("POST", "/v1/responses/{response_id}/cancel"): _by_id("/v1/responses/{}/cancel", "file"),
    ("POST", "/v1/files"): lambda _: _uploads(),
    ("GET", "/v1/files"): _queries("/v1/files", NUM_FILES - 1),
    ("GET", "/v1/files/{file_id}"): _by_id("/v1/files/{}", "file"),
    ("GET", "/v1/files/{file_id}/content"): _by_id("/v1/files/{}/content", "file"),
    ("DELETE", "/v1/files/{file_id}"): _by_id("/v1/files/{}", "file"),
    ("GET", "/v1/batches"): _queries("/v1/batches", NUM_BATCHES - 1),
    ("GET", "/v1/batches/{batch_id}"): _by_id("/v1/batches/{}", "batch"),
    ("POST", "/v1/batches/{batch_id}/cancel"): _by_id("/v1/batches/{}/cancel", "batch"),
    ("POST", "/admin/abort/{id}"): _by_id("/admin/abort/{}", "file"),
    ("POST", "/admin/drain"): _plain("/admin/drain"),
}  # fmt: skip


def _apps() -> tuple[FastAPI, FastAPI]:
    app = whole_app()
    return app, create_admin_app(app.state.service)


def test_every_route_without_a_body_is_attacked() -> None:
    attacked = set(ATTACKS) | {("POST", route.path) for route in ROUTES}
    for app in _apps():
        for context in iter_route_contexts(app.routes):
            route = context.original_route
            assert isinstance(route, APIRoute), f"no test attacks a route of this kind: {route}"
            assert {(method, route.path) for method in route.methods} <= attacked, route.path


def filled(store: BatchStore) -> dict[str, str]:
    """The ids of a large file, and of a batch with as many errors as are kept."""
    upload = store.files.begin()
    upload.write(b"x" * (8 << 20))
    file = upload.finish("n" * 255, "batch", None).id
    with store._db.transaction() as db:
        db.executemany(
            "INSERT INTO files (id, filename, purpose, num_bytes, created_at, complete) "
            "VALUES (?, ?, 'batch', 10, 10, 1)",
            [(f"file-{index}", "n" * 255) for index in range(NUM_FILES)],
        )
    metadata = {f"{index:064}": "v" * 512 for index in range(16)}
    error = InputFileError(code="invalid_json_line", message="m" * 200, line=1)
    for _ in range(NUM_BATCHES):
        new = NewBatch(
            input_file_id="file-none", endpoint="/v1/completions", completion_window="24h",
            window_s=86_400, metadata=metadata,
        )  # fmt: skip
        batch = store.create(new).id
        store.reject(batch, [error] * 100)
    return {"file": file, "batch": batch}


class Servers:
    """Clients of the app with batches and of the operators' app, and ids in the store."""

    def __init__(self, stack: AsyncExitStack, folder: Path) -> None:
        self._stack, engine = stack, FakeEngine()
        options = ServerOptions(allow_runtime_lora_updating=True)
        app = create_app(engine, options)
        batch_app = create_app(background_engine(engine))
        batch_options = BatchOptions(store=folder / "b.sqlite", max_concurrency=4, poll_s=0.01)
        attach_batches(app, batch_app, batch_options)
        self.ids = filled(app.state.batches.store)
        self._apps = (app, create_admin_app(app.state.service))

    async def open(self) -> Servers:
        await self._stack.enter_async_context(self._apps[0].router.lifespan_context(self._apps[0]))
        self._clients = [
            await self._stack.enter_async_context(
                httpx.AsyncClient(
                    transport=httpx.ASGITransport(app=app, raise_app_exceptions=False),
                    base_url="http://localhost",
                )
            )
            for app in self._apps
        ]
        return self

    async def send(self, method: str, path: str, **rest: Any) -> httpx.Response:
        http = self._clients[path.startswith("/admin")]
        content = rest.pop("content", None)
        if isinstance(content, bytes):
            rest["content"] = _pieces(content)
        return await http.request(method, path, **rest)


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    """A body as the server's sockets would deliver it."""
    for start in range(0, len(body), 1 << 16):
        yield body[start : start + (1 << 16)]
        await asyncio.sleep(0)


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[Servers]:
    async with AsyncExitStack() as stack:
        servers = await Servers(stack, tmp_path).open()
        gc.collect()
        gc.freeze()  # as the server does: a collection does not walk what earlier tests have loaded
        yield servers
    gc.unfreeze()


async def held_s(servers: Servers, method: str, request: Request, times: CallbackTimes) -> float:
    path, rest = request
    await asyncio.sleep(0)
    times.reset()
    reply = await servers.send(method, path, **rest)
    await asyncio.sleep(0)  # the last callback of the request ends here
    assert reply.status_code < 500 or reply.status_code == 503, reply.text[:200]
    return times.longest_s


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path"), ATTACKS)
async def test_no_request_without_a_body_holds_the_event_loop(
    method: str, path: str, servers: Servers
) -> None:
    held: list[tuple[float, str]] = []
    with callback_times() as times:
        for request in ATTACKS[method, path](servers.ids):
            shortest_s = await held_s(servers, method, request, times)
            for _ in range(TRIES - 1):
                if shortest_s < MAX_HELD_S:
                    break
                shortest_s = min(shortest_s, await held_s(servers, method, request, times))
            held.append((shortest_s, request[0][:80]))
    assert max(held)[0] < MAX_HELD_S, held


@pytest.mark.slow
async def test_the_document_of_the_routes_is_not_built_on_the_event_loop(servers: Servers) -> None:
    """It is built once: only the first request would show it."""
    with callback_times() as times:
        assert await held_s(servers, "GET", ("/openapi.json", {}), times) < MAX_HELD_S


def _line(prompt: bytes) -> bytes:
    head = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}
    return json.dumps(head).encode()[:-2] + b'"prompt":' + prompt + b"}}"


LINES = {
    "lists": b"[" + b",".join([b"[]"] * (MAX_BYTES // 3 - 100)) + b"]",
    "more than a body may have": b"[" + b",".join([b"[]"] * (10 << 20 >> 1)) + b"]",
    "token ids": b"[" + b",".join([b"1234567"] * (MAX_BYTES // 8 - 100)) + b"]",
    "a text": b'"' + b"a" * (MAX_BYTES - 200) + b'"',
}


@pytest.mark.slow
@pytest.mark.parametrize("what", LINES)
async def test_no_line_of_a_batch_holds_the_event_loop(what: str, servers: Servers) -> None:
    line = _line(LINES[what])
    assert not validate_file([line], "/v1/completions").errors
    with callback_times() as times:
        for _ in range(TRIES):
            sent = {"content": form(line), "headers": FORM_TYPE}
            file = (await servers.send("POST", "/v1/files", **sent)).json()["id"]
            body = {"input_file_id": file, "endpoint": "/v1/completions"}
            await asyncio.sleep(0)
            times.reset()
            body["completion_window"] = "24h"
            reply = await servers.send("POST", "/v1/batches", json=body)
            batch = reply.json()["id"]
            while reply.json()["status"] not in ("completed", "failed"):
                await asyncio.sleep(0.01)
                reply = await servers.send("GET", f"/v1/batches/{batch}")
            assert reply.json()["request_counts"]["failed"] == 1
            if times.longest_s < MAX_HELD_S:
                break
    assert times.longest_s < MAX_HELD_S
