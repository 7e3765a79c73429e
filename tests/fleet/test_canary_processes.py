"""A canary behind the gateway, as processes: a flawed one is rolled back, an equal one promoted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.fleet.processes import GatewayProcess, Replica, wait_until

pytestmark = pytest.mark.slow

SETTINGS = {"model": "demo", "kv_cache_memory_bytes": 32 << 20, "num_threads": 1}


@pytest.fixture(scope="module")
def stable() -> Iterator[Replica]:
    replica = Replica(SETTINGS)
    replica.start()
    replica.wait_ready()
    yield replica
    replica.kill()


def roll_out(
    stable: Replica, canary: Replica, max_requests: int
) -> tuple[dict[str, Any], set[str]]:
    """The rollout's record once it has a verdict, and all answers to one prompt."""
    gateway = GatewayProcess(
        [stable.url],
        policy="round-robin",
        canary=(canary.url,),
        canary_shadow_share=1.0,
        canary_min_tokens=300,
        canary_min_sessions=8,
        canary_stages="0.5",
        canary_max_slowdown=5.0,
    )
    texts: set[str] = set()
    try:
        wait_until(gateway.is_ready)
        with httpx.Client(base_url=gateway.url, timeout=60) as http:
            for number in range(max_requests):
                body = {"prompt": "def f(", "max_tokens": 24, "seed": 7, "user": f"s{number}"}
                reply = http.post("/v1/completions", json={**body, "temperature": 0.8})
                assert reply.status_code == 200, reply.text
                texts.add(json.dumps(reply.json()["choices"]))
                record: dict[str, Any] = http.get("/canary").json()
                if record["state"] in ("rolled-back", "promoted"):
                    return record, texts
        return record, texts
    finally:
        gateway.stop()


def test_equal_version_is_promoted(stable: Replica) -> None:
    canary = Replica(SETTINGS)
    canary.start()
    canary.wait_ready()
    try:
        record, texts = roll_out(stable, canary, 200)
    finally:
        canary.kill()
    assert record["state"] == "promoted", record
    assert record["num_compared_tokens"] >= 300
    assert len(texts) == 1


def test_version_with_a_flaw_in_its_sampler_is_rolled_back_unseen(stable: Replica) -> None:
    canary = Replica(SETTINGS, flaw=True)
    canary.start()
    canary.wait_ready()
    try:
        record, texts = roll_out(stable, canary, 200)
    finally:
        canary.kill()
    assert record["state"] == "rolled-back", record
    assert record["reasons"] == ["its answers differ from the stable version's"]
    assert len(texts) == 1
