"""Which keys see which files and batches, the size limit, and migration of the store."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path

import httpx
import pytest

from ridgeline.config.server import ServerOptions
from ridgeline.serve.app import create_app
from ridgeline.serve.batch.attach import BatchOptions, attach_batches
from ridgeline.serve.batch.database import VERSION
from ridgeline.serve.batch.executor import background_engine
from ridgeline.serve.batch.store import BatchStore
from tests.serve.batch.helpers import accepted, jsonl, request
from tests.serve.batch.test_api import ENDED, create, until
from tests.serve.fake_engine import FakeEngine

ROOM = 1 << 20


def keys_file(folder: Path) -> str:
    entries = (
        f'[[keys]]\nname = "{name}"\nsha256 = "{sha256(name.encode()).hexdigest()}"\n{more}'
        for name, more in (("alice", ""), ("bob", ""), ("root", "admin = true\n"))
    )
    path = folder / "keys.toml"
    path.write_text("\n".join(entries))
    return str(path)


@pytest.fixture
async def callers(
    engine: FakeEngine, tmp_path: Path
) -> AsyncIterator[dict[str, httpx.AsyncClient]]:
    app = create_app(engine, ServerOptions(api_keys_file=keys_file(tmp_path)))
    settings = BatchOptions(store=tmp_path / "s", max_concurrency=4, poll_s=0.01, max_bytes=ROOM)
    line_app = create_app(background_engine(engine), ServerOptions(max_body_bytes=2000))
    attach_batches(app, line_app, settings)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with app.router.lifespan_context(app):
        yield {
            name: httpx.AsyncClient(
                transport=transport,
                base_url="http://127.0.0.1",
                headers={"authorization": f"Bearer {name}"},
            )
            for name in ("alice", "bob", "root")
        }


async def test_keys_do_not_see_each_others_files_and_batches(
    callers: dict[str, httpx.AsyncClient], engine: FakeEngine
) -> None:
    alice, bob, root = callers["alice"], callers["bob"], callers["root"]
    batch = await until(alice, (await create(alice, jsonl(request("a")))).json()["id"], *ENDED)
    files = [batch["input_file_id"], batch["output_file_id"]]
    paths = [f"/v1/batches/{batch['id']}", *(f"/v1/files/{file}" for file in files)]
    paths += [f"/v1/files/{file}/content" for file in files]
    for path in paths:
        assert (await bob.get(path)).status_code == 404, path
        assert (await root.get(path)).status_code == 200, path
        assert (await alice.get(path)).status_code == 200, path
    assert (await bob.post(f"/v1/batches/{batch['id']}/cancel")).status_code == 404
    assert (await bob.delete(f"/v1/files/{files[0]}")).status_code == 404
    body = {"input_file_id": files[0], "endpoint": batch["endpoint"], "completion_window": "24h"}
    assert (await bob.post("/v1/batches", json=body)).status_code == 400
    for path, count in (("/v1/files", 2), ("/v1/batches", 1)):
        seen = {name: len((await each.get(path)).json()["data"]) for name, each in callers.items()}
        assert seen == {"alice": count, "bob": 0, "root": count}
    assert (await alice.delete(f"/v1/files/{files[0]}")).status_code == 200


async def test_batch_requests_use_the_cache_salt_of_their_key(
    callers: dict[str, httpx.AsyncClient], engine: FakeEngine
) -> None:
    tenants: dict[str, set[str]] = {}
    for name in ("alice", "bob"):
        http, before = callers[name], set(engine.requests)
        await until(http, (await create(http, jsonl(request(name)))).json()["id"], *ENDED)
        await http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1})
        tenants[name] = {engine.requests[request][3] for request in set(engine.requests) - before}
    assert len(tenants["alice"]) == len(tenants["bob"]) == 1  # online and batch alike
    assert tenants["alice"] != tenants["bob"]


async def test_too_large_batch_request_fails_alone(
    callers: dict[str, httpx.AsyncClient],
) -> None:
    alice, long = callers["alice"], request("long")
    long["body"]["messages"][0]["content"] = "x" * 3000
    reply = await create(alice, jsonl(request("a"), long, request("b")))
    batch = await until(alice, reply.json()["id"], *ENDED)
    assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    errors = (await alice.get(f"/v1/files/{batch['error_file_id']}/content")).text
    assert '"status_code":413' in errors and '"custom_id":"long"' in errors


async def test_full_store_refuses_uploads_until_something_is_deleted(
    callers: dict[str, httpx.AsyncClient],
) -> None:
    alice = callers["alice"]
    form = {"file": ("big.jsonl", b"x" * (ROOM - 20_000))}
    first = await alice.post("/v1/files", data={"purpose": "batch"}, files=form)
    assert first.status_code == 200
    refused = await alice.post("/v1/files", data={"purpose": "batch"}, files=form)
    assert refused.status_code == 413 and "batch-store-max-bytes" in refused.text
    assert (await alice.delete(f"/v1/files/{first.json()['id']}")).status_code == 200
    assert (await create(alice, jsonl(request("a")))).status_code == 200


def test_full_store_starts_no_request(tmp_path: Path) -> None:
    store = BatchStore(tmp_path / "s", max_bytes=1)
    accepted(store, "a")
    assert store.is_full and store.used_bytes() > 1
    store.close()


@pytest.mark.parametrize("version", [1, 2])
def test_store_of_a_former_version_is_migrated(tmp_path: Path, version: int) -> None:
    path = tmp_path / "old.sqlite"
    store = BatchStore(path)
    batch = accepted(store, "a", "b")
    store.close()
    with sqlite3.connect(path) as db:  # as that version had it
        db.execute("ALTER TABLE lines DROP COLUMN progress")
        for table in ("files", "batches") if version == 1 else ():
            db.execute(f"ALTER TABLE {table} DROP COLUMN tenant")
        db.execute(f"PRAGMA user_version = {version}")
    db.close()
    store = BatchStore(path)
    found = store.get(batch.id)
    assert found is not None and found.tenant == "" and found.total == 2
    assert store.page(tenant="alice") == [] and len(store.page()) == 1
    assert [lease.custom_id for lease in store.lease(5)] == ["a", "b"]
    store.close()
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA user_version").fetchone()[0] == VERSION
    db.close()
