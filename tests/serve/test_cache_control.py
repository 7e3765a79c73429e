"""Pinning, warming, limiting and forgetting prefixes over HTTP, and how they are counted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ridgeline.config.server import ServerOptions
from ridgeline.engine.engine import Engine
from ridgeline.errors import BadInput
from ridgeline.serve.app import create_app
from ridgeline.serve.caching.routes import read_warm_prompts
from tests.serve.conftest import running

SYSTEM = "You review code. " * 24
WARM = {"messages": [{"role": "system", "content": "You translate. " * 24}], "ttl": "1h"}


@pytest.fixture(scope="module")
def client(tmp_path_factory: Any) -> Iterator[httpx.Client]:
    file = tmp_path_factory.mktemp("warm") / "prompts.jsonl"
    file.write_text(json.dumps(WARM) + "\n", encoding="utf-8")
    options = ServerOptions(warm_prompts=str(file))
    with (
        Engine.open("demo", max_model_len=1024) as engine,
        running(create_app(engine, options), options) as url,
        httpx.Client(base_url=url, timeout=60) as made,
    ):
        yield made


def post(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()
    return result


def message(client: httpx.Client, question: str, **rest: Any) -> dict[str, int]:
    block = {"type": "text", "text": SYSTEM, **rest}
    messages = [{"role": "user", "content": question}]
    body = {"model": "demo", "max_tokens": 2, "system": [block], "messages": messages}
    usage: dict[str, int] = post(client, "/v1/messages", **body)["usage"]
    return usage


def test_marked_prefix_is_counted_as_created_and_then_as_read(client: httpx.Client) -> None:
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    first, second = message(client, "one", **mark), message(client, "two", **mark)
    created = first["cache_creation_input_tokens"]
    assert created >= 64
    assert created % 16 == 0
    assert first["cache_read_input_tokens"] == 0
    assert second["cache_read_input_tokens"] == created
    assert second["cache_creation_input_tokens"] == 0
    total = sum(first[name] for name in first if name != "output_tokens")
    again = sum(second[name] for name in second if name != "output_tokens")
    assert abs(total - again) < 4, "but for the question, every token is in one of the three"
    assert total - created < 40, "the mark ends after the system prompt"


def test_prompts_of_the_file_are_warm_before_the_first_request(client: httpx.Client) -> None:
    warmed = post(client, "/v1/cache/warm", **WARM)
    assert warmed["pinned_tokens"] >= 64
    assert warmed["cached_tokens"] >= warmed["pinned_tokens"] - 16
    assert warmed["ttl_seconds"] == 3600


def test_forgotten_and_unstored_prompts_are_computed_again(client: httpx.Client) -> None:
    def cached(**body: Any) -> int:
        done = post(client, "/v1/completions", model="demo", max_tokens=1, **body)
        return int(done["usage"]["prompt_tokens_details"]["cached_tokens"])

    text = "import os\nimport sys\n" * 12
    assert cached(prompt=text, cache_control={"type": "no_store"}) == 0
    assert cached(prompt=text, cache_control={"type": "ephemeral", "max_tokens": 32}) == 0
    assert cached(prompt=text) == 32
    assert cached(prompt=text) >= 64
    assert post(client, "/v1/cache/forget", prompt=text)["forgotten_tokens"] >= 64
    assert cached(prompt=text) == 0


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a", "messages": [{"role": "user", "content": "a"}]},
        {},
        {"prompt": "a", "ttl": "1d"},
    ],
)
def test_bad_bodies_are_refused(client: httpx.Client, body: dict[str, Any]) -> None:
    assert client.post("/v1/cache/warm", json=body).status_code == 400


def test_no_store_takes_no_time_to_live(client: httpx.Client) -> None:
    control = {"type": "no_store", "ttl": "5m"}
    body = {"model": "demo", "prompt": "a", "cache_control": control}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert "no_store" in response.text


def test_damaged_file_of_warm_prompts_names_its_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": 1}\n', encoding="utf-8")
    with pytest.raises(BadInput, match="line 2"):
        read_warm_prompts(file)
