"""Every bad request gets a 4xx with the API's error body, which names field, value and limit."""

from __future__ import annotations

import gzip
from typing import Any

import httpx
import pytest

from ridgeline.serve.generation.respond import IGNORED_HEADER
from tests.serve.fake_engine import MAX_MODEL_LEN, FakeEngine

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}


async def refused(
    http: httpx.AsyncClient, path: str, body: Any, status: int = 400
) -> dict[str, Any]:
    raw = body if isinstance(body, bytes) else None
    reply = await http.post(path, content=raw, json=None if raw is not None else body)
    assert reply.status_code == status, reply.text
    error = dict(reply.json()["error"])
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    return error


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "NaN"}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": "two"}, "n"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-44}, "repetition_penalty"),
        ({"repetition_penalty": 1e300}, "repetition_penalty"),
        ({"logprobs": 21}, "logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"seed": 2**70}, "seed"),
        ({"min_tokens": 20, "max_tokens": 2}, "min_tokens"),
        ({"best_of": 4}, "best_of"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": {"text": "x"}}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1], "echo": True, "logprobs": 21}, "logprobs"),
        ({"prompt": [5] * 6250, "echo": True, "logprobs": 20}, "logprobs"),
        ({"prompt": [5] * 6250, "prompt_logprobs": 20}, "prompt_logprobs"),
        ({"prompt": ["x"] * 100, "n": 64}, "prompt"),
        ({"prompt": ["x"] * 257}, "prompt"),
        ({"n": 65}, "n"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 257}, "stop"),
        ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
        ({"priority": 101}, "priority"),
        ({"timeout_ms": 0}, "timeout_ms"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"slo_class": "gold"}, "slo_class"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"guided_regex": "x" * 70_000}, "guided_regex"),
        ({"guided_regex": "x", "guided_choice": ["a"]}, "guided_regex"),
        ({"structured_outputs": {"regex": "x", "choice": ["a"]}}, "structured_outputs"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
    ],
)
async def test_out_of_range_fields_are_refused(
    http: httpx.AsyncClient, fields: dict[str, Any], named: str
) -> None:
    error = await refused(http, COMPLETIONS, {"prompt": "x", **fields})
    assert error["type"] == "BadRequestError"
    assert named in error["message"]
    assert (error["param"] or "").startswith(named)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"prompt": [True]}, "prompt"),
        (COMPLETIONS, {"prompt": [1, False]}, "prompt"),
        (COMPLETIONS, {"prompt": [[1, True]]}, "prompt"),
        (COMPLETIONS, {"stop_token_ids": [True]}, "stop_token_ids.0"),
        (COMPLETIONS, {"allowed_token_ids": [1, True]}, "allowed_token_ids.1"),
        (COMPLETIONS, {"logit_bias": {"5": True}}, "logit_bias.5"),
        (COMPLETIONS, {"logit_bias": {"true": 1}}, "logit_bias.true"),
        (COMPLETIONS, {"max_tokens": True}, "max_tokens"),
        (COMPLETIONS, {"n": True}, "n"),
        (COMPLETIONS, {"seed": True}, "seed"),
        (COMPLETIONS, {"logprobs": True}, "logprobs"),
        (COMPLETIONS, {"temperature": True}, "temperature"),
        (CHAT, {**HELLO, "top_logprobs": True, "logprobs": True}, "top_logprobs"),
        ("/v1/messages", {**HELLO, "model": "m", "max_tokens": True}, "max_tokens"),
        ("/v1/responses", {"input": "x", "max_output_tokens": True}, "max_output_tokens"),
        ("/v1/embeddings", {"input": [True]}, "input"),
        ("/v1/embeddings", {"input": [[1], [True]]}, "input"),
        ("/v1/rerank", {"query": "x", "documents": ["y"], "top_n": True}, "top_n"),
        ("/v1/score", {"text_1": "x", "text_2": "y", "truncate_prompt_tokens": True},
         "truncate_prompt_tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens.0"),
    ],
)  # fmt: skip
async def test_booleans_are_no_numbers(
    http: httpx.AsyncClient, path: str, fields: dict[str, Any], param: str
) -> None:
    prompt = {"prompt": "x"} if path == COMPLETIONS else {}
    reply = await http.post(path, json={**prompt, **fields})
    error = reply.json()["error"]
    assert reply.status_code == 400, reply.text
    assert param in error["message"] or param == error["param"], error


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"stop": 5}, "stop"),
        (COMPLETIONS, {"stop": ["a", 5]}, "stop.1"),
        (COMPLETIONS, {"prompt": {"text": "x"}}, "prompt"),
        (COMPLETIONS, {"guided_json": 5}, "guided_json"),
        (COMPLETIONS, {"logit_bias": {"x": 1}}, "logit_bias.x"),
        (COMPLETIONS, {"response_format": {"str": 5}}, "response_format.type"),
        (COMPLETIONS, {"structured_outputs": {"json": 5}}, "structured_outputs.json"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]},
         "messages.0.content"),
        ("/v1/chat/completions", {"messages": [{"content": "x"}]}, "messages.0.role"),
        ("/v1/chat/completions", {"messages": [], "tools": [{"type": "function"}]}, "messages"),
        ("/v1/responses", {"input": 5}, "input"),
        ("/v1/embeddings", {"input": {"str": 5}}, "input"),
    ],
)  # fmt: skip
async def test_param_is_the_path_of_the_field(
    http: httpx.AsyncClient, path: str, fields: dict[str, Any], param: str
) -> None:
    """Not pydantic's name of a union branch: `stop`, and not `stop.str`."""
    body = {"prompt": "x", **fields} if path == COMPLETIONS else fields
    error = await refused(http, path, body)
    assert error["param"] == param and error["message"].startswith(f"{param}: ")


async def test_json_nan_is_refused(http: httpx.AsyncClient) -> None:
    error = await refused(http, COMPLETIONS, b'{"prompt": "x", "temperature": NaN}')
    assert "temperature" in error["message"]


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000])
async def test_body_that_is_not_a_json_object(http: httpx.AsyncClient, raw: bytes) -> None:
    assert "JSON" in (await refused(http, COMPLETIONS, raw))["message"]


async def test_empty_stop_string_is_refused(http: httpx.AsyncClient) -> None:
    assert "stop" in (await refused(http, COMPLETIONS, {"prompt": "x", "stop": ""}))["message"]


async def test_prompt_too_long_names_the_limit(http: httpx.AsyncClient) -> None:
    for stream in (False, True):
        body = {"prompt": "x" * 1000, "stream": stream}
        message = (await refused(http, COMPLETIONS, body))["message"]
        assert "1000" in message and str(MAX_MODEL_LEN - 1) in message


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"documents": [{"text": "x"}]}),
        (CHAT, {"chat_template": "{{ 1 }}"}),
        (COMPLETIONS, {"suffix": "tail"}),
    ],
)
async def test_unsupported_fields_are_refused(
    http: httpx.AsyncClient, engine: FakeEngine, path: str, fields: dict[str, Any]
) -> None:
    base = HELLO if path == CHAT else {"prompt": "x"}
    (name,) = fields
    error = await refused(http, path, {**base, **fields})
    assert error["param"] == name and name in error["message"]
    assert not engine.requests


async def test_harmless_values_of_unsupported_fields_are_accepted(http: httpx.AsyncClient) -> None:
    fields = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "audio": None,
    }
    reply = await http.post(CHAT, json={**HELLO, **fields})
    assert reply.status_code == 200 and IGNORED_HEADER not in reply.headers


@pytest.mark.parametrize("stream", [False, True])
async def test_ignored_fields_are_listed_in_a_header(http: httpx.AsyncClient, stream: bool) -> None:
    fields = {"user": "u1", "wild_idea": 1, "stream": stream}
    reply = await http.post(COMPLETIONS, json={"prompt": "x", **fields})
    assert reply.status_code == 200
    assert reply.headers[IGNORED_HEADER] == "user,wild_idea"


async def test_hostile_field_names_cannot_split_headers(http: httpx.AsyncClient) -> None:
    reply = await http.post(
        COMPLETIONS, json={"prompt": "x", "a\r\nset-cookie: b": 1, "ü" * 9999: 2}
    )
    assert reply.status_code == 200 and "set-cookie" not in reply.headers
    assert len(reply.headers[IGNORED_HEADER]) <= 1000


async def test_top_logprobs_needs_logprobs(http: httpx.AsyncClient) -> None:
    assert (await refused(http, CHAT, {**HELLO, "top_logprobs": 2}))["param"] == "top_logprobs"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hi",
        [{"role": "robot", "content": "x"}],
        [{}],
        [{"role": "user"}],
        [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}],
    ],
)
async def test_malformed_messages_are_refused(http: httpx.AsyncClient, messages: Any) -> None:
    error = await refused(http, CHAT, {"messages": messages})
    assert error["param"].startswith("messages")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_unknown_model_is_404(http: httpx.AsyncClient, path: str) -> None:
    error = await refused(http, path, {**HELLO, "prompt": "x", "model": "gpt-9"}, 404)
    assert error["type"] == "NotFoundError" and "gpt-9" in error["message"]
    assert "fake" in error["message"]


async def test_unknown_route_and_method(http: httpx.AsyncClient) -> None:
    await refused(http, "/v1/nothing", {}, 404)
    assert (await http.get(COMPLETIONS)).status_code == 405


async def test_crash_reveals_nothing_about_the_machine(
    http: httpx.AsyncClient,
) -> None:
    error = await refused(http, COMPLETIONS, {"prompt": "!crash"}, 500)
    assert error["type"] == "InternalServerError"
    assert "/srv" not in str(error) and "0x" not in str(error)


async def test_failure_before_the_first_token_is_a_500(http: httpx.AsyncClient) -> None:
    error = await refused(http, COMPLETIONS, {"prompt": "!fail"}, 500)
    assert error["message"] == "lost <path> at <address>"


async def test_failure_within_a_stream_is_an_error_event(http: httpx.AsyncClient) -> None:
    reply = await http.post(COMPLETIONS, json={"prompt": "!fail", "stream": True})
    lines = reply.text.strip().split("\n\n")
    assert reply.status_code == 200 and lines[-1] == "data: [DONE]"
    assert '"error"' in lines[-2] and "InternalServerError" in lines[-2]


async def test_one_bad_prompt_of_a_list_aborts_the_others(
    http: httpx.AsyncClient, engine: FakeEngine
) -> None:
    await refused(http, COMPLETIONS, {"prompt": ["!stuck", "x" * 1000]})
    assert len(engine.aborted) == 1 and not engine.ended  # the bad one was never submitted


JSON_ROUTES = (
    COMPLETIONS, CHAT, "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/rerank", "/v1/score",
    "/tokenize", "/detokenize",
)  # fmt: skip


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate", "zstd", "gzip, gzip", "GZIP"])
@pytest.mark.parametrize("path", JSON_ROUTES)
async def test_compressed_body_is_refused_with_the_reason(
    http: httpx.AsyncClient, path: str, encoding: str
) -> None:
    body = gzip.compress(b'{"prompt": "hi"}')
    reply = await http.post(path, content=body, headers={"content-encoding": encoding})
    assert reply.status_code == 415, reply.text
    message = reply.json()["error"]["message"]
    assert f"Content-Encoding: {encoding}" in message and "fix: send it as it is" in message


@pytest.mark.parametrize("encoding", ["", "identity", " Identity "])
async def test_body_that_is_not_compressed_may_say_so(
    http: httpx.AsyncClient, encoding: str
) -> None:
    headers = {"content-encoding": encoding}
    body = {"model": "fake", "prompt": "hi", "max_tokens": 1}
    assert (await http.post(COMPLETIONS, json=body, headers=headers)).status_code == 200
