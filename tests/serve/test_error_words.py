"""Errors name the item, the field and the reason, in the words of the API that was called."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
HI = [{"role": "user", "content": "hi"}]


def chat(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, *parts]}]}


def item(value: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": "hi"}, value]}


def allowed(name: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}}]
    return {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools}}


def message(**fields: Any) -> dict[str, Any]:
    return {"model": "fake", "max_tokens": 5, "messages": HI, **fields}


@pytest.mark.parametrize(
    ("path", "body", "param", "reason"),
    [
        (CHAT, chat({"type": "image_url", "image_url": {"url": "x"}}),
         "messages.0.content.1.type", "only text is supported"),
        (CHAT, chat({"type": "input_audio"}), "messages.0.content.1.type", "only text"),
        (CHAT, chat({"type": "text", "text": None}), "messages.0.content.1.text", "valid string"),
        (CHAT, {"messages": HI, "tool_choice": {"type": "any"}},
         "tool_choice.type", "'function' or 'allowed_tools'"),
        (CHAT, {"messages": HI, "tool_choice": allowed("look")},
         "tool_choice", "an unknown tool: look"),
        (CHAT, {"messages": HI, "functions": [{"name": "f"}]}, "functions", "fix: send tools"),
        (CHAT, {"messages": HI, "tool_choice": "sometimes"}, "tool_choice", "'none', 'auto'"),
        (CHAT, {"messages": HI, "max_completion_tokens": 0}, "max_completion_tokens", "got 0"),
        (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        (CHAT, {"messages": HI, "n": 0}, "n", "64"),
        (CHAT, {"messages": HI, "stop": [1]}, "stop.0", "valid string"),
        (CHAT, {"messages": HI, "stop": ""}, "stop", "empty"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 300}]}, "messages", "too long"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt.0", "greater than or equal to 0"),
        (COMPLETIONS, {"prompt": ["a", [1]]}, "prompt.1", "valid string"),
        (COMPLETIONS, {"prompt": "x" * 300}, "prompt", "too long"),
        (COMPLETIONS, {"prompt": None}, "prompt", "got null"),
        (COMPLETIONS, {"prompt": [True]}, "prompt.0", "got true"),
        (COMPLETIONS, {"prompt": "a", "prompt_embeds": "x"}, "prompt_embeds", "not supported"),
        (COMPLETIONS, {"prompt": "a", "seed": 2**70}, "seed", "9223372036854775807"),
        (MESSAGES, message(mcp_servers=[{"type": "url", "url": "x"}]), "mcp_servers",
         "not supported"),
        (MESSAGES, message(messages=[{"role": "user", "content": [{"type": "image"}]}]),
         "messages.0.content.0", "image"),
        (MESSAGES, message(stop_sequences=[""]), "stop_sequences", "empty"),
        (RESPONSES, item({"type": "web_search_call", "id": "w"}), "input.1.type", "'message'"),
        (RESPONSES, item({"type": "file_search_call", "id": "w"}), "input.1.type", "'message'"),
        (RESPONSES, item({"type": "item_reference", "id": "i"}), "input.1.type", "send the item"),
        (RESPONSES, item({"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "x"}),
         "input.1.type", "'function_call'"),
        (RESPONSES, item({"type": "message", "role": "bogus", "content": "x"}),
         "input.1.role", "'user'"),
        (RESPONSES, item({"type": "function_call", "call_id": "c", "arguments": "{}"}),
         "input.1.name", "required"),
        (RESPONSES, item({"type": "function_call_output", "call_id": "c", "output": 3}),
         "input.1.output", "valid"),
        (RESPONSES, item({"role": "user", "content": [{"type": "input_image"}]}),
         "input.1.content.0.type", "only text is supported"),
        (RESPONSES, {"input": "x" * 300}, "input", "too long"),
        ("/v1/embeddings", {"input": ""}, "input", "input is empty"),
        (COMPLETIONS, {"prompt": {"a": 1}}, "prompt", "a valid string or a valid list"),
        (COMPLETIONS, {"prompt": "a", "bad_words": [""]}, "bad_words", "empty"),
        (CHAT, {"messages": HI, "tool_choice": 5}, "tool_choice", "'required' or an object"),
        (CHAT, {"messages": HI, "guided_json": 5}, "guided_json",
         "an object or a valid boolean or a valid string"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]},
         "messages.0.content", "or a valid list"),
        (RESPONSES, item(5), "input.1", "should be an object"),
        (RESPONSES, item({"type": "function_call", "call_id": "c", "name": "", "arguments": "{}"}),
         "input.1.name", "at least 1"),
        (RESPONSES, {"input": "x", "tools": [{"type": "function", "name": "a b"}]},
         "tools.0.name", "pattern"),
        (MESSAGES, message(tools=[{"name": "", "input_schema": {}}]), "tools.0.name", "at least 1"),
        (MESSAGES, message(tools=[{"type": "bash_20250124", "name": "bash"}]),
         "tools.0.type", "with an input_schema"),
        (MESSAGES, message(system=5), "system", "or a valid list"),
        (MESSAGES, message(messages=[{"role": "user", "content": [{"type": "image"}]}]),
         "messages.0.content.0.type", "only text is supported"),
        (MESSAGES, message(messages=[{"role": "user", "content": [{"x": 1}]}]),
         "messages.0.content.0.type", "required"),
        (MESSAGES, message(messages=[{"role": "user", "content": [{"type": "search_result"}]}]),
         "messages.0.content.0.type", "'tool_use'"),
    ],
)  # fmt: skip
async def test_error_names_the_field_and_the_reason(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], param: str, reason: str
) -> None:
    reply = await http.post(path, json=body)
    error = reply.json()["error"]
    assert reply.status_code == 400, reply.text
    assert reason in error["message"], error
    if path == MESSAGES:  # Anthropic's errors have no param
        assert param in error["message"]
    else:
        assert error["param"] == param, error


async def test_null_arguments_of_a_call_are_left_out(http: httpx.AsyncClient) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": None}}
    messages = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert (await http.post(CHAT, json={"messages": messages})).status_code == 200
    wrong = {**call, "function": {"name": "f", "arguments": 3}}
    messages[-1] = {"role": "assistant", "tool_calls": [wrong]}
    reply = await http.post(CHAT, json={"messages": messages})
    assert reply.json()["error"]["param"] == "messages.1.tool_calls.0.function.arguments"


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("GET", "/docs", 404, "/openapi.json"),
        ("GET", "/api/tags", 404, "got '/api/tags'"),
        ("POST", "/v1/chat/completion", 404, "did you mean /v1/chat/completions"),
        ("POST", "/chat/completions/", 404, "did you mean /v1/chat/completions?"),
        ("POST", "/" + "x" * 5000, 404, "no such path"),
        ("GET", "/v1/chat/completions", 405, "limit: POST"),
        ("DELETE", "/health", 405, "limit: GET"),
    ],
)
async def test_missing_route_is_named_with_what_exists(
    http: httpx.AsyncClient, method: str, path: str, status: int, words: str
) -> None:
    reply = await http.request(method, path)
    assert reply.status_code == status
    message = reply.json()["error"]["message"]
    assert words in message and len(message) < 250


@pytest.mark.parametrize(("content", "reason"), [("[1]", "got [1]"), ("", "it is empty")])
async def test_body_that_is_no_object_is_named(
    http: httpx.AsyncClient, content: str, reason: str
) -> None:
    headers = {"content-type": "application/json"}
    reply = await http.post(CHAT, content=content, headers=headers)
    assert reply.status_code == 400
    message = reply.json()["error"]["message"]
    assert message == f"the request body is not a JSON object: {reason}"
