"""Mutated bodies of every route: never a 500, a traceback or a hang; errors name a reason."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest

from ridgeline.config.server import ServerOptions
from ridgeline.engine.engine import Engine
from ridgeline.serve.app import create_app
from ridgeline.serve.rerank import routes as rerank_routes
from ridgeline.serve.rerank.template import RerankTokens
from tests.fuzz.bodies import BODIES
from tests.fuzz.mutate import mutate_bytes, mutate_json
from tests.fuzz.targets import dump
from tests.serve.fake_engine import FakeEngine

CORPUS = Path(__file__).parent / "corpus" / "http"
NUM_RUNS = int(os.environ.get("FUZZ_RUNS", "60"))
FIRST_RUN = int(os.environ.get("FUZZ_SEED", "0"))
MAX_S = 5.0
_JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def demo() -> Iterator[Engine]:
    """The real engine, with a context so short that no body makes it work for long."""
    with Engine.open("demo", max_model_len=96, kv_cache_memory_bytes=8 << 20) as engine:
        yield engine


@pytest.fixture(params=["fake", "demo"])
async def client(request: pytest.FixtureRequest) -> AsyncIterator[httpx.AsyncClient]:
    engine: Any = FakeEngine() if request.param == "fake" else request.getfixturevalue("demo")
    options = ServerOptions(
        enable_auto_tool_choice=True, tool_call_parser="hermes", reasoning_parser="qwen3"
    )
    tokens = RerankTokens((1, 2), (3,), 4, 5)  # neither model has those of ChatML
    find = rerank_routes.rerank_tokens if request.param == "fake" else lambda tokenizer: tokens
    with mock.patch.object(rerank_routes, "rerank_tokens", find):
        app = create_app(engine, options)
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=True)
        served = {"x-served": request.param}
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", headers=served
        ) as client:
            yield client


async def check(client: httpx.AsyncClient, path: str, body: bytes) -> int:
    """Send a body; the status, which is that of a success or of a refusal with a reason."""
    began_s = time.process_time()
    response = await asyncio.wait_for(client.post(path, content=body, headers=_JSON), 30)
    assert time.process_time() - began_s < MAX_S, f"too slow: {path} {body[:300]!r}"
    assert response.status_code in (200, 400, 404, 408, 413), (
        f"{response.status_code} {response.text[:300]} for {path} {body[:600]!r}"
    )
    if response.status_code != 200:
        check_error(path, response.json())
    elif "event-stream" in response.headers["content-type"]:
        assert '"code":500' not in response.text, f"{response.text[:500]} for {body[:600]!r}"
    return response.status_code


def check_error(path: str, document: Any) -> None:
    error = document["error"]
    message = error["message"]
    assert message and len(message) < 3000, f"{path}: {message[:200]!r}"
    assert "Traceback" not in message and "0x7f" not in message, message[:300]


def mutated(path: str, number: int) -> bytes:
    rng = random.Random(f"{path}/{number}")
    body = rng.choice(BODIES[path])
    if rng.random() < 0.05:
        return mutate_bytes(rng, dump(body))
    pool = [value for other in BODIES.values() for entry in other for value in entry.values()]
    return dump(mutate_json(rng, body, pool))


def served_as(client: httpx.AsyncClient, body: bytes) -> bytes:
    """The body with the name of the model that is served."""
    name = b"demo" if client.headers["x-served"] == "demo" else b"fake"
    return body.replace(b'"model": "M"', b'"model": "' + name + b'"')


@pytest.mark.parametrize("path", BODIES)
async def test_valid_bodies_are_accepted(path: str, client: httpx.AsyncClient) -> None:
    statuses = [await check(client, path, served_as(client, dump(body))) for body in BODIES[path]]
    scores = path in ("/v1/rerank", "/v1/score") and client.headers["x-served"] == "fake"
    assert scores or 200 in statuses, f"the mutations of {path} would start from nothing"


@pytest.mark.parametrize("path", BODIES)
async def test_mutated_bodies_end_in_success_or_in_a_reason(
    path: str, client: httpx.AsyncClient
) -> None:
    for number in range(FIRST_RUN, FIRST_RUN + NUM_RUNS):
        await check(client, path, served_as(client, mutated(path, number)))


@pytest.mark.parametrize("file", sorted(CORPUS.glob("*.json")), ids=lambda file: file.stem)
async def test_bodies_that_once_failed_stay_mended(file: Path, client: httpx.AsyncClient) -> None:
    entry = json.loads(file.read_text())
    await check(client, entry["path"], entry["body"].encode("utf-8", "surrogatepass"))
