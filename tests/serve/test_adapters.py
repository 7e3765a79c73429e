"""LoRA adapters over HTTP: chosen by `model`, listed, loaded and unloaded."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ridgeline.config.server import ServerOptions
from ridgeline.engine.engine import Engine
from ridgeline.records import Sampling
from ridgeline.serve.app import create_app
from tests.conformance.tiny_models import make_model
from tests.engine.adapters.make_adapter import save_adapter

PROMPT = [5, 9, 11, 3]
BODY: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": 8, "ignore_eos": True}
OPTIONS = ServerOptions(served_model_name="base", allow_runtime_lora_updating=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served")
    make_model("llama", path / "base")
    for seed, name in enumerate(("one", "two")):
        save_adapter(path / name, path / "base", ["q_proj", "down_proj"], seed=seed)
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine.open(
        str(folder / "base"),
        enable_lora=True,
        lora_modules=(f"one={folder / 'one'}",),
        max_loras=2,
        kv_cache_memory_bytes=1 << 20,
        num_threads=1,
    ) as opened:
        yield opened


@pytest.fixture
async def http(engine: Engine) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=create_app(engine, OPTIONS))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


def ids(reply: httpx.Response) -> list[int]:
    assert reply.status_code == 200, reply.text
    return list(reply.json()["choices"][0]["token_ids"])


async def test_model_name_chooses_the_adapter(engine: Engine, http: httpx.AsyncClient) -> None:
    sampling = Sampling(temperature=0.0, max_tokens=8, ignore_eos=True)
    for name, adapter in (("base", ""), ("one", "one"), (None, "")):
        body = {**BODY, "model": name, "return_token_ids": True}
        reply = await http.post("/v1/completions", json=body)
        assert tuple(ids(reply)) == engine.generate([PROMPT], sampling, adapter)[0].tokens
        assert reply.json()["model"] == (name or "base")


async def test_models_lists_adapters_with_their_parent(http: httpx.AsyncClient) -> None:
    cards = (await http.get("/v1/models")).json()["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [("base", None), ("one", "base")]
    assert (await http.get("/v1/models/one")).json()["parent"] == "base"
    missing = await http.post("/v1/completions", json={**BODY, "model": "two"})
    assert missing.status_code == 404 and "`base`, `one`" in missing.json()["error"]["message"]


async def test_embeddings_of_an_adapter_are_refused(http: httpx.AsyncClient) -> None:
    reply = await http.post("/v1/embeddings", json={"input": PROMPT, "model": "one"})
    assert reply.status_code == 400 and "is not served here" in reply.text


async def test_adapters_are_loaded_and_unloaded(folder: Path, http: httpx.AsyncClient) -> None:
    load = {"lora_name": "two", "lora_path": str(folder / "two")}
    reply = await http.post("/v1/load_lora_adapter", json=load)
    assert reply.status_code == 200 and "added successfully" in reply.text
    again = await http.post("/v1/load_lora_adapter", json=load)
    assert again.status_code == 400 and "unload it first" in again.text
    body = {**BODY, "return_token_ids": True}
    found = [
        ids(await http.post("/v1/completions", json={**body, "model": name}))
        for name in ("base", "one", "two")
    ]
    assert found[2] not in found[:2]
    reply = await http.post("/v1/unload_lora_adapter", json={"lora_name": "two"})
    assert reply.status_code == 200
    reply = await http.post("/v1/completions", json={**body, "model": "two"})
    assert reply.status_code == 404
    unknown = await http.post("/v1/unload_lora_adapter", json={"lora_name": "two"})
    assert unknown.status_code == 404 and unknown.json()["error"]["type"] == "NotFoundError"


async def test_loading_needs_the_switch(engine: Engine, folder: Path) -> None:
    body = {"lora_name": "two", "lora_path": str(folder / "two")}
    transport = httpx.ASGITransport(app=create_app(engine, ServerOptions()))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert (await client.post("/v1/load_lora_adapter", json=body)).status_code == 404
