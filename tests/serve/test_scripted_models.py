"""The whole server over models that recite a script: special tokens in readers and stops."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from ridgeline.config.server import ServerOptions
from ridgeline.engine.engine import Engine
from ridgeline.serve.app import create_app
from tests.serve.conftest import running
from tests.serve.script_model import TEMPLATE, script_name, write_script_model

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
ENDS_IN_STRING = '{"name": "b", "arguments": {"y": "</tool_call> in text"}}'
SCRIPTS = [
    "<think>I muse a lot.</think>Answer: 5.",
    CALL,
    "alpha beta <|stop|>gamma delta",
    '{"zz": 41}',
    "Only an answer, no thought.",
]
THINK, TOOL, STOP, JSON_ANSWER, ANSWER = range(len(SCRIPTS))
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<|stop|>"]
FORECAST = {
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
TOOLS = [{"type": "function", "function": FORECAST}]
ZZ = {
    "type": "object", "properties": {"zz": {"type": "integer"}}, "required": ["zz"],
    "additionalProperties": False,
}  # fmt: skip
SCHEMA = {"type": "json_schema", "json_schema": {"name": "zz", "schema": ZZ}}
OPENS_OR_CLOSES = TEMPLATE.replace(
    "{{ messages[-1].content[:3] }}",
    "<think>{% if enable_thinking is false %}</think>{% endif %}",
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = write_script_model(tmp_path_factory.mktemp("m"), SCRIPTS, special_tokens=MARKS)
    with Engine.open(str(folder), max_num_seqs=4, kv_cache_memory_bytes=8 << 20) as opened:
        yield opened


@contextmanager
def server_of(engine: Engine, **options: Any) -> Iterator[httpx.Client]:
    settings = ServerOptions(**options)
    with running(create_app(engine, settings), settings) as url, httpx.Client(base_url=url) as http:
        yield http


def ask(http: httpx.Client, script: int, **fields: Any) -> dict[str, Any]:
    name = script_name(script)
    body = {"messages": [{"role": "user", "content": name}], "max_tokens": 200, **fields}
    reply = http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    choice: dict[str, Any] = reply.json()["choices"][0]
    return choice


def streamed(http: httpx.Client, script: int, **fields: Any) -> list[dict[str, Any]]:
    name = script_name(script)
    body = {"messages": [{"role": "user", "content": name}], "max_tokens": 200, **fields}
    text = http.post("/v1/chat/completions", json={**body, "stream": True}).text
    lines = [line[6:] for line in text.split("\n") if line.startswith("data: {")]
    return [json.loads(line)["choices"][0] for line in lines]


HERMES: dict[str, Any] = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}


def test_call_marks_that_are_special_tokens_are_read(engine: Engine) -> None:
    with server_of(engine, **HERMES) as http:
        choice = ask(http, TOOL, tools=TOOLS)
        chunks = streamed(http, TOOL, tools=TOOLS)
        without_tools = ask(http, TOOL)
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather" and choice["finish_reason"] == "tool_calls"
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}
    assert choice["message"]["content"] is None
    assert [c["delta"]["tool_calls"][0]["index"] for c in chunks if "tool_calls" in c["delta"]]
    assert "<tool_call>" not in without_tools["message"]["content"]  # skipped, as before


def test_reasoning_marks_that_are_special_tokens_are_read(engine: Engine) -> None:
    with server_of(engine, reasoning_parser="think") as http:
        message = ask(http, THINK)["message"]
        chunks = streamed(http, THINK)
    assert message["reasoning_content"] == "I muse a lot." and message["content"] == "Answer: 5."
    assert "".join(c["delta"].get("content") or "" for c in chunks) == "Answer: 5."


@pytest.mark.parametrize("include", [False, True])
def test_stop_string_that_is_a_special_token_stops(engine: Engine, include: bool) -> None:
    fields = {"stop": ["<|stop|>", "never"], "include_stop_str_in_output": include}
    with server_of(engine) as http:
        choice = ask(http, STOP, **fields)
        chunks = streamed(http, STOP, **fields)
        message = http.post(
            "/v1/messages",
            json={
                "model": http.get("/v1/models").json()["data"][0]["id"],
                "max_tokens": 50,
                "messages": [{"role": "user", "content": script_name(STOP)}],
                "stop_sequences": ["<|stop|>"],
            },
        ).json()
        completion = http.post(
            "/v1/completions",
            json={"prompt": script_name(STOP), "max_tokens": 50, **fields, "temperature": 0},
        ).json()["choices"][0]
    text = "alpha beta <|stop|>" if include else "alpha beta "
    assert choice["message"]["content"] == text
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == "<|stop|>"
    assert "".join(c["delta"].get("content") or "" for c in chunks) == text
    assert chunks[-1]["stop_reason"] == "<|stop|>"
    assert message["stop_reason"] == "stop_sequence" and message["stop_sequence"] == "<|stop|>"
    assert message["content"][0]["text"] == "alpha beta "
    assert completion["text"] == text and completion["stop_reason"] == "<|stop|>"


def texts_of_every_endpoint(http: httpx.Client, name: str, stop: list[str]) -> dict[str, str]:
    """The text of each generating endpoint that takes stop strings, streamed and not."""
    chat = {"messages": [{"role": "user", "content": name}], "max_tokens": 50}
    model = http.get("/v1/models").json()["data"][0]["id"]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {**chat, "stop": stop},
        "/v1/completions": {"prompt": name, "max_tokens": 50, "temperature": 0, "stop": stop},
        "/v1/responses": {"input": name, "max_output_tokens": 50, "stop": stop},
        "/v1/messages": {**chat, "model": model, "stop_sequences": stop},
    }
    texts: dict[str, str] = {}
    for path, body in bodies.items():
        reply = http.post(path, json=body).json()
        choice = reply.get("choices", [{}])[0]
        texts[path] = (
            choice.get("text")
            or choice.get("message", {}).get("content")
            or "".join(block["text"] for block in reply.get("content", []))
            or reply["output"][0]["content"][0]["text"]
        )
        texts[f"{path} streamed"] = "".join(
            event.get("choices", [{}])[0].get("text")
            or event.get("choices", [{}])[0].get("delta", {}).get("content")
            or (event.get("delta") if isinstance(event.get("delta"), str) else "")
            or (event["delta"].get("text") if isinstance(event.get("delta"), dict) else "")
            or ""
            for line in http.post(path, json={**body, "stream": True}).text.split("\n")
            if line.startswith("data: {")
            for event in [json.loads(line[6:])]
        )
    return texts


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("<|stop|>gam", "alpha beta "),
        ("beta <|stop|>", "alpha "),
        ("ta <|stop|>gamma d", "alpha be"),
        ("beta gamma", "alpha "),
        ("<|stop|>never", "alpha beta gamma delta"),
        ("gamma<|stop|>", "alpha beta gamma delta"),
        ("delta<|im_end|>", "alpha beta gamma "),
    ],
)
def test_stop_string_may_mix_special_tokens_and_text(engine: Engine, stop: str, text: str) -> None:
    with server_of(engine) as http:
        texts = texts_of_every_endpoint(http, script_name(STOP), ["never <|stop|>", stop])
        included = ask(http, STOP, stop=stop, include_stop_str_in_output=True)
        with_marks = ask(http, STOP, stop=stop, skip_special_tokens=False)
        body = {"messages": [{"role": "user", "content": script_name(STOP)}], "n": 3, "stop": stop}
        several = http.post("/v1/chat/completions", json=body).json()["choices"]
    assert texts == dict.fromkeys(texts, text) and len(texts) == 8
    stopped = text != "alpha beta gamma delta"
    assert included["message"]["content"] == (text + stop if stopped else text)
    assert included["stop_reason"] == (stop if stopped else None)
    assert [choice["message"]["content"] for choice in several] == [text] * 3
    assert with_marks["message"]["content"].startswith(text[:8])


def test_special_token_as_stop_string_waits_for_min_tokens(engine: Engine) -> None:
    with server_of(engine) as http:
        choice = ask(http, STOP, stop="<|stop|>", min_tokens=30, max_tokens=40)
    assert choice["message"]["content"].startswith("alpha beta ")
    assert "<|stop|>" not in choice["message"]["content"]


@pytest.mark.parametrize(
    "off",
    [
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": {"thinking": False}},
        {"reasoning_effort": "none"},
    ],
)
def test_answer_is_content_where_thinking_is_off(engine: Engine, off: dict[str, Any]) -> None:
    with server_of(engine, reasoning_parser="think_open") as http:
        message = ask(http, ANSWER, **off)["message"]
        inside = ask(http, ANSWER)["message"]
    assert message["content"] == SCRIPTS[ANSWER] and "reasoning_content" not in message
    assert inside["reasoning_content"] == SCRIPTS[ANSWER]


def test_answer_is_content_where_messages_or_responses_turn_thinking_off(engine: Engine) -> None:
    name = script_name(ANSWER)
    with server_of(engine, reasoning_parser="think_open") as http:
        model = http.get("/v1/models").json()["data"][0]["id"]
        body = {"model": model, "max_tokens": 90, "messages": [{"role": "user", "content": name}]}
        message = http.post("/v1/messages", json={**body, "thinking": {"type": "disabled"}}).json()
        response = http.post(
            "/v1/responses", json={"input": name, "reasoning": {"effort": "none"}}
        ).json()
    assert message["content"] == [{"type": "text", "text": SCRIPTS[ANSWER]}]
    assert [item["type"] for item in response["output"]] == ["message"]


@pytest.mark.parametrize("fields", [{"response_format": SCHEMA}, {"guided_choice": ['{"zz": 41}']}])
def test_answer_bound_by_a_grammar_is_content(engine: Engine, fields: dict[str, Any]) -> None:
    with server_of(engine, reasoning_parser="think_open") as http:
        message = ask(http, JSON_ANSWER, **fields)["message"]
    assert json.loads(message["content"]) == {"zz": 41} and "reasoning_content" not in message


@pytest.mark.parametrize("flag", ["think", "think_open"])
def test_rendered_prompt_decides_where_reasoning_begins(tmp_path: Path, flag: str) -> None:
    folder = write_script_model(
        tmp_path,
        [],
        special_tokens=["<think>", "</think>"],
        template=OPENS_OR_CLOSES,
        after={"<think>": "muse more</think>It is seven."},
    )
    with (
        Engine.open(str(folder), max_num_seqs=2, kv_cache_memory_bytes=8 << 20) as engine,
        server_of(engine, reasoning_parser=flag) as http,
    ):
        on = ask(http, 0)["message"]
        off = ask(http, 0, chat_template_kwargs={"enable_thinking": False})["message"]
        chunks = streamed(http, 0)
    assert on["reasoning_content"] == "muse more" and on["content"] == "It is seven."
    assert off["content"] == "It is seven." and "reasoning_content" not in off
    assert "".join(c["delta"].get("reasoning_content", "") for c in chunks) == "muse more"


def test_closing_mark_inside_a_json_string_belongs_to_the_call(tmp_path: Path) -> None:
    script = f"<tool_call>{ENDS_IN_STRING}</tool_call>"
    folder = write_script_model(tmp_path, [script], special_tokens=["<tool_call>"])
    tools = [{"type": "function", "function": {"name": "b"}}]
    with (
        Engine.open(str(folder), max_num_seqs=2, kv_cache_memory_bytes=8 << 20) as engine,
        server_of(engine, **HERMES) as http,
    ):
        message = ask(http, 0, tools=tools)["message"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {
        "y": "</tool_call> in text"
    }


def test_tools_with_a_response_format_allow_a_call_or_the_answer(engine: Engine) -> None:
    fields = {"tools": TOOLS, "response_format": SCHEMA}
    with server_of(engine, **HERMES) as http:
        called = ask(http, TOOL, **fields)
        answered = ask(http, JSON_ANSWER, **fields)
        bound = ask(http, ANSWER, **fields, max_tokens=60)
    assert called["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    assert called["finish_reason"] == "tool_calls"
    assert json.loads(answered["message"]["content"]) == {"zz": 41}
    assert "tool_calls" not in answered["message"]
    assert bound["message"]["content"] != SCRIPTS[ANSWER]  # prose is not possible


SEVEN = {"type": "object", "properties": {"zz": {"const": 7}}, "required": ["zz"],
    "additionalProperties": False,
}  # fmt: skip
SEVEN_SCHEMA = {"type": "json_schema", "json_schema": {"name": "seven", "schema": SEVEN}}
THINKS_THEN = '<think>Which number? {"a": 1}</think>\n\n{"zz": 7}'


@pytest.mark.parametrize("special", [["<think>", "</think>"], []])
def test_model_may_think_before_an_answer_bound_by_a_grammar(
    tmp_path: Path, special: list[str]
) -> None:
    folder = write_script_model(tmp_path, [THINKS_THEN], special_tokens=special)
    with (
        Engine.open(str(folder), max_num_seqs=2, kv_cache_memory_bytes=8 << 20) as engine,
        server_of(engine, reasoning_parser="think_open") as http,
    ):
        forms = [
            {"response_format": SEVEN_SCHEMA},
            {"guided_choice": ['{"zz": 7}', "no"]},
            {"guided_regex": r'\{"zz": 7\}'},
        ]
        messages = [ask(http, 0, **form)["message"] for form in forms]
        chunks = streamed(http, 0, response_format=SEVEN_SCHEMA)
        off = ask(http, 0, response_format=SEVEN_SCHEMA, reasoning_effort="none")["message"]
    for message in messages:
        assert message["reasoning_content"] == 'Which number? {"a": 1}'
        assert json.loads(message["content"]) == {"zz": 7}
    assert json.loads("".join(c["delta"].get("content") or "" for c in chunks)) == {"zz": 7}
    assert "reasoning_content" not in off and off["content"].lstrip().startswith("{")


def test_thinking_that_the_prompt_opens_ends_before_the_bound_answer(tmp_path: Path) -> None:
    folder = write_script_model(
        tmp_path,
        [],
        special_tokens=["<think>", "</think>"],
        template=OPENS_OR_CLOSES,
        after={"<think>": 'seven</think>{"zz": 7}'},
    )
    with (
        Engine.open(str(folder), max_num_seqs=2, kv_cache_memory_bytes=8 << 20) as engine,
        server_of(engine, reasoning_parser="think", **HERMES) as http,
    ):
        on = ask(http, 0, response_format=SEVEN_SCHEMA)["message"]
        with_tools = ask(http, 0, response_format=SEVEN_SCHEMA, tools=TOOLS)["message"]
    for message in (on, with_tools):
        assert message["reasoning_content"] == "seven"
        assert json.loads(message["content"]) == {"zz": 7}
