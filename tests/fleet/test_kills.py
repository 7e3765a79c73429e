"""kill -9 of replicas under load: every answer is complete and right, byte by byte."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.fleet.answers import REQUESTS, canonical
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


async def fetch(http: httpx.AsyncClient, name: str) -> bytes:
    path, body = REQUESTS[name]
    reply = await http.post(f"/v1/{path}", json={**body, "stream": True})
    assert reply.status_code == 200, reply.text
    return canonical(reply.content)


async def run_with_kills(
    gateway: GatewayProcess, replicas: list[Replica], num_kills: int, num_clients: int
) -> tuple[int, list[str]]:
    """Kill random replicas while both are ready; number of answers, and those that are wrong."""
    async with httpx.AsyncClient(base_url=replicas[0].url, timeout=60) as http:
        right = {name: await fetch(http, name) for name in REQUESTS}
    wrong: list[str] = []
    num_answers, is_over = 0, False
    rng = random.Random(1)

    async def ask_in_turn(number: int) -> None:
        nonlocal num_answers
        names = list(REQUESTS)
        async with httpx.AsyncClient(base_url=gateway.url, timeout=120) as http:
            while not is_over:
                name = names[number % len(names)]
                number += 1
                try:
                    answer = await fetch(http, name)
                    if answer != right[name]:
                        wrong.append(f"{name}: {answer[-300:]!r}")
                except Exception as error:
                    wrong.append(f"{name}: {type(error).__name__} {error}")
                num_answers += 1

    clients = [asyncio.create_task(ask_in_turn(i)) for i in range(num_clients)]
    for _ in range(num_kills):
        await asyncio.sleep(rng.uniform(0.05, 0.5))
        victim = rng.choice(replicas)
        await asyncio.to_thread(victim.kill)
        victim.start()
        await asyncio.to_thread(victim.wait_ready)
    is_over = True
    await asyncio.gather(*clients)
    return num_answers, wrong


async def test_no_answer_is_lost_or_changed_by_kills(
    gateway: GatewayProcess, replicas: list[Replica]
) -> None:
    began_s = time.monotonic()
    num_answers, wrong = await run_with_kills(gateway, replicas, num_kills=30, num_clients=6)
    print(f"{num_answers} answers, 30 kills, {time.monotonic() - began_s:.0f} s")
    assert not wrong, wrong[:3]
    assert num_answers >= 30
    assert gateway.metric("ridgeline_fleet_resumed_total") >= 5
    assert gateway.metric("ridgeline_fleet_lost_total") == 0
