"""A rolling update under load: each replica gets SIGTERM in turn and is started again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from tests.fleet.answers import REQUESTS, canonical
from tests.fleet.processes import GatewayProcess, Replica, wait_until

pytestmark = pytest.mark.slow

NAMES = ("greedy", "sampled", "structured", "choices")


@pytest.fixture
def replicas() -> Iterator[list[Replica]]:
    # A drain of no time: what runs at SIGTERM has to be continued elsewhere.
    started = [Replica(shutdown_timeout_s=0), Replica(shutdown_timeout_s=0)]
    for replica in started:
        replica.start()
    for replica in started:
        replica.wait_ready()
    yield started
    for replica in started:
        replica.kill()


async def fetch(http: httpx.AsyncClient, name: str) -> bytes:
    path, body = REQUESTS[name]
    reply = await http.post(f"/v1/{path}", json={**body, "stream": True})
    assert reply.status_code == 200, reply.text
    return canonical(reply.content)


async def test_rolling_update_loses_no_stream(replicas: list[Replica]) -> None:
    gateway = GatewayProcess([r.url for r in replicas], policy="least-loaded")
    try:
        wait_until(gateway.is_ready)
        async with httpx.AsyncClient(base_url=replicas[0].url, timeout=60) as http:
            right = {name: await fetch(http, name) for name in NAMES}
        answers: list[tuple[str, bytes]] = []
        is_over = False

        async def ask_in_turn(name: str) -> None:
            async with httpx.AsyncClient(base_url=gateway.url, timeout=120) as http:
                while not is_over:
                    answers.append((name, await fetch(http, name)))

        clients = [asyncio.create_task(ask_in_turn(name)) for name in NAMES]
        for replica in replicas * 2:
            await asyncio.sleep(0.5)
            replica.terminate()
            assert replica.process is not None
            await asyncio.to_thread(replica.process.join, 30)
            replica.start()
            await asyncio.to_thread(replica.wait_ready)
        is_over = True
        await asyncio.gather(*clients)
        assert len(answers) >= 4
        assert all(answer == right[name] for name, answer in answers)
        assert gateway.metric("ridgeline_fleet_migrated_total") >= 1
        assert gateway.metric("ridgeline_fleet_lost_total") == 0
        print(
            f"{len(answers)} answers, {gateway.metric('ridgeline_fleet_migrated_total')} migrated"
        )
    finally:
        gateway.stop()
