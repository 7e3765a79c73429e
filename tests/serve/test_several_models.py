"""Several models behind one address: routing by name, the list, metrics, health, memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from ridgeline.config.server import ServerOptions, TwinOptions
from ridgeline.config.settings import Settings
from ridgeline.errors import BadInput
from ridgeline.records.progress import silent
from ridgeline.serve.app import add_model, create_app
from ridgeline.serve.caching.routes import WarmRequest, warm_at_start
from ridgeline.serve.telemetry import open_telemetry
from ridgeline.workflows.serving.memory_shares import share_memory
from ridgeline.workflows.serving.serve import _all_settings, _open_app
from tests.conformance.tiny_models import make_model
from tests.serve.fake_engine import FakeEngine

OPTIONS = ServerOptions(api_key="secret-key-1234")
HEADERS = {"authorization": "Bearer secret-key-1234"}


@pytest.fixture
def engines() -> tuple[FakeEngine, FakeEngine]:
    first, second = FakeEngine(), FakeEngine()
    second.info = msgspec.structs.replace(second.info, model="other", adapters=("tuned",))
    return first, second


@pytest.fixture
def app(engines: tuple[FakeEngine, FakeEngine]) -> FastAPI:
    app = create_app(engines[0], OPTIONS)
    add_model(app, engines[1], OPTIONS)
    return app


@pytest.fixture
async def http(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://localhost", headers=HEADERS
    ) as client:
        yield client


CHAT = {"messages": [{"role": "user", "content": "hi"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": CHAT,
    "/v1/messages": {**CHAT, "max_tokens": 4},
    "/v1/responses": {"input": "hi"},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("model", "place"), [("fake", 0), ("other", 1)])
async def test_requests_reach_the_model_that_they_name(
    http: httpx.AsyncClient,
    engines: tuple[FakeEngine, FakeEngine],
    path: str,
    model: str,
    place: int,
) -> None:
    reply = await http.post(path, json={**BODIES[path], "model": model})
    assert reply.status_code == 200 and reply.json()["model"] == model
    assert [len(engine.requests) for engine in engines] == [1 - place, place]


async def test_requests_without_a_name_get_the_first_model(
    http: httpx.AsyncClient, engines: tuple[FakeEngine, FakeEngine]
) -> None:
    assert (await http.post("/v1/completions", json={"prompt": "a"})).status_code == 200
    assert [len(engine.requests) for engine in engines] == [1, 0]


async def test_unknown_model_is_not_found(http: httpx.AsyncClient) -> None:
    reply = await http.post("/v1/completions", json={"prompt": "a", "model": "third"})
    assert reply.status_code == 404
    assert "`fake`, `other`, `tuned`" in reply.json()["error"]["message"]


async def test_models_are_listed(http: httpx.AsyncClient) -> None:
    cards = (await http.get("/v1/models")).json()["data"]
    found = [(card["id"], card["parent"]) for card in cards]
    assert found == [("fake", None), ("other", None), ("tuned", "other")]
    assert (await http.get("/v1/models/tuned")).json()["parent"] == "other"
    assert (await http.get("/v1/models/none")).status_code == 404


async def test_metrics_of_all_models_are_one_page(http: httpx.AsyncClient) -> None:
    for model in ("fake", "other", "other"):
        await http.post("/v1/completions", json={"prompt": "a", "model": model})
    page = (await http.get("/metrics")).text
    families = list(text_string_to_metric_families(page))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    (success,) = [family for family in families if family.name == "vllm:request_success"]
    counts = {"fake": 0.0, "other": 0.0}
    for sample in success.samples:
        if sample.name.endswith("_total"):
            counts[sample.labels["model_name"]] += sample.value
    assert counts == {"fake": 1.0, "other": 2.0}
    for family in families:
        own = [(sample.name, tuple(sorted(sample.labels.items()))) for sample in family.samples]
        assert len(own) == len(set(own)), family.name


async def test_requests_of_all_models_are_exported(
    app: FastAPI, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    file = tmp_path / "emf.log"
    telemetry = open_telemetry(None, str(file), service="ridgeline")
    app.state.service.group.export_to(telemetry)
    for model in ("fake", "other"):
        await http.post("/v1/completions", json={"prompt": "a", "model": model})
    telemetry.close()
    lines = [msgspec.json.decode(line) for line in file.read_text().splitlines()]
    assert {(line["Model"], line["Requests"]) for line in lines} == {("fake", 1), ("other", 1)}


async def test_prompts_are_warmed_on_the_model_that_they_name(
    app: FastAPI, engines: tuple[FakeEngine, FakeEngine]
) -> None:
    await warm_at_start(app.state.service, [("", WarmRequest(model="other", prompt="a" * 40))])
    assert [len(engine.requests) for engine in engines] == [0, 1]


async def test_one_broken_engine_fails_the_health_check(
    http: httpx.AsyncClient, engines: tuple[FakeEngine, FakeEngine]
) -> None:
    assert (await http.get("/health")).status_code == 200
    engines[1].alive = False
    assert (await http.get("/health")).status_code == 503


async def test_keys_and_draining_are_shared(app: FastAPI, http: httpx.AsyncClient) -> None:
    body = {"prompt": "a", "model": "other"}
    wrong = {"authorization": "Bearer wrong"}
    assert (await http.post("/v1/completions", json=body, headers=wrong)).status_code == 401
    app.state.service.drain.start(5)
    assert (await http.post("/v1/completions", json=body)).status_code == 503


def test_equal_names_are_refused() -> None:
    app = create_app(FakeEngine(), ServerOptions())
    with pytest.raises(BadInput, match="same name"):
        add_model(app, FakeEngine(), ServerOptions())


def test_memory_is_shared(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_model("llama", tmp_path / name)
    first = Settings(model=str(tmp_path / "a"), max_num_seqs=2)
    second = Settings(model=str(tmp_path / "b"), kv_cache_memory_bytes=1 << 20)
    shared = share_memory([first, second])
    assert shared[0].kv_cache_memory_bytes and shared[0].max_model_len == 96
    assert shared[1].kv_cache_memory_bytes == 1 << 20


def test_contradicting_options_are_refused() -> None:
    options = ServerOptions(further_models=("demo",))
    with pytest.raises(BadInput, match="twin"):
        _all_settings(Settings(), options, TwinOptions(twin=True), silent)
    with pytest.raises(BadInput, match="--batch-store"):
        ServerOptions(further_models=("demo",), batch_store="x.sqlite")


@pytest.mark.slow
def test_grammars_are_ready_before_requests_are_served() -> None:
    """Building the trie of a large vocabulary keeps Python's lock for seconds."""
    settings = Settings(model="demo", max_model_len=64, num_threads=1)
    _, engine = _open_app(settings, ServerOptions(), None, silent)
    try:
        assert engine._masks._tokenizer is not None  # type: ignore[union-attr]
    finally:
        engine.close()
