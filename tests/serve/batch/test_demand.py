"""How many servers the open batch requests need, and who reports it."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from pathlib import Path

import httpx
import pytest

from ridgeline.fleet.backends import BatchDemand
from ridgeline.routing.batch_demand import (
    HALF_LIFE_S,
    BatchPace,
    batch_demand,
    wanted_servers,
)
from ridgeline.serve.batch.attach import store_name
from ridgeline.serve.batch.records import BatchJob, BatchResult, Lease
from ridgeline.serve.batch.store import BatchStore
from ridgeline.serve.batch.worker import BatchWorker, WorkerOptions
from tests.serve.batch.helpers import Clock, accepted, outcome


def batches(store: BatchStore, *sizes_and_windows: tuple[int, int]) -> list[BatchJob]:
    return [
        accepted(store, *(str(i) for i in range(size)), window_s=window_s)
        for size, window_s in sizes_and_windows
    ]


def test_pace_counts_only_the_time_in_which_requests_ran() -> None:
    pace = BatchPace()
    pace.note(0.0, 0, 0.0)
    assert pace.seconds_per_request is None
    pace.note(100.0, 0, 1.0)
    pace.note(106.0, 3, 0.0)
    pace.note(400.0, 0, 1.0)
    pace.note(402.0, 1, 0.0)
    assert pace.seconds_per_request == pytest.approx(2.0, rel=0.01)


def test_time_counts_by_the_share_of_requests_that_could_run() -> None:
    pace = BatchPace()
    pace.note(0.0, 0, 0.25)  # one of four: the others could have run, too
    pace.note(8.0, 1, 1.0)
    assert pace.seconds_per_request == pytest.approx(2.0, rel=0.01)
    pace.note(16.0, 4, 0.0)
    assert pace.seconds_per_request == pytest.approx(2.0, rel=0.02)


def test_pace_follows_what_is_recent() -> None:
    pace = BatchPace()
    pace.note(0.0, 0, 1.0)
    for second in range(1, 2000):
        pace.note(second, 1, 1.0)
    assert pace.seconds_per_request == pytest.approx(1.0, rel=0.01)
    for step in range(1, int(8 * HALF_LIFE_S / 4)):
        pace.note(2000 + 4 * step, 1, 1.0)
    assert pace.seconds_per_request == pytest.approx(4.0, rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_wanted_servers_are_those_of_the_tightest_deadline(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    clock = Clock()
    store = BatchStore(tmp_path / "b.sqlite", clock=clock)
    jobs = batches(store, *((rng.randint(1, 9), rng.randint(50, 5000)) for _ in range(6)))
    seconds = rng.uniform(1.0, 20.0)
    open_until = [(job.total, job.expires_at) for job in rng.sample(jobs, len(jobs))]
    found = wanted_servers(open_until, seconds, clock())
    needs = []
    for due in jobs:
        num = sum(job.total for job in jobs if job.expires_at <= due.expires_at)
        needs.append(min(num, num * seconds / (due.expires_at - clock())))
    assert found == pytest.approx(max(needs))
    store.close()


async def test_worker_tells_what_its_open_requests_need(tmp_path: Path) -> None:
    clock, timer = Clock(), Clock(0.0)
    store = BatchStore(tmp_path / "b.sqlite", clock=clock)
    batches(store, (5, 200))
    go_on, started = asyncio.Semaphore(2), asyncio.Event()

    async def execute(lease: Lease) -> BatchResult:
        if go_on.locked():
            started.set()
        await go_on.acquire()
        await asyncio.sleep(0)
        timer.now_s += 60
        return outcome(lease)

    options = WorkerOptions(max_concurrency=1, poll_s=0.01)
    worker = BatchWorker(store, execute, options, clock=clock, timer=timer)
    assert worker.wanted_servers == 0.0
    running = asyncio.create_task(worker.run())
    await started.wait()
    three_are_left = pytest.approx(3 * 60 / 200, rel=0.1)  # of a minute each, and 200 seconds
    async with asyncio.timeout(10):
        while worker.wanted_servers != three_are_left:
            await asyncio.sleep(0.001)
            timer.now_s += 0.001  # the next poll
    for _ in range(3):
        go_on.release()
    async with asyncio.timeout(10):
        while worker.wanted_servers:
            await asyncio.sleep(0.001)
            timer.now_s += 0.001
    worker.stop()
    await running
    store.close()


async def test_results_that_could_not_be_stored_count_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, timer = Clock(), Clock(0.0)
    store = BatchStore(tmp_path / "b.sqlite", clock=clock)
    batches(store, (1, 200))
    settle, counted, refusals = store.settle, list[int](), [1, 2, 3]
    note = BatchPace.note

    def full(done: list[BatchResult]) -> int:
        if refusals:
            refusals.pop()
            raise sqlite3.OperationalError("database or disk is full")
        return settle(done)

    def counting(pace: BatchPace, now_s: float, num_results: int, share: float) -> None:
        counted.append(num_results)
        note(pace, now_s, num_results, share)

    async def execute(lease: Lease) -> BatchResult:
        return outcome(lease)

    monkeypatch.setattr(store, "settle", full)
    monkeypatch.setattr(BatchPace, "note", counting)
    options = WorkerOptions(max_concurrency=1, poll_s=0.01)
    await BatchWorker(store, execute, options, clock=clock, timer=timer).run_until_idle()
    assert not refusals and sum(counted) == 1
    store.close()


async def test_probes_and_metrics_of_a_server_with_batches_tell(api: httpx.AsyncClient) -> None:
    reply = await api.get("/ready")
    demand = BatchDemand.parse(reply.headers["x-ridgeline-batch"].encode())
    assert demand.store and demand.servers == 0.0
    assert "ridgeline_batch_wanted_servers 0.0" in (await api.get("/metrics")).text


@pytest.mark.parametrize(
    "header", [None, b"", b"x", b"x=", b"x=nan", b"x=inf", b"x=-1", b"x=1e999", b"\xff=y"]
)
def test_what_is_no_demand_is_none(header: bytes | None) -> None:
    assert BatchDemand.parse(header) == BatchDemand()


def test_servers_that_share_a_store_are_counted_once(tmp_path: Path) -> None:
    assert batch_demand([("a", 1.5), ("b", 2.0), ("a", 1.25), ("", 0.0)]) == 3.5
    one, other = store_name(tmp_path / "x"), store_name(tmp_path / "y")
    assert one == store_name(tmp_path / "z" / ".." / "x") != other
