"""kill -9 of prefill and decode servers under load: every answer is complete and right."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import pytest

from tests.fleet.answers import REQUESTS, canonical
from tests.fleet.processes import GatewayProcess, Replica, wait_until

pytestmark = pytest.mark.slow
SETTINGS = {"model": "demo", "kv_cache_memory_bytes": 32 << 20, "num_threads": 1}
TEXT = "def add(a, b):\n    return a + b\n\n" * 10


def replica(mode: str) -> Replica:
    return Replica({**SETTINGS, "disaggregation_mode": mode})


def lengthened(body: dict[str, Any], number: int) -> dict[str, Any]:
    """The body with a long prompt that only requests of this number share."""
    head = f"# {number}\n{TEXT}"
    if "messages" in body:
        return {**body, "messages": [{"role": "user", "content": head}]}
    field = "prompt" if "prompt" in body else "input"
    return {**body, field: head + body[field]}


async def fetch(http: httpx.AsyncClient, name: str, number: int) -> bytes:
    path, body = REQUESTS[name]
    body = {**lengthened(body, number), "stream": True}
    reply = await http.post(f"/v1/{path}", json=body)
    assert reply.status_code == 200, reply.text
    return canonical(reply.content)


async def run_with_kills(
    gateway: GatewayProcess, victims: list[Replica], reference: Replica, num_kills: int
) -> tuple[int, list[str]]:
    """Kill servers in turn while clients ask; number of answers, and those that are wrong."""
    wrong: list[str] = []
    answers: list[tuple[str, int, bytes]] = []
    is_over = False

    async def ask_in_turn(client: int) -> None:
        number, names = client * 1000, list(REQUESTS)
        async with httpx.AsyncClient(base_url=gateway.url, timeout=120) as http:
            while not is_over:
                name, number = names[number % len(names)], number + 1
                try:
                    answers.append((name, number, await fetch(http, name, number)))
                except Exception as error:
                    wrong.append(f"{name}: {type(error).__name__} {error}")

    clients = [asyncio.create_task(ask_in_turn(i)) for i in range(3)]
    rng = random.Random(2)
    for i in range(num_kills):
        await asyncio.sleep(rng.uniform(0.3, 1.0))
        victim = victims[i % len(victims)]
        await asyncio.to_thread(victim.kill)
        victim.start()
        await asyncio.to_thread(victim.wait_ready)
    is_over = True
    await asyncio.gather(*clients)
    async with httpx.AsyncClient(base_url=reference.url, timeout=60) as http:
        for name, number, answer in answers:
            if await fetch(http, name, number) != answer:
                wrong.append(f"{name} {number}: {answer[-200:]!r}")
    return len(answers), wrong


async def test_kills_of_prefill_and_decode_servers_lose_and_change_nothing() -> None:
    prefill, decode, whole = replica("prefill"), replica("decode"), replica("none")
    started = [prefill, decode, whole]
    for own in started:
        own.start()
    try:
        for own in started:
            own.wait_ready()
        gateway = GatewayProcess(
            [], prefill_backend=(prefill.url,), decode_backend=(decode.url,), park_timeout_s=60.0
        )
        wait_until(gateway.is_ready)
        try:
            num_answers, wrong = await run_with_kills(gateway, [decode, prefill], whole, 6)
            assert not wrong, wrong[:3]
            assert num_answers >= 6
            assert gateway.metric("ridgeline_fleet_lost_total") == 0
            page = httpx.get(f"{gateway.url}/metrics").text
            assert 'prefills_total{result="handed_over"} 0.0' not in page
            print(f"{num_answers} answers, 6 kills")
        finally:
            gateway.stop()
    finally:
        for own in started:
            own.kill()
