"""Tools and reasoning over HTTP: the same output as a chat, as a message and as a response."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from ridgeline.config.server import ServerOptions
from ridgeline.serve.app import create_app
from tests.serve import fake_engine
from tests.serve.fake_engine import FakeEngine

CHAT = "/v1/chat/completions"
LOOK = {
    "name": "look",
    "description": "Look.",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
}
TOOLS = [{"type": "function", "function": LOOK}]
CHAT_BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200}
CALL = '<tool_call>\n{"name": "look", "arguments": {"place": "Paris"}}\n</tool_call>'
AUTO: dict[str, Any] = {
    "enable_auto_tool_choice": True, "tool_call_parser": "hermes", "reasoning_parser": "think",
}  # fmt: skip


def client_of(engine: FakeEngine, **options: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=create_app(engine, ServerOptions(**options)))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


def set_answer(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(fake_engine, "ANSWER", text)


def data_of(text: str) -> list[dict[str, Any]]:
    lines = [line for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]


async def test_auto_finds_reasoning_text_and_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    set_answer(monkeypatch, f"<think>hm</think>\nSure.\n{CALL}")
    async with client_of(FakeEngine(), **AUTO) as http:
        body = {**CHAT_BODY, "tools": TOOLS}
        choice = (await http.post(CHAT, json=body)).json()["choices"][0]
        stream = data_of((await http.post(CHAT, json={**body, "stream": True})).text)
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["reasoning_content"] == "hm" and message["content"] == "Sure."
    (call,) = message["tool_calls"]
    assert call["type"] == "function" and call["id"].startswith("call_")
    assert call["function"]["name"] == "look"
    assert json.loads(call["function"]["arguments"]) == {"place": "Paris"}
    deltas = [chunk["choices"][0]["delta"] for chunk in stream]
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "hm"
    assert "".join(d.get("content") or "" for d in deltas) == "Sure."
    (calls,) = [d["tool_calls"] for d in deltas if "tool_calls" in d]
    assert calls[0]["index"] == 0 and calls[0]["function"]["name"] == "look"
    assert stream[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_text_around_a_call_is_the_same_streamed_and_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_answer(monkeypatch, f"I look. {CALL}\nIt is sunny there.\n")
    async with client_of(FakeEngine(), **AUTO) as http:
        body = {**CHAT_BODY, "tools": TOOLS}
        whole = (await http.post(CHAT, json=body)).json()["choices"][0]["message"]
        stream = data_of((await http.post(CHAT, json={**body, "stream": True})).text)
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in stream)
    assert text == whole["content"] == "I look. \nIt is sunny there.\n"


async def test_markers_are_text_without_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    set_answer(monkeypatch, CALL)
    async with client_of(FakeEngine(), **AUTO) as http:
        for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            choice = (await http.post(CHAT, json={**CHAT_BODY, **fields})).json()["choices"][0]
            assert choice["message"]["content"] == CALL and choice["finish_reason"] == "stop"


async def test_named_tool_becomes_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    set_answer(monkeypatch, '{"place": "Rome"}')
    engine = FakeEngine()
    choice = {"type": "function", "function": {"name": "look"}}
    async with client_of(engine) as http:
        body = {**CHAT_BODY, "tools": TOOLS, "tool_choice": choice}
        reply = (await http.post(CHAT, json=body)).json()["choices"][0]
    assert reply["message"]["tool_calls"][0]["function"]["arguments"] == '{"place": "Rome"}'
    ((_, sampling, _, _),) = engine.requests.values()
    assert sampling.structured and json.loads(sampling.structured.text) == LOOK["parameters"]


FUNCTION = {"type": "function", "name": "look", "parameters": LOOK["parameters"]}
OTHER: dict[str, Any] = {"name": "other", "parameters": {"type": "object"}}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (
            CHAT,
            {
                "tools": [*TOOLS, {"type": "function", "function": OTHER}],
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {
                        "mode": "required",
                        "tools": [{"type": "function", "function": {"name": "look"}}],
                    },
                },
            },
        ),
        (
            "/v1/responses",
            {
                "tools": [FUNCTION, {"type": "function", **OTHER}],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "required",
                    "tools": [{"type": "function", "name": "look"}],
                },
            },
        ),
    ],
)
async def test_allowed_tools_are_the_only_ones_that_can_be_called(
    path: str, fields: dict[str, Any]
) -> None:
    engine = FakeEngine()
    async with client_of(engine) as http:
        reply = await http.post(path, json={**CHAT_BODY, "input": "hi", **fields})
    assert reply.status_code == 200
    ((_, sampling, _, _),) = engine.requests.values()
    assert sampling.structured is not None
    assert '"look"' in sampling.structured.text and '"other"' not in sampling.structured.text


@pytest.mark.parametrize(("path", "kind"), [(CHAT, "messages"), ("/v1/responses", "input")])
async def test_refusal_among_the_parts_of_a_message_is_its_text(path: str, kind: str) -> None:
    engine = FakeEngine()
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I must not."}]}
    turns = [{"role": "user", "content": "hi"}, refusal, {"role": "user", "content": "why?"}]
    async with client_of(engine) as http:
        reply = await http.post(path, json={kind: turns})
    assert reply.status_code == 200, reply.text
    ((prompt, _, _, _),) = engine.requests.values()
    assert "I must not." in engine.tokenizer.decode(prompt)


async def test_required_becomes_a_grammar_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    set_answer(monkeypatch, '[{"name": "look", "parameters": {"place": "Rome"}}]')
    engine = FakeEngine()
    async with client_of(engine) as http:
        body = {
            **CHAT_BODY,
            "tools": TOOLS,
            "tool_choice": "required",
            "parallel_tool_calls": False,
        }
        reply = (await http.post(CHAT, json=body)).json()["choices"][0]
    assert reply["finish_reason"] == "tool_calls"
    assert reply["message"]["tool_calls"][0]["function"]["name"] == "look"
    ((_, sampling, _, _),) = engine.requests.values()
    assert sampling.structured is not None
    assert json.loads(sampling.structured.text)["maxItems"] == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"tools": TOOLS, "tool_choice": "required", "stop": ["e"]}),
        (
            "/v1/messages",
            {
                "tools": [{"name": "look", "input_schema": LOOK["parameters"]}],
                "tool_choice": {"type": "tool", "name": "look"},
                "stop_sequences": ["e"],
            },
        ),
    ],
)
async def test_stop_strings_do_not_cut_a_call(path: str, body: dict[str, Any]) -> None:
    """They apply to text. The response lists them as ignored."""
    engine = FakeEngine()
    async with client_of(engine) as http:
        reply = await http.post(path, json={**CHAT_BODY, "model": "fake", **body})
        plain = await http.post(CHAT, json={**CHAT_BODY, "stop": ["e"]})
    with_tools, without = (sampling for _, sampling, _, _ in engine.requests.values())
    assert with_tools.structured and with_tools.stop == () and without.stop == ("e",)
    assert "stop" in reply.headers["x-ridgeline-ignored-fields"].split(",")
    assert "x-ridgeline-ignored-fields" not in plain.headers


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": TOOLS},
        {"tool_choice": "required"},
        {"tools": TOOLS * 2, "tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}},
        {"tools": [{"type": "web_search"}]},
        {"tools": [{"type": "function", "function": {"name": "a b"}}], "tool_choice": "required"},
        {"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)],
         "tool_choice": "required"},
    ],
)  # fmt: skip
async def test_unsupported_tool_requests_are_refused(fields: dict[str, Any]) -> None:
    async with client_of(FakeEngine()) as http:
        reply = await http.post(CHAT, json={**CHAT_BODY, **fields})
    assert reply.status_code == 400 and "tool" in reply.json()["error"]["message"]


async def test_required_call_comes_before_a_response_format(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The format is about text, and there is none: openai-agents sends both on every turn."""
    set_answer(monkeypatch, '[{"name": "look", "parameters": {"place": "Rome"}}]')
    body = {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}
    async with client_of(FakeEngine()) as http:
        reply = (await http.post(CHAT, json={**CHAT_BODY, **body})).json()["choices"][0]
    assert reply["message"]["tool_calls"][0]["function"]["name"] == "look"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
async def test_stream_ends_behind_the_chunk_with_a_call(
    monkeypatch: pytest.MonkeyPatch, choice: object
) -> None:
    """openai's stream helper reports a call as done when a chunk without it follows."""
    named = choice != "required"
    text = '{"place": "Rome"}' if named else '[{"name": "look", "parameters": {"place": "Rome"}}]'
    set_answer(monkeypatch, text)
    async with client_of(FakeEngine()) as http:
        body = {**CHAT_BODY, "tools": TOOLS, "tool_choice": choice, "stream": True}
        chunks = [c["choices"][0] for c in data_of((await http.post(CHAT, json=body)).text)]
    calls = [chunk for chunk in chunks if "tool_calls" in chunk["delta"]]
    assert len(calls) == 1 and calls[0]["finish_reason"] is None
    assert chunks[-1]["delta"] == {} or "tool_calls" not in chunks[-1]["delta"]
    assert chunks[-1]["finish_reason"] == ("stop" if named else "tool_calls")


async def test_stream_has_no_line_separators_but_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """httpx's iter_lines, and others, also split at U+2028, U+2029 and U+0085."""
    text = "a\u2028b\u2029c\u0085d"
    set_answer(monkeypatch, text)
    async with client_of(FakeEngine()) as http:
        for path, body in (
            (CHAT, CHAT_BODY),
            ("/v1/completions", {"prompt": "x", "max_tokens": 50}),
            ("/v1/messages", MESSAGE),
            ("/v1/responses", {"input": "x"}),
        ):
            reply = await http.post(path, json={**body, "stream": True})
            payloads = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
            assert all(json.loads(payload) for payload in payloads)
            assert "\u2028" not in reply.text and "b" in reply.text


# Anthropic's Messages


MESSAGE: dict[str, Any] = {
    "model": "fake",
    "max_tokens": 200,
    "messages": [{"role": "user", "content": "hi"}],
}


async def test_messages_have_content_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    set_answer(monkeypatch, f"<think>hm</think>\nSure.\n{CALL}")
    tools = [{"name": "look", "input_schema": LOOK["parameters"]}]
    async with client_of(FakeEngine(), **AUTO) as http:
        whole = (await http.post("/v1/messages", json={**MESSAGE, "tools": tools})).json()
        reply = await http.post("/v1/messages", json={**MESSAGE, "tools": tools, "stream": True})
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use"]
    assert whole["content"][2]["input"] == {"place": "Paris"}
    assert whole["stop_reason"] == "tool_use"
    assert whole["usage"]["cache_read_input_tokens"] == 3
    events = data_of(reply.text)
    assert [event["type"] for event in events if event["type"] != "content_block_delta"] == [
        "message_start",
        *["content_block_start", "content_block_stop"] * 3,
        "message_delta",
        "message_stop",
    ]
    assert events[0]["message"]["usage"]["cache_read_input_tokens"] == 3
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert "[DONE]" not in reply.text


async def test_messages_are_translated_to_a_chat(
    engine: FakeEngine, http: httpx.AsyncClient
) -> None:
    body = {
        **MESSAGE,
        "system": [{"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "A"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "B"}]},
            {"role": "user", "content": "C"},
        ],
        "stop_sequences": ["!"],
        "temperature": 0.5,
    }
    reply = await http.post("/v1/messages", json=body)
    assert reply.status_code == 200, reply.text
    ((tokens, sampling, _, _),) = engine.requests.values()
    assert "".join(map(chr, tokens)) == "<system>S<user>A<assistant>B<user>C<assistant>"
    assert sampling.stop == ("!",) and sampling.temperature == 0.5
    counted = await http.post(
        "/v1/messages/count_tokens",
        json={name: body[name] for name in ("model", "system", "messages")},
    )
    assert counted.json() == {"input_tokens": len(tokens)}


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 0},
        {"messages": []},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"temperature": -1},
        {"system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}] * 5},
        {"messages": [{"role": "user", "content": [
            {"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]},
    ],
)  # fmt: skip
async def test_messages_errors_have_anthropics_shape(
    http: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    reply = await http.post("/v1/messages", json={**MESSAGE, **fields})
    assert reply.status_code == 400
    assert reply.json()["type"] == "error"
    assert reply.json()["error"]["type"] == "invalid_request_error"


async def test_broken_message_stream_ends_with_an_error_event(http: httpx.AsyncClient) -> None:
    body = {**MESSAGE, "messages": [{"role": "user", "content": "!fail"}], "stream": True}
    events = data_of((await http.post("/v1/messages", json=body)).text)
    assert events[-1]["type"] == "error" and events[-1]["error"]["type"] == "api_error"


# OpenAI's Responses


async def test_responses_have_items(monkeypatch: pytest.MonkeyPatch) -> None:
    set_answer(monkeypatch, f"<think>hm</think>\nSure.\n{CALL}")
    body = {"input": "hi", "tools": [{"type": "function", **LOOK}], "max_output_tokens": 200}
    async with client_of(FakeEngine(), **AUTO) as http:
        whole = (await http.post("/v1/responses", json=body)).json()
        reply = await http.post("/v1/responses", json={**body, "stream": True})
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call"]
    assert whole["status"] == "completed" and whole["store"] is False
    assert whole["output"][1]["content"][0]["text"] == "Sure."
    assert json.loads(whole["output"][2]["arguments"]) == {"place": "Paris"}
    assert 0 < whole["usage"]["output_tokens_details"]["reasoning_tokens"] < 25
    events = data_of(reply.text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["type"] == "response.created" and events[-1]["type"] == "response.completed"
    last = events[-1]["response"]
    assert [item["type"] for item in last["output"]] == ["reasoning", "message", "function_call"]
    text = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
    assert text == "Sure."
    assert last["usage"] == whole["usage"]


async def test_responses_are_translated_to_a_chat(
    engine: FakeEngine, http: httpx.AsyncClient
) -> None:
    body = {
        "instructions": "S",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "A"}]},
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        ],
        "max_output_tokens": 5,
        "text": {"format": {"type": "json_object"}},
    }
    reply = (await http.post("/v1/responses", json=body)).json()
    assert reply["status"] == "incomplete"
    assert reply["incomplete_details"] == {"reason": "max_output_tokens"}
    ((tokens, sampling, _, _),) = engine.requests.values()
    assert "".join(map(chr, tokens)) == "<system>S<user>A<assistant><tool>sunny<assistant>"
    assert sampling.structured is not None


@pytest.mark.parametrize(
    "fields",
    [
        {"input": []},
        {"previous_response_id": "resp_1"},
        {"background": True},
        {"tools": [{"type": "web_search"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        {"max_output_tokens": 0},
        {"text": {"format": {"type": "json_schema"}}},
        {"input": [{"type": "reasoning"}]},
    ],
)
async def test_unsupported_responses_requests_are_refused(
    http: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    reply = await http.post("/v1/responses", json={"input": "hi", **fields})
    assert reply.status_code == 400 and set(reply.json()) == {"error"}


async def test_aborted_response_is_reported_as_aborted(http: httpx.AsyncClient) -> None:
    """By an administrator. Neither API has a value for it; ours is that of chat completions."""
    body = {"input": "!gone", "max_output_tokens": 3}
    whole = (await http.post("/v1/responses", json=body)).json()
    assert whole["status"] == whole["output"][-1]["status"] == "incomplete"
    assert whole["incomplete_details"] == {"reason": "abort"}
    stream = await http.post("/v1/responses", json={**body, "stream": True})
    assert data_of(stream.text)[-1]["type"] == "response.incomplete"
    message = {"model": "fake", "max_tokens": 3, "messages": [{"role": "user", "content": "!gone"}]}
    reply = await http.post("/v1/messages", json=message)
    assert reply.json()["stop_reason"] == "abort"


async def test_cut_off_item_is_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last item of an incomplete response; a call that was found is complete."""
    tools = [{"type": "function", **LOOK}]
    named = {"tools": tools, "tool_choice": {"type": "function", "name": "look"}}
    async with client_of(FakeEngine(), **AUTO) as http:
        for text, more, statuses in (
            ("Hello, world", {}, ["incomplete"]),
            ("<think>hm hm hm hm", {}, ["incomplete"]),
            ("<think>hm</think>Hello", {}, ["completed", "incomplete"]),
            (f"Sure.{CALL} and then", {"tools": tools}, ["completed", "completed", "incomplete"]),
            (f"Sure.{CALL}x", {"tools": tools}, ["completed", "completed"]),
            ('{"place": "Rome"}', named, ["incomplete"]),
        ):
            set_answer(monkeypatch, text)
            body = {"input": "hi", "max_output_tokens": len(text) - 1, **more}
            whole = (await http.post("/v1/responses", json=body)).json()
            reply = await http.post("/v1/responses", json={**body, "stream": True})
            assert whole["status"] == "incomplete"
            assert [item["status"] for item in whole["output"]] == statuses
            *events, last = data_of(reply.text)
            done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
            assert [item["status"] for item in done] == statuses
            assert [item["status"] for item in last["response"]["output"]] == statuses


async def test_tools_that_the_template_leaves_out_are_named_as_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    body = {**CHAT_BODY, "tools": TOOLS}
    for has_place, ignored in ((True, None), (False, "tools")):
        engine = FakeEngine()
        monkeypatch.setattr(engine.tokenizer, "template_uses_tools", has_place, raising=False)
        async with client_of(engine, **AUTO) as http:
            auto = await http.post(CHAT, json=body)
            forced = await http.post(CHAT, json={**body, "tool_choice": "required"})
        assert auto.status_code == 200
        assert auto.headers.get("x-ridgeline-ignored-fields") == ignored
        # a forced call is written by the grammar, whatever the template shows
        assert "x-ridgeline-ignored-fields" not in forced.headers


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (
            CHAT,
            {"messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "f"}}]},
                {"role": "tool", "tool_call_id": "c1", "content": "5"},
            ]},
            "messages.tool_calls",
        ),
        (
            "/v1/messages",
            {"model": "fake", "max_tokens": 4, "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": [
                    {"type": "tool_use", "id": "c1", "name": "f", "input": {}}]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": "5"}]},
            ]},
            "messages.content.tool_use",
        ),
        (
            "/v1/responses",
            {"input": [
                {"role": "user", "content": "hi"},
                {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "5"},
            ]},
            "input.function_call",
        ),
    ],
)  # fmt: skip
async def test_calls_that_the_template_leaves_out_are_named_as_ignored(
    path: str, body: dict[str, Any], named: str
) -> None:
    for has_place in (True, False):
        engine = FakeEngine()
        engine.tokenizer.template_uses_calls = has_place
        async with client_of(engine) as http:
            reply = await http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        ignored = reply.headers.get("x-ridgeline-ignored-fields", "").split(",")
        assert (named in ignored) is not has_place


@pytest.mark.parametrize("kind", ["web_search", "mcp", "local_shell", "custom"])
@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
async def test_tools_of_other_kinds_are_refused_with_the_reason(
    http: httpx.AsyncClient, path: str, kind: str
) -> None:
    body = CHAT_BODY if path == CHAT else {"input": "hi"}
    reply = await http.post(path, json={**body, "tools": [{"type": kind, "name": "x"}]})
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"] == "tools.0.type"
    assert "runs no tools itself" in error["message"] and kind in error["message"]
