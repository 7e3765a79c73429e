"""`/v1/messages` as Claude Code and its gateways use it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.serve.fake_engine import FakeEngine

IGNORED = "x-ridgeline-ignored-fields"
BODY: dict[str, Any] = {
    "model": "fake",
    "max_tokens": 20,
    "messages": [{"role": "user", "content": "hi"}],
}


async def prompt_of(engine: FakeEngine, http: httpx.AsyncClient, **fields: Any) -> str:
    reply = await http.post("/v1/messages", json={**BODY, **fields})
    assert reply.status_code == 200, reply.text
    tokens, *_ = list(engine.requests.values())[-1]
    return "".join(map(chr, tokens))


async def test_system_messages_keep_their_place(
    engine: FakeEngine, http: httpx.AsyncClient
) -> None:
    user, system = {"role": "user", "content": "A"}, {"role": "system", "content": "R"}
    assert await prompt_of(engine, http, messages=[user, system]) == "<user>A<system>R<assistant>"
    parts = {"role": "system", "content": [{"type": "text", "text": "P"}]}
    prompt = await prompt_of(engine, http, system="S", messages=[system, parts, user])
    assert prompt == "<system>S\nR\nP<user>A<assistant>"
    image = {"role": "system", "content": [{"type": "tool_result", "tool_use_id": "a"}]}
    reply = await http.post("/v1/messages", json={**BODY, "messages": [user, image]})
    assert reply.status_code == 400 and "text only" in reply.text


BILLING = "x-anthropic-billing-header: cc_version=2.1; cch=543cf;"


@pytest.mark.parametrize(
    "system",
    [
        [{"type": "text", "text": BILLING}, {"type": "text", "text": "Be brief."}],
        f"{BILLING}\nBe brief.",
        [{"type": "text", "text": f"{BILLING}\nBe brief."}],
    ],
)
async def test_billing_line_that_breaks_the_prefix_cache_is_dropped(
    engine: FakeEngine, http: httpx.AsyncClient, system: Any
) -> None:
    prompt = await prompt_of(engine, http, system=system)
    assert prompt == "<system>Be brief.<user>hi<assistant>"
    alone = await prompt_of(engine, http, system=[{"type": "text", "text": BILLING}])
    assert alone == "<user>hi<assistant>"


@pytest.mark.parametrize(
    "content", ["The answer is (", [{"type": "text", "text": "The answer is ("}]]
)
async def test_prefill_is_continued(
    engine: FakeEngine, http: httpx.AsyncClient, content: Any
) -> None:
    messages = [*BODY["messages"], {"role": "assistant", "content": content}]
    prompt = await prompt_of(engine, http, messages=messages)
    assert prompt == "<user>hi<assistant>The answer is ("
    counted = await http.post(
        "/v1/messages/count_tokens", json={"model": "fake", "messages": messages}
    )
    assert counted.json() == {"input_tokens": len(prompt)}


SCHEMA = {"type": "object", "properties": {"zz": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "schema": SCHEMA}


@pytest.mark.parametrize(
    "field", [{"output_config": {"format": FORMAT}}, {"output_format": FORMAT}]
)
async def test_output_format_binds_the_answer(
    engine: FakeEngine, http: httpx.AsyncClient, field: dict[str, Any]
) -> None:
    reply = await http.post("/v1/messages", json={**BODY, **field})
    assert reply.status_code == 200 and IGNORED not in reply.headers
    ((_, sampling, _, _),) = engine.requests.values()
    assert sampling.structured is not None and json.loads(sampling.structured.text) == SCHEMA
    both = {"output_config": {"format": FORMAT}, "output_format": FORMAT}
    assert (await http.post("/v1/messages", json={**BODY, **both})).status_code == 400


async def test_effort_and_thinking_reach_the_template(
    engine: FakeEngine, http: httpx.AsyncClient
) -> None:
    fields = {"output_config": {"effort": "high"}, "thinking": {"type": "adaptive"}}
    assert (await http.post("/v1/messages", json={**BODY, **fields})).status_code == 200
    assert engine.tokenizer.variables == {"reasoning_effort": "high", "enable_thinking": True}


@pytest.mark.parametrize("effort", ["low", "medium", "high", "xhigh", "max", None])
async def test_every_effort_of_the_api_is_taken(http: httpx.AsyncClient, effort: str) -> None:
    fields = {"output_config": {"effort": effort}}
    assert (await http.post("/v1/messages", json={**BODY, **fields})).status_code == 200


@pytest.mark.parametrize("effort", ["", "High", "minimal", "very high", 1, ["low"], "l" * 5000])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_unknown_effort_is_refused_with_those_of_the_api(
    http: httpx.AsyncClient, effort: Any, path: str
) -> None:
    body = {"model": "fake", "messages": BODY["messages"], "output_config": {"effort": effort}}
    reply = await http.post(path, json={"max_tokens": 4, **body} if "count" not in path else body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error" and len(error["message"]) < 500
    assert "output_config.effort" in error["message"]
    for known in ("low", "medium", "high", "xhigh", "max"):
        assert f"'{known}'" in error["message"]


async def test_fields_without_effect_are_named(engine: FakeEngine, http: httpx.AsyncClient) -> None:
    fields = {
        "metadata": {"user_id": "u"},
        "thinking": {"type": "enabled", "budget_tokens": 2000},
        "output_config": {"other": 1},
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a", "citations": 1}]}],
        "seed": 7,
        "min_p": 0.1,
        "context_management": None,
    }
    reply = await http.post("/v1/messages", json={**BODY, **fields})
    assert reply.status_code == 200, reply.text
    assert reply.headers[IGNORED].split(",") == [
        "messages.content.citations", "metadata", "output_config.other", "thinking.budget_tokens",
    ]  # fmt: skip
    ((_, sampling, _, _),) = engine.requests.values()
    assert sampling.seed == 7 and sampling.min_p == 0.1  # extensions are honoured, not ignored


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("guided_json", SCHEMA),
        ("structured_outputs", {"json": SCHEMA}),
        ("structured_outputs", {"choice": ["a"]}),
        ("response_format", {"type": "json_object", "schema": SCHEMA}),
        ("stop", ["x"]),
        ("seed", 3),
        ("top_k", 5),
        ("frequency_penalty", 0.5),
        ("logit_bias", {"5": 1.0}),
    ],
)
async def test_fields_that_constrain_an_answer_are_honoured_everywhere(
    engine: FakeEngine, http: httpx.AsyncClient, path: str, field: str, value: Any
) -> None:
    body = BODY if path == "/v1/messages" else {"input": "hi"}
    reply = await http.post(path, json={**body, field: value})
    assert reply.status_code == 200 and IGNORED not in reply.headers, reply.text
    ((_, sampling, _, _),) = engine.requests.values()
    await http.post("/v1/chat/completions", json={"messages": BODY["messages"], field: value})
    _, (_, as_chat, _, _) = engine.requests.values()
    names = ("structured", "stop", "seed", "top_k", "frequency_penalty", "logit_bias")
    assert [getattr(sampling, name) for name in names] == [getattr(as_chat, name) for name in names]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
@pytest.mark.parametrize(
    ("field", "value"),
    [("n", 2), ("top_logprobs", 3), ("grammar", "root ::= x"), ("functions", [{}]),
     ("guided_whitespace_pattern", " "), ("structured_outputs", {"structural_tag": "x"})],
)  # fmt: skip
async def test_fields_that_cannot_be_honoured_are_refused_everywhere(
    http: httpx.AsyncClient, path: str, field: str, value: Any
) -> None:
    body = BODY if path == "/v1/messages" else {"input": "hi"}
    reply = await http.post(path, json={**body, field: value})
    assert reply.status_code == 400 and field in reply.json()["error"]["message"]


async def test_responses_name_nested_fields_without_effect(http: httpx.AsyncClient) -> None:
    body = {"input": "hi", "text": {"verbosity": "low"}, "reasoning": {"summary": "auto"}}
    reply = await http.post("/v1/responses", json=body)
    assert reply.headers[IGNORED] == "reasoning.summary,text.verbosity"


async def test_any_needs_tools(http: httpx.AsyncClient) -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "f"}, {"type": "tool"}):
        reply = await http.post("/v1/messages", json={**BODY, "tool_choice": choice})
        assert reply.status_code == 400 and "tool_choice" in reply.json()["error"]["message"]
    for choice in ({"type": "auto"}, {"type": "none"}):
        reply = await http.post("/v1/messages", json={**BODY, "tool_choice": choice})
        assert reply.status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [("previous_response_id", "resp_1"), ("conversation", "c"), ("prompt", {"id": "p"}),
     ("background", True)],
)  # fmt: skip
async def test_stored_responses_are_refused_with_the_fix(
    http: httpx.AsyncClient, field: str, value: Any
) -> None:
    reply = await http.post("/v1/responses", json={"input": "hi", field: value})
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"] == field and "fix: " in error["message"]
