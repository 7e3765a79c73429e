"""The worker: concurrency, retries, the daily window, and releasing unfinished requests."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from ridgeline.errors import BadInput
from ridgeline.serve.batch.records import BatchResult, Lease
from ridgeline.serve.batch.schemas import parse_window
from ridgeline.serve.batch.store import BatchStore
from ridgeline.serve.batch.worker import BatchWorker, DailyWindow, EngineBusy, WorkerOptions
from tests.serve.batch.helpers import Clock, created, now, outcome, results

QUICK = WorkerOptions(max_concurrency=3, poll_s=0.01)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BatchStore]:
    opened = BatchStore(tmp_path / "batches.sqlite")
    yield opened
    opened.close()


async def succeed(lease: Lease) -> BatchResult:
    return outcome(lease)


async def test_batches_run_with_limited_concurrency(store: BatchStore) -> None:
    batches = [created(store, *"abcdefg"), created(store, *"hij")]
    running = max_running = 0

    async def execute(lease: Lease) -> BatchResult:
        nonlocal running, max_running
        running += 1
        max_running = max(max_running, running)
        await asyncio.sleep(0.002)
        running -= 1
        return outcome(lease)

    await BatchWorker(store, execute, QUICK).run_until_idle()
    assert [now(store, batch).status for batch in batches] == ["completed", "completed"]
    assert sum(len(results(store, now(store, batch))) for batch in batches) == 10
    assert max_running == 3


async def test_bad_file_fails_its_batch(store: BatchStore) -> None:
    batch = created(store, "a", "a")
    await BatchWorker(store, succeed, QUICK).run_until_idle()
    batch = now(store, batch)
    assert batch.status == "failed" and batch.errors is not None
    assert batch.errors[0].code == "duplicate_custom_id" and batch.total == 0


async def test_request_that_raises_fails_alone(store: BatchStore) -> None:
    batch = created(store, "a", "bad", "c")

    async def execute(lease: Lease) -> BatchResult:
        if lease.custom_id == "bad":
            raise ValueError("secret")
        return outcome(lease)

    await BatchWorker(store, execute, QUICK).run_until_idle()
    [(_, line)] = [item for item in results(store, now(store, batch)) if item[0] == "error"]
    assert line["error"]["code"] == "server_error" and "secret" not in str(line)
    assert now(store, batch).completed == 2


async def test_busy_requests_are_retried(store: BatchStore) -> None:
    batch, refusals = created(store, "a", "b"), 4

    async def execute(lease: Lease) -> BatchResult:
        nonlocal refusals
        refusals -= 1
        if refusals >= 0:
            raise EngineBusy
        return outcome(lease)

    await BatchWorker(store, execute, QUICK).run_until_idle()
    assert now(store, batch).completed == 2 and refusals < 0


async def test_stop_releases_unfinished_requests(store: BatchStore) -> None:
    batch = created(store, "a", "b")
    started = asyncio.Event()

    async def execute(lease: Lease) -> BatchResult:
        if lease.custom_id == "a":
            return outcome(lease)
        started.set()
        await asyncio.sleep(3600)
        return outcome(lease)

    worker = BatchWorker(store, execute, QUICK)
    task = asyncio.ensure_future(worker.run())
    await started.wait()
    worker.stop()
    await task
    assert now(store, batch).completed == 1
    [lease] = store.lease(5)
    assert lease.custom_id == "b"


async def test_requests_of_an_expired_batch_are_cancelled(tmp_path: Path) -> None:
    clock = Clock()
    store = BatchStore(tmp_path / "batches.sqlite", clock=clock)
    batch = created(store, "a", window_s=100)
    stopped = asyncio.Event()

    async def execute(lease: Lease) -> BatchResult:
        clock.now_s += 200
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            stopped.set()
            raise
        return outcome(lease)

    await asyncio.wait_for(BatchWorker(store, execute, QUICK).run_until_idle(), 10)
    assert stopped.is_set() and now(store, batch).status == "expired"
    store.close()


async def test_store_errors_are_retried(store: BatchStore, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, settle, refusals = created(store, "a", "b"), store.settle, [1, 2, 3]

    def full(done: list[BatchResult]) -> int:
        if refusals:
            refusals.pop()
            raise sqlite3.OperationalError("database or disk is full")
        return settle(done)

    monkeypatch.setattr(store, "settle", full)
    await BatchWorker(store, succeed, QUICK).run_until_idle()
    assert now(store, batch).completed == 2


async def test_nothing_starts_outside_the_window(store: BatchStore) -> None:
    batch = created(store, "a")
    hour = datetime.fromtimestamp(store._clock()).hour
    closed = DailyWindow.parse(f"{(hour + 2) % 24}:00-{(hour + 4) % 24}:00")
    worker = BatchWorker(
        store, succeed, WorkerOptions(max_concurrency=3, poll_s=0.01, window=closed)
    )
    task = asyncio.ensure_future(worker.run())
    await asyncio.sleep(0.1)
    assert now(store, batch).status == "in_progress" and now(store, batch).completed == 0
    worker.stop()
    await task


def test_daily_windows() -> None:
    night = DailyWindow.parse("22:00-06:30")
    assert str(night) == "22:00-06:30"
    hours = [(21, 59), (22, 0), (3, 0), (6, 29), (6, 30)]
    contained = [night.contains(datetime(2026, 1, 1, *at)) for at in hours]
    assert contained == [False, True, True, True, False]
    assert DailyWindow.parse("9:00-17:00").contains(datetime(2026, 1, 1, 12))
    for text in ("", "22-6", "22:00", "25:00-6:00", "22:60-6:00", "1:00-1:00", "a:b-c:d"):
        with pytest.raises(BadInput, match="window"):
            DailyWindow.parse(text)


def test_completion_windows() -> None:
    assert [parse_window(text) for text in ("24h", "90m", "7d")] == [86_400, 5_400, 604_800]
    wrong = ("", "h", "24", "-1h", "0h", "1.5h", "24 h", "9999999999h", "²h")
    assert [parse_window(text) for text in wrong] == [None] * len(wrong)


async def test_missing_file_fails_the_batch(store: BatchStore) -> None:
    batch = created(store, "a")
    with store._db.transaction() as db:
        db.execute("DELETE FROM files")
    await BatchWorker(store, succeed, QUICK).run_until_idle()
    assert now(store, batch).status == "failed"
