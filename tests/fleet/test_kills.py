"""kill -9 of replicas under load: every answer is complete and right, byte by byte."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.fleet.answers import REQUESTS
from tests.fleet.kill_load import KillReport, fetch, kill_replicas
from tests.fleet.processes import GatewayProcess, Replica, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def replicas() -> Iterator[list[Replica]]:
    started = [Replica(), Replica()]
    for replica in started:
        replica.start()
    for replica in started:
        replica.wait_ready()
    yield started
    for replica in started:
        replica.kill()


@pytest.fixture(scope="module")
def gateway(replicas: list[Replica]) -> Iterator[GatewayProcess]:
    process = GatewayProcess([replica.url for replica in replicas], policy="least-loaded")
    wait_until(process.is_ready)
    yield process
    process.stop()


async def run_with_kills(
    gateway: GatewayProcess, replicas: list[Replica], num_kills: int, num_clients: int
) -> KillReport:
    """Kill random replicas while clients send requests of every kind in turn."""
    async with httpx.AsyncClient(base_url=replicas[0].url, timeout=60) as http:
        right = {name: await fetch(http, name) for name in REQUESTS}
    report, is_over = KillReport(), asyncio.Event()
    async with httpx.AsyncClient(base_url=gateway.url, timeout=120) as http:
        clients = [
            asyncio.create_task(report.ask_until(http, right, i, is_over))
            for i in range(num_clients)
        ]
        await kill_replicas(replicas, num_kills, random.Random(1))
        is_over.set()
        await asyncio.gather(*clients)
    return report


async def test_no_answer_is_lost_or_changed_by_kills(
    gateway: GatewayProcess, replicas: list[Replica]
) -> None:
    began_s = time.monotonic()
    report = await run_with_kills(gateway, replicas, num_kills=30, num_clients=6)
    print(f"{report.num_answers.total()} answers, 30 kills, {time.monotonic() - began_s:.0f} s")
    assert not report.wrong, report.wrong[:3]
    assert report.num_answers.total() >= 30
    assert gateway.metric("ridgeline_fleet_resumed_total") >= 5
    assert gateway.metric("ridgeline_fleet_lost_total") == 0


def ranks_of(replica: Replica) -> list[int]:
    """Process ids of the ranks that a server has started."""
    assert replica.process is not None
    tasks = Path(f"/proc/{replica.process.pid}/task").glob("*/children")
    return [int(pid) for task in tasks for pid in task.read_text(encoding="ascii").split()]


async def test_streams_outlive_a_rank_and_its_server_exits(replicas: list[Replica]) -> None:
    """The server of a killed rank can compute nothing more: it ends, for another to be started."""
    settings = {"model": "demo", "kv_cache_memory_bytes": 32 << 20, "num_threads": 1}
    parallel = Replica({**settings, "pipeline_parallel_size": 2})
    parallel.start()
    parallel.wait_ready()
    gateway = GatewayProcess([parallel.url, replicas[0].url], policy="round-robin")
    wait_until(gateway.is_ready)
    try:
        names = ["greedy", "sampled", "penalised", "structured"]
        async with httpx.AsyncClient(base_url=replicas[0].url, timeout=60) as http:
            right = [await fetch(http, name) for name in names]
        async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
            streams = [asyncio.create_task(fetch(http, name)) for name in names]
            await asyncio.sleep(0.3)
            (rank,) = ranks_of(parallel)
            os.kill(rank, signal.SIGKILL)
            assert await asyncio.gather(*streams) == right
        assert gateway.metric("ridgeline_fleet_resumed_total") >= 1
        assert gateway.metric("ridgeline_fleet_lost_total") == 0
        assert parallel.process is not None
        parallel.process.join(20)
        assert parallel.process.exitcode == 1
    finally:
        gateway.stop()
        parallel.kill()
