"""`bad_words`, `thinking_token_budget` and `prediction` over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from ridgeline.config.server import ServerOptions
from ridgeline.engine.engine import Engine
from ridgeline.errors import BadInput
from ridgeline.records import BeamSearch, Sampling
from ridgeline.records.thinking import ReasoningConfig
from ridgeline.serve.app import create_app
from tests.serve.fake_engine import FakeEngine

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
THINKS = ServerOptions(reasoning_parser="think")


@pytest.fixture(scope="module")
def real() -> Iterator[Engine]:
    with Engine.open("demo", kv_cache_memory_bytes=32 << 20, num_threads=1) as engine:
        yield engine


async def client_of(engine: Any, options: ServerOptions) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=create_app(engine, options))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


async def post(
    engine: Any, path: str, body: dict[str, Any], options: ServerOptions = THINKS
) -> httpx.Response:
    async for client in client_of(engine, options):
        return await client.post(path, json=body)
    raise AssertionError


async def test_fields_reach_the_engine(engine: FakeEngine) -> None:
    fields = {"bad_words": ["x", " y"], "thinking_token_budget": 9}
    for path, body in ((CHAT, HELLO), (COMPLETIONS, {"prompt": "a"})):
        assert (await post(engine, path, {**body, **fields})).status_code == 200
        sampling = list(engine.requests.values())[-1][1]
        assert sampling.bad_words == ("x", " y") and sampling.thinking_token_budget == 9
        assert sampling.thinking_marks.forced_end == "</think>"


@pytest.mark.parametrize(
    ("parser", "fields", "is_open"),
    [
        ("think", {}, False),
        ("think_open", {}, True),
        ("think_open", {"chat_template_kwargs": {"enable_thinking": False}}, False),
    ],
)
async def test_budget_begins_where_the_parser_reads_thinking(
    real: Engine, parser: Any, fields: dict[str, Any], is_open: bool
) -> None:
    """The prompt shows no opening mark: with `think_open` the output begins inside all the same."""
    body = {**HELLO, **fields, "temperature": 0, "max_tokens": 40, "thinking_token_budget": 5}
    message = (await post(real, CHAT, body, ServerOptions(reasoning_parser=parser))).json()
    message = message["choices"][0]["message"]
    thinking = real.tokenizer.encode(message.get("reasoning_content") or "")
    assert (0 < len(thinking) <= 6) == is_open
    assert message["content"]


async def test_marks_can_be_configured(engine: FakeEngine) -> None:
    config = ReasoningConfig("<r>", "So:</think>")
    options = ServerOptions(reasoning_parser="think", reasoning_config=config)
    await post(engine, CHAT, {**HELLO, "thinking_token_budget": 9}, options)
    ((_, sampling, _, _),) = engine.requests.values()
    assert sampling.thinking_marks.start == "<r>"
    assert sampling.thinking_marks.forced_end == "So:</think>"
    with pytest.raises(BadInput, match="needs --reasoning-parser"):
        ServerOptions(reasoning_config=config)


async def test_budget_without_a_reasoning_parser_is_refused(engine: FakeEngine) -> None:
    reply = await post(engine, CHAT, {**HELLO, "thinking_token_budget": 9}, ServerOptions())
    assert reply.status_code == 400 and "--reasoning-parser" in reply.text


async def test_budget_of_messages_is_kept_where_the_server_can(engine: FakeEngine) -> None:
    body = {**HELLO, "model": "fake", "max_tokens": 9}
    body["thinking"] = {"type": "enabled", "budget_tokens": 2000}
    reply = await post(engine, MESSAGES, body)
    assert reply.status_code == 200 and "x-ridgeline-ignored-fields" not in reply.headers
    ((_, sampling, _, _),) = engine.requests.values()
    assert sampling.thinking_token_budget == 2000
    tool = {"name": "t", "input_schema": {"type": "object"}}
    forced = {**body, "tools": [tool], "tool_choice": {"type": "any"}}
    reply = await post(engine, MESSAGES, forced)
    assert "thinking.budget_tokens" in reply.headers["x-ridgeline-ignored-fields"]


@pytest.mark.parametrize("stream", [False, True])
async def test_prediction_is_counted_in_usage(real: Engine, stream: bool) -> None:
    body: dict[str, Any] = {**HELLO, "temperature": 0, "max_tokens": 24, "ignore_eos": True}
    plain = (await post(real, CHAT, body)).json()
    text = plain["choices"][0]["message"]["content"]
    assert "completion_tokens_details" not in plain["usage"]
    body["prediction"] = {"type": "content", "content": [{"type": "text", "text": text}]}
    if not stream:
        found = (await post(real, CHAT, body)).json()
        assert found["choices"][0]["message"]["content"] == text
        details = found["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] > 8
        return
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    reply = await post(real, CHAT, body)
    assert '"accepted_prediction_tokens":' in reply.text


async def test_beam_search_returns_the_best_outputs(real: Engine) -> None:
    body = {"prompt": "def add(a, b):", "use_beam_search": True, "n": 3, "max_tokens": 9}
    body |= {"length_penalty": 0.5, "early_stopping": True, "return_token_ids": True}
    sampling = Sampling(
        n=3, temperature=0.0, max_tokens=9, beam=BeamSearch(length_penalty=0.5, early_stopping=True)
    )
    expected = real.generate(["def add(a, b):"], sampling)[0]
    found = (await post(real, COMPLETIONS, body)).json()
    assert [tuple(own["token_ids"]) for own in found["choices"]] == [
        own.tokens for own in expected.answers
    ]
    assert found["usage"]["completion_tokens"] == expected.usage.completion_tokens
    chat = {**HELLO, "use_beam_search": True, "n": 2, "max_tokens": 4}
    assert len((await post(real, CHAT, chat)).json()["choices"]) == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"use_beam_search": True, "stream": True},
        {"use_beam_search": True, "temperature": 0.5},
        {"use_beam_search": True, "stop": "x"},
        {"use_beam_search": True, "logprobs": 21},
        {"length_penalty": 2.0},
        {"early_stopping": True},
    ],
)
async def test_fields_that_beam_search_excludes_are_refused(
    real: Engine, fields: dict[str, Any]
) -> None:
    reply = await post(real, COMPLETIONS, {"prompt": "a", "n": 2, **fields})
    assert reply.status_code == 400, reply.text


async def test_bad_predictions_are_refused(engine: FakeEngine) -> None:
    for prediction in ({"type": "image", "content": "x"}, {"type": "content"}, "text"):
        reply = await post(engine, CHAT, {**HELLO, "prediction": prediction})
        assert reply.status_code == 400
