"""What clients of vLLM and OpenAI rely on beyond the basic fields."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from ridgeline.config.server import ServerOptions
from ridgeline.records import OutputGrammar, Slo
from ridgeline.serve.app import create_app
from tests.serve.fake_engine import ANSWER, FakeEngine

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
OBJECT = OutputGrammar("json", '{"type":"object"}')


def client_of(engine: FakeEngine, **options: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=create_app(engine, ServerOptions(**options)))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


def events_of(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, OBJECT),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
                }
            },
            OBJECT,
        ),
        ({"structured_outputs": {"json": {"type": "object"}}}, OBJECT),
        ({"structured_outputs": {"regex": "a+"}}, OutputGrammar("regex", "a+")),
        ({"structured_outputs": {"json_object": True}}, OBJECT),
        ({"structured_outputs": {"grammar": "start: /a/"}}, OutputGrammar("grammar", "start: /a/")),
        ({"guided_json": '{"type":"object"}'}, OBJECT),
        ({"guided_choice": ["a", 'b"']}, OutputGrammar("choice", '["a", "b\\""]')),
        ({"guided_regex": None}, None),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_all_forms_of_structured_output(
    http: httpx.AsyncClient,
    engine: FakeEngine,
    path: str,
    fields: dict[str, Any],
    expected: OutputGrammar | None,
) -> None:
    body = {**fields, **(HELLO if path == CHAT else {"prompt": "x"})}
    reply = await http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    ((_, sampling, _, _),) = engine.requests.values()
    assert sampling.structured == expected


async def test_request_id_is_returned(http: httpx.AsyncClient) -> None:
    by_header = await http.post(
        COMPLETIONS, json={"prompt": "x"}, headers={"x-request-id": "mine-1"}
    )
    assert by_header.headers["x-request-id"] == "mine-1"
    by_field = await http.post(COMPLETIONS, json={"prompt": "x", "request_id": "mine-2"})
    assert by_field.headers["x-request-id"] == "mine-2"
    none = await http.post(COMPLETIONS, json={"prompt": "x"})
    assert none.headers["x-request-id"] == none.json()["id"]
    bad = await http.post(COMPLETIONS, json={"prompt": "x", "request_id": "a\nb"})
    assert bad.status_code == 400


async def test_priority_by_header_and_by_field(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    for fields, header, expected in (({}, "-3", -3), ({"priority": 5}, "-3", 5), ({}, "0", 0)):
        engine.requests.clear()
        await http.post(
            COMPLETIONS, json={"prompt": "x", **fields}, headers={"x-vllm-priority": header}
        )
        assert [request[2] for request in engine.requests.values()] == [expected]
    reply = await http.post(COMPLETIONS, json={"prompt": "x"}, headers={"x-vllm-priority": "1e9"})
    assert reply.status_code == 400


async def test_classes_and_timeouts_reach_the_engine(engine: FakeEngine) -> None:
    async with client_of(engine, slo_classes="chat=ttft:500 tpot:50;bulk=e2e:60000") as http:
        await http.post(COMPLETIONS, json={"prompt": "x", "timeout_ms": 1500})
        await http.post(COMPLETIONS, json={"prompt": "x"}, headers={"x-ridgeline-slo": "bulk"})
        assert list(engine.terms.values()) == [
            (1.5, Slo(ttft_s=0.5, tpot_s=0.05)),
            (None, Slo(e2e_s=60.0)),
        ]
        bad = await http.post(COMPLETIONS, json={"prompt": "x", "slo_class": "gold"})
        assert bad.status_code == 400 and "chat, bulk" in bad.json()["error"]["message"]


async def test_prompts_are_truncated_from_the_left(
    http: httpx.AsyncClient, engine: FakeEngine
) -> None:
    body = {"prompt": "abcdef", "truncate_prompt_tokens": 2, "echo": True, "max_tokens": 3}
    reply = await http.post(COMPLETIONS, json=body)
    assert reply.json()["choices"][0]["text"] == "ef" + ANSWER[:3]
    assert reply.json()["usage"]["prompt_tokens"] == 2


async def test_return_token_ids(http: httpx.AsyncClient) -> None:
    body = {"prompt": "ab", "max_tokens": 3, "return_token_ids": True}
    whole = (await http.post(COMPLETIONS, json=body)).json()["choices"][0]
    assert whole["token_ids"] == [ord(c) for c in ANSWER[:3]]
    assert whole["prompt_token_ids"] == [97, 98]
    stream = events_of((await http.post(COMPLETIONS, json={**body, "stream": True})).text)
    parts = [event["choices"][0] for event in stream]
    assert [token for part in parts for token in part["token_ids"]] == whole["token_ids"]
    assert parts[0]["prompt_token_ids"] == [97, 98] and "prompt_token_ids" not in parts[1]
    chat = (await http.post(CHAT, json={**HELLO, "return_token_ids": True, "max_tokens": 2})).json()
    assert chat["choices"][0]["token_ids"] == [ord(c) for c in ANSWER[:2]]


async def test_return_tokens_as_token_ids(http: httpx.AsyncClient) -> None:
    body = {"prompt": "ab", "max_tokens": 1, "logprobs": 1, "return_tokens_as_token_ids": True}
    logprobs = (await http.post(COMPLETIONS, json=body)).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{ord(ANSWER[0])}"]
    assert list(logprobs["top_logprobs"][0]) == logprobs["tokens"]


async def test_timings_are_sent_with_the_usage(engine: FakeEngine) -> None:
    async with client_of(engine, enable_per_request_metrics=True) as http:
        whole = (await http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 4})).json()
        fields = {"stream": True, "stream_options": {"include_usage": True}}
        events = events_of((await http.post(CHAT, json={**HELLO, **fields})).text)
    for timings in (whole["metrics"], events[-1]["metrics"]):
        assert timings["time_to_first_token_ms"] >= 0 and timings["generation_time_ms"] >= 0
        assert timings["tokens_per_second"] > 0


async def test_template_variables_reach_the_template(
    http: httpx.AsyncClient, engine: FakeEngine
) -> None:
    fields = {"chat_template_kwargs": {"mood": "calm"}, "reasoning_effort": "none"}
    assert (await http.post(CHAT, json={**HELLO, **fields})).status_code == 200
    expected = {"mood": "calm", "reasoning_effort": "none", "enable_thinking": False}
    assert engine.tokenizer.variables == expected


async def test_continue_final_message_excludes_a_generation_prompt(http: httpx.AsyncClient) -> None:
    fields = {"continue_final_message": True, "add_generation_prompt": True}
    assert (await http.post(CHAT, json={**HELLO, **fields})).status_code == 400
