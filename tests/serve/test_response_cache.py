"""Stored answers: the same bytes as computed ones, for the same request and tenant only."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec
import pytest

from ridgeline.config.server import ServerOptions
from ridgeline.records import Event, Finished, Sampling, Token, Usage
from ridgeline.serve.app import create_app
from ridgeline.serve.generation.request import GenerationRequest, SchedulingParams, TokenPrompt
from ridgeline.serve.response_cache.cache import ResponseCache, StoredAnswer, response_key
from ridgeline.serve.response_cache.replay import AnswerReplay
from ridgeline.serve.service import RESPONSE_CACHE_HEADER
from tests.serve.fake_engine import FakeEngine

BODY = {"model": "fake", "prompt": "hello", "max_tokens": 6, "temperature": 0}
CHAT = {
    "model": "fake",
    "max_tokens": 6,
    "seed": 3,
    "messages": [{"role": "user", "content": "hello"}],
}


def client_of(engine: FakeEngine, **options: Any) -> httpx.AsyncClient:
    app = create_app(engine, ServerOptions(response_cache_size=1 << 20, **options))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")


def events_of(text: str) -> list[str]:
    """The data of a stream without what differs between two responses."""
    events = []
    for line in text.splitlines():
        if line.startswith("data: {"):
            chunk = json.loads(line[6:])
            events.append(
                json.dumps({k: v for k, v in chunk.items() if k not in ("id", "created")})
            )
    return events


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", BODY), ("/v1/chat/completions", CHAT)],
)
async def test_stored_answer_equals_the_computed_one(path: str, body: dict[str, Any]) -> None:
    engine = FakeEngine()
    async with client_of(engine) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        body = {**body, "model": model}
        first, second = [await http.post(path, json=body) for _ in range(2)]
        streams = [await http.post(path, json={**body, "stream": True}) for _ in range(2)]
    assert first.status_code == 200, first.text
    assert first.headers[RESPONSE_CACHE_HEADER] == "miss"
    assert second.headers[RESPONSE_CACHE_HEADER] == "hit"
    assert first.json()["choices"] == second.json()["choices"]
    usage = second.json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"]
    assert len(engine.requests) == 1
    assert streams[0].headers[RESPONSE_CACHE_HEADER] == "hit"
    chunks = events_of(streams[0].text)
    assert chunks == events_of(streams[1].text)
    assert len(chunks) > 3, "a stored answer is streamed token by token"


async def test_replayed_stream_equals_the_recorded_one() -> None:
    async with client_of(FakeEngine()) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        body = {**BODY, "model": model, "stream": True}
        recorded, replayed = [await http.post("/v1/completions", json=body) for _ in range(2)]
    assert recorded.headers[RESPONSE_CACHE_HEADER] == "miss"
    assert replayed.headers[RESPONSE_CACHE_HEADER] == "hit"
    assert events_of(recorded.text) == events_of(replayed.text)


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 1.0},  # neither greedy nor seeded
        {"cache_salt": "other"},
        {"max_tokens": 5},
        {"prompt": "hello!"},
        {"cache_control": {"type": "no_store"}},
    ],
    ids=str,
)
async def test_other_requests_are_computed(changes: dict[str, Any]) -> None:
    engine = FakeEngine()
    async with client_of(engine) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        await http.post("/v1/completions", json={**BODY, "model": model})
        other = await http.post("/v1/completions", json={**BODY, "model": model, **changes})
    assert other.headers.get(RESPONSE_CACHE_HEADER) != "hit"
    assert len(engine.requests) == 2


async def test_forgotten_answers_of_a_tenant_are_computed_again() -> None:
    engine = FakeEngine()
    async with client_of(engine) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        own, other = {**BODY, "model": model}, {**BODY, "model": model, "cache_salt": "other"}
        for body in (own, other):
            await http.post("/v1/completions", json=body)
        forgotten = await http.post("/v1/cache/forget", json={"prompt": BODY["prompt"]})
        assert forgotten.status_code == 200, forgotten.text
        replies = [await http.post("/v1/completions", json=body) for body in (own, other)]
    assert [reply.headers[RESPONSE_CACHE_HEADER] for reply in replies] == ["miss", "hit"]


async def test_failed_and_expired_answers_are_not_given_again() -> None:
    engine = FakeEngine()
    async with client_of(engine, response_cache_ttl=0.05) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        for _ in range(2):
            failed = await http.post(
                "/v1/completions", json={**BODY, "model": model, "prompt": "!fail"}
            )
            assert failed.headers.get(RESPONSE_CACHE_HEADER) != "hit"
        await http.post("/v1/completions", json={**BODY, "model": model})
        await asyncio.sleep(0.1)
        late = await http.post("/v1/completions", json={**BODY, "model": model})
    assert late.headers[RESPONSE_CACHE_HEADER] == "miss"


@pytest.mark.parametrize(("prediction", "counted"), [((), None), ((3, 4), 0)])
async def test_a_replay_counts_the_predictions_of_its_own_request(
    prediction: tuple[int, ...], counted: int | None
) -> None:
    """The answer was computed for a request with a prediction."""
    usage = Usage(prompt_tokens=2, cached_tokens=0, completion_tokens=0)
    drafted = msgspec.structs.replace(
        usage, accepted_prediction_tokens=5, rejected_prediction_tokens=9
    )
    end = Finished(request_id="a", index=0, reason="stop", at_s=1.0, usage=drafted)
    stored = StoredAnswer("", (msgspec.msgpack.encode([end]),), 0.0)
    steps: list[Sequence[Event]] = []
    terms = {"request_id": "b", "prediction": prediction}
    await AnswerReplay(stored, lambda: 2.0).listen([1, 2], Sampling(), steps.append, **terms)
    while not steps:
        await asyncio.sleep(0)
    ((found,),) = steps
    assert isinstance(found, Finished)
    assert found.request_id == "b"
    assert found.usage.accepted_prediction_tokens == counted
    assert found.usage.rejected_prediction_tokens == counted


async def test_off_by_default() -> None:
    app = create_app(FakeEngine())
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        reply = await http.post("/v1/completions", json={**BODY, "model": model})
    assert RESPONSE_CACHE_HEADER not in reply.headers


def answer(size: int) -> list[list[Any]]:
    usage = Usage(prompt_tokens=1, cached_tokens=0, completion_tokens=1)
    end = Finished(request_id="r", index=0, reason="stop", at_s=0.0, usage=usage)
    return [[Token(request_id="r", index=0, token=1, text="x" * size, at_s=0.0), end]]


def test_size_is_bounded_and_one_tenant_takes_half_of_it() -> None:
    cache = ResponseCache(10_000, 60.0, lambda: 0.0)
    for i in range(20):
        cache.store(b"a%d" % i, "a", answer(600))
        assert cache.num_bytes <= 5_000
    cache.store(b"b", "b", answer(600))
    assert cache.find(b"b") is not None
    assert cache.find(b"a19") is not None, "the tenant's latest answer"
    assert cache.find(b"a0") is None
    cache.store(b"large", "c", answer(6_000))
    assert cache.find(b"large") is None, "more than a tenant may have"
    cache.forget("a")
    assert cache.find(b"a19") is None
    assert cache.find(b"b") is not None, "an answer of another tenant"
    cache.forget("b")
    assert (len(cache), cache.num_bytes) == (0, 0)


def test_key_ignores_the_seed_of_a_greedy_request_and_nothing_else() -> None:
    def key(tenant: str = "", **sampling: Any) -> bytes | None:
        request = GenerationRequest(
            id="r",
            prompts=[TokenPrompt((1, 2))],
            sampling=Sampling(**sampling),
            scheduling=SchedulingParams(tenant=tenant),
        )
        return response_key(request, "m")

    assert key(temperature=0.0) == key(temperature=0.0, seed=5) is not None
    assert key(temperature=0.0) != key(temperature=0.0, max_tokens=3)
    assert key(temperature=1.0) is None
    assert key(temperature=1.0, seed=1) != key(temperature=1.0, seed=2)
    assert key("t", temperature=0.0) != key(temperature=0.0)


async def test_a_stored_answer_prolongs_the_pins_of_its_request() -> None:
    """As if it were computed: the next question behind the prefix finds it."""
    engine = FakeEngine()
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    async with client_of(engine) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        body = {**BODY, "model": model, **mark}
        first, second = [await http.post("/v1/completions", json=body) for _ in range(2)]
        assert first.status_code == 200, first.text
        plain = await http.post("/v1/completions", json={**BODY, "model": model})
    assert second.headers[RESPONSE_CACHE_HEADER] == "hit"
    assert plain.headers[RESPONSE_CACHE_HEADER] == "hit"
    ((tokens, policy, _, _),) = engine.pinned
    assert len(tokens) == second.json()["usage"]["prompt_tokens"] == policy.pin_tokens
    assert policy.pin_ttl_s == 3600


async def test_a_warm_up_is_computed_each_time() -> None:
    engine = FakeEngine()
    async with client_of(engine) as http:
        for _ in range(2):
            warmed = await http.post("/v1/cache/warm", json={"prompt": "hello"})
            assert warmed.status_code == 200, warmed.text
            assert RESPONSE_CACHE_HEADER not in warmed.headers
    assert len(engine.requests) == 2
