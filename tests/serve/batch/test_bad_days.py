"""The batch worker on a machine whose clock jumps and whose disk fails."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import httpx

from ridgeline.serve.app import create_app
from ridgeline.serve.batch.attach import BatchOptions, attach_batches
from ridgeline.serve.batch.records import BatchResult, Lease
from ridgeline.serve.batch.store import BatchStore
from ridgeline.serve.batch.worker import BatchWorker, WorkerOptions
from tests.serve.fake_engine import FakeEngine


class CountingStore:
    """A store without batches that counts sweeps, and fails `num_errors` times."""

    is_full = False

    def __init__(self, num_errors: int = 0) -> None:
        self.num_sweeps, self.num_errors = 0, num_errors

    def recover(self) -> None: ...

    def with_status(self, *_statuses: str) -> list[Any]:
        return []

    def lease(self, _num: int) -> list[Lease]:
        return []

    def release(self, _leases: list[Lease]) -> None: ...

    def sweep(self) -> None:
        if self.num_errors:
            self.num_errors -= 1
            raise sqlite3.DatabaseError("database disk image is malformed")
        self.num_sweeps += 1


async def never(_lease: Lease) -> BatchResult:
    raise AssertionError("nothing is leased")


async def test_worker_goes_on_when_the_clock_steps_back() -> None:
    store, now = CountingStore(), [1e9]
    options = WorkerOptions(max_concurrency=1, poll_s=0.01)
    worker = BatchWorker(store, never, options, clock=lambda: now[0])  # type: ignore[arg-type]
    task = asyncio.ensure_future(worker.run())
    for _ in range(3):
        now[0] -= 3600
        before = store.num_sweeps
        async with asyncio.timeout(5):
            while store.num_sweeps < before + 2:
                await asyncio.sleep(0.01)
    worker.stop()
    await task


async def test_worker_survives_errors_of_the_store_and_counts_them() -> None:
    store = CountingStore(num_errors=3)
    worker = BatchWorker(store, never, WorkerOptions(max_concurrency=1, poll_s=0.01))  # type: ignore[arg-type]
    task = asyncio.ensure_future(worker.run())
    async with asyncio.timeout(5):
        while worker.num_failures < 3:
            await asyncio.sleep(0.001)
        while store.num_sweeps < 1 or worker.num_failures:
            await asyncio.sleep(0.001)
    assert not worker.has_died
    worker.stop()
    await task


async def test_dead_worker_makes_the_server_unhealthy(tmp_path: Path) -> None:
    app = create_app(FakeEngine())
    options = BatchOptions(store=tmp_path / "batches.db", max_concurrency=1)
    worker = attach_batches(app, create_app(FakeEngine()), options)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        assert (await http.get("/health")).status_code == 200
        task = asyncio.ensure_future(worker.run())
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait([task])
        reply = await http.get("/health")
        assert reply.status_code == 503 and "batch worker" in reply.text


def test_store_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    store = BatchStore(tmp_path / "batches.db")
    files = sorted(tmp_path.iterdir())
    assert len(files) == 3
    assert all(file.stat().st_mode & 0o077 == 0 for file in files), files
    store.close()
