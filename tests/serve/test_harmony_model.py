"""The whole server over a model that writes harmony's channels, as gpt-oss does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from ridgeline.engine.engine import Engine
from ridgeline.serve.output_parsers.harmony import MARKS
from tests.serve.script_model import script_name, write_script_model
from tests.serve.test_scripted_models import TOOLS, ask, server_of, streamed

THOUGHT = "<|channel|>analysis<|message|>I muse.<|end|><|start|>assistant"
SCRIPTS = [
    THOUGHT + "<|channel|>final<|message|>Answer: 5.",
    THOUGHT + "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "Oslo"}',
]
ANSWER, CALL = range(len(SCRIPTS))
HARMONY: dict[str, Any] = {
    "enable_auto_tool_choice": True,
    "tool_call_parser": "openai",
    "reasoning_parser": "openai_gptoss",
}


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Marks as plain text, because each token of the model can occur only once."""
    folder = write_script_model(tmp_path_factory.mktemp("m"), SCRIPTS)
    with opened(folder) as client:
        yield client


@contextmanager
def opened(folder: Path) -> Iterator[httpx.Client]:
    with (
        Engine.open(str(folder), max_num_seqs=4, kv_cache_memory_bytes=8 << 20) as engine,
        server_of(engine, **HARMONY) as client,
    ):
        yield client


def test_marks_that_are_special_tokens_are_read(tmp_path: Path) -> None:
    call = SCRIPTS[CALL].removeprefix(THOUGHT)
    folder = write_script_model(tmp_path, [call], special_tokens=[m for m in MARKS if m in call])
    with opened(folder) as client:
        (found,) = ask(client, 0, tools=TOOLS)["message"]["tool_calls"]
    assert found["function"]["name"] == "get_weather"


def joined(chunks: list[dict[str, Any]], field: str) -> str:
    return "".join(chunk["delta"].get(field) or "" for chunk in chunks)


def test_analysis_is_reasoning_and_final_is_content(http: httpx.Client) -> None:
    message, chunks = ask(http, ANSWER)["message"], streamed(http, ANSWER)
    assert message["reasoning_content"] == "I muse." and message["content"] == "Answer: 5."
    assert joined(chunks, "reasoning_content") == "I muse."
    assert joined(chunks, "content") == "Answer: 5."


def test_commentary_with_a_recipient_is_a_call(http: httpx.Client) -> None:
    choice, chunks = ask(http, CALL, tools=TOOLS), streamed(http, CALL, tools=TOOLS)
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather" and choice["finish_reason"] == "tool_calls"
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}
    assert choice["message"]["reasoning_content"] == "I muse."
    assert choice["message"]["content"] is None
    calls = [c["delta"]["tool_calls"][0] for c in chunks if c["delta"].get("tool_calls")]
    arguments = "".join(call["function"].get("arguments") or "" for call in calls)
    assert calls[0]["function"]["name"] == "get_weather"
    assert json.loads(arguments) == {"city": "Oslo"} and joined(chunks, "content") == ""


def test_messages_and_responses_show_the_channels(http: httpx.Client) -> None:
    model = http.get("/v1/models").json()["data"][0]["id"]
    ask_it = [{"role": "user", "content": script_name(ANSWER)}]
    body = {"model": model, "max_tokens": 200, "messages": ask_it}
    message = http.post("/v1/messages", json=body).json()
    texts = [block["text"] for block in message["content"] if block["type"] == "text"]
    thoughts = [block["thinking"] for block in message["content"] if block["type"] == "thinking"]
    assert texts == ["Answer: 5."] and thoughts == ["I muse."]
    name, tools = script_name(CALL), [{"type": "function", **TOOLS[0]["function"]}]
    response = http.post("/v1/responses", json={"input": name, "tools": tools}).json()
    kinds = [item["type"] for item in response["output"]]
    assert kinds == ["reasoning", "function_call"]
    assert json.loads(response["output"][1]["arguments"]) == {"city": "Oslo"}
