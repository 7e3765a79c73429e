"""The worker: side by side, bounded, in its window, and giving back what it does not finish."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from ridgeline.errors import BadInput
from ridgeline.serve.batch.records import Lease, Outcome
from ridgeline.serve.batch.store import Store
from ridgeline.serve.batch.worker import Busy, Window, Worker, WorkerOptions, seconds_of
from tests.serve.batch.helpers import Clock, created, now, outcome, results

QUICK = WorkerOptions(most=3, beat_s=0.01)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(tmp_path / "batches.sqlite")
    yield opened
    opened.close()


async def at_once(lease: Lease) -> Outcome:
    return outcome(lease)


async def test_every_batch_is_worked_off_by_few_at_once(store: Store) -> None:
    batches = [created(store, *"abcdefg"), created(store, *"hij")]
    running = most = 0

    async def answer(lease: Lease) -> Outcome:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.002)
        running -= 1
        return outcome(lease)

    await Worker(store, answer, QUICK).run_until_idle()
    assert [now(store, batch).status for batch in batches] == ["completed", "completed"]
    assert sum(len(results(store, now(store, batch))) for batch in batches) == 10
    assert most == 3


async def test_a_bad_file_fails_its_batch(store: Store) -> None:
    batch = created(store, "a", "a")
    await Worker(store, at_once, QUICK).run_until_idle()
    batch = now(store, batch)
    assert batch.status == "failed" and batch.errors is not None
    assert batch.errors[0].code == "duplicate_custom_id" and batch.total == 0


async def test_a_line_that_breaks_fails_alone(store: Store) -> None:
    batch = created(store, "a", "bad", "c")

    async def answer(lease: Lease) -> Outcome:
        if lease.custom_id == "bad":
            raise ValueError("secret of the machine")
        return outcome(lease)

    await Worker(store, answer, QUICK).run_until_idle()
    [(_, line)] = [each for each in results(store, now(store, batch)) if each[0] == "error"]
    assert line["error"]["code"] == "server_error" and "secret" not in str(line)
    assert now(store, batch).completed == 2


async def test_busy_lines_come_back(store: Store) -> None:
    batch, refusals = created(store, "a", "b"), 4

    async def answer(lease: Lease) -> Outcome:
        nonlocal refusals
        refusals -= 1
        if refusals >= 0:
            raise Busy
        return outcome(lease)

    await Worker(store, answer, QUICK).run_until_idle()
    assert now(store, batch).completed == 2 and refusals < 0


async def test_stopping_gives_back_what_is_not_answered(store: Store) -> None:
    batch = created(store, "a", "b")
    begun = asyncio.Event()

    async def answer(lease: Lease) -> Outcome:
        if lease.custom_id == "a":
            return outcome(lease)
        begun.set()
        await asyncio.sleep(3600)
        return outcome(lease)

    worker = Worker(store, answer, QUICK)
    task = asyncio.ensure_future(worker.run())
    await begun.wait()
    worker.stop()
    await task
    assert now(store, batch).completed == 1
    [lease] = store.lease(5)
    assert lease.custom_id == "b"


async def test_an_expired_batch_is_not_worked_on_any_more(tmp_path: Path) -> None:
    clock = Clock()
    store = Store(tmp_path / "batches.sqlite", clock=clock)
    batch = created(store, "a", window_s=100)
    stopped = asyncio.Event()

    async def answer(lease: Lease) -> Outcome:
        clock.now_s += 200
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            stopped.set()
            raise
        return outcome(lease)

    await asyncio.wait_for(Worker(store, answer, QUICK).run_until_idle(), 10)
    assert stopped.is_set() and now(store, batch).status == "expired"
    store.close()


async def test_a_store_that_refuses_for_a_while_loses_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, settle, refusals = created(store, "a", "b"), store.settle, [1, 2, 3]

    def full(done: list[Outcome]) -> int:
        if refusals:
            refusals.pop()
            raise sqlite3.OperationalError("database or disk is full")
        return settle(done)

    monkeypatch.setattr(store, "settle", full)
    await Worker(store, at_once, QUICK).run_until_idle()
    assert now(store, batch).completed == 2


async def test_nothing_begins_outside_the_window(store: Store) -> None:
    batch = created(store, "a")
    hour = datetime.fromtimestamp(store._clock()).hour
    shut = Window.parse(f"{(hour + 2) % 24}:00-{(hour + 4) % 24}:00")
    worker = Worker(store, at_once, WorkerOptions(most=3, beat_s=0.01, window=shut))
    task = asyncio.ensure_future(worker.run())
    await asyncio.sleep(0.1)
    assert now(store, batch).status == "in_progress" and now(store, batch).completed == 0
    worker.stop()
    await task


def test_windows() -> None:
    night = Window.parse("22:00-06:30")
    assert str(night) == "22:00-06:30"
    hours = [(21, 59), (22, 0), (3, 0), (6, 29), (6, 30)]
    found = [night.holds(datetime(2026, 1, 1, *at)) for at in hours]
    assert found == [False, True, True, True, False]
    assert Window.parse("9:00-17:00").holds(datetime(2026, 1, 1, 12))
    for text in ("", "22-6", "22:00", "25:00-6:00", "22:60-6:00", "1:00-1:00", "a:b-c:d"):
        with pytest.raises(BadInput, match="window"):
            Window.parse(text)


def test_spans() -> None:
    assert [seconds_of(text) for text in ("24h", "90m", "7d")] == [86_400, 5_400, 604_800]
    wrong = ("", "h", "24", "-1h", "0h", "1.5h", "24 h", "9999999999h", "²h")
    assert [seconds_of(text) for text in wrong] == [None] * len(wrong)


async def test_a_missing_file_fails_the_batch(store: Store) -> None:
    batch = created(store, "a")
    with store._db.transaction() as db:
        db.execute("DELETE FROM files")
    await Worker(store, at_once, QUICK).run_until_idle()
    assert now(store, batch).status == "failed"
