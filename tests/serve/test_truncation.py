"""`truncation: "auto"`: the oldest turns give way to the answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ridgeline.config.server import ServerOptions
from ridgeline.engine.engine import Engine
from ridgeline.serve.app import create_app
from tests.serve.conftest import running
from tests.serve.script_model import write_script_model

SCRIPT = "alpha beta gamma"
WORDS = "w" * 400  # 400 tokens: the vocabulary has no longer piece


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder: Path = write_script_model(tmp_path_factory.mktemp("m"), [SCRIPT])
    options = ServerOptions()
    with (
        Engine.open(str(folder), max_model_len=1000, kv_cache_memory_bytes=8 << 20) as engine,
        running(create_app(engine, options), options) as url,
        httpx.Client(base_url=url) as client,
    ):
        yield client


def dialogue(*, last: str = "#00") -> list[dict[str, Any]]:
    """Three long turns and a last one; the second calls a tool."""
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    return [
        {"role": "user", "content": f"first {WORDS}"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": f"second {WORDS}"},
        call,
        {"type": "function_call_output", "call_id": "1", "output": "done"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": f"third {WORDS}"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": last},
    ]


def test_oldest_turns_are_dropped_until_the_answer_has_room(http: httpx.Client) -> None:
    body = {"input": dialogue(), "max_output_tokens": 50, "instructions": "Be brief."}
    refused = http.post("/v1/responses", json={**body, "truncation": "disabled"})
    answer = http.post("/v1/responses", json={**body, "truncation": "auto"}).json()
    counted = http.post("/v1/responses/input_tokens", json={**body, "truncation": "auto"}).json()
    kept = {**body, "input": dialogue()[2:]}  # the second turn fits, with its call and result
    exact = http.post("/v1/responses/input_tokens", json=kept).json()
    assert refused.status_code == 400
    assert answer["truncation"] == "auto" and answer["output"][0]["content"][0]["text"] == SCRIPT
    assert answer["usage"]["input_tokens"] == exact["input_tokens"] == counted["input_tokens"]
    assert 900 < exact["input_tokens"] <= 950


def test_tighter_limit_drops_more_turns(http: httpx.Client) -> None:
    body = {"input": dialogue(), "max_output_tokens": 400, "truncation": "auto"}
    answer = http.post("/v1/responses", json=body).json()
    exact = http.post("/v1/responses/input_tokens", json={"input": dialogue()[6:]}).json()
    assert answer["usage"]["input_tokens"] == exact["input_tokens"]


def test_last_turn_that_does_not_fit_is_refused_as_too_long(http: httpx.Client) -> None:
    body = {"input": dialogue(last="w" * 1200), "truncation": "auto"}
    refused = http.post("/v1/responses", json=body)
    plain = http.post("/v1/responses", json={"input": "w" * 1200})
    assert refused.status_code == 400 and "1000" in refused.json()["error"]["message"]
    assert plain.json()["error"]["message"] == refused.json()["error"]["message"]


def test_fitting_conversation_stays_whole(http: httpx.Client) -> None:
    items = [{"role": "user", "content": "one"}, {"role": "user", "content": "#00"}]
    body = {"input": items, "max_output_tokens": 20}
    whole = http.post("/v1/responses", json=body).json()
    auto = http.post("/v1/responses", json={**body, "truncation": "auto"}).json()
    assert auto["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    assert whole["truncation"] == "disabled"


def test_chat_drops_turns_too_and_refuses_two_ways_of_cutting(http: httpx.Client) -> None:
    messages = [item for item in dialogue() if "role" in item]
    body = {"messages": messages, "max_tokens": 50, "truncation": "auto"}
    answer = http.post("/v1/chat/completions", json=body).json()
    both = http.post("/v1/chat/completions", json={**body, "truncate_prompt_tokens": 5})
    assert answer["choices"][0]["message"]["content"] == SCRIPT
    assert both.status_code == 400 and "excludes truncate_prompt_tokens" in both.text
