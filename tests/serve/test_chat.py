"""/v1/chat/completions: roles, content parts, templates, log-probabilities, streams."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from ridgeline.serve.app import create_app
from tests.serve.fake_engine import ANSWER, FakeEngine
from tests.serve.test_completions import chunks_of

HELLO = [{"role": "user", "content": "hi"}]


async def chat(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    reply = await http.post("/v1/chat/completions", json={"model": "fake", **fields})
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def prompt_of(engine: FakeEngine) -> str:
    (request,) = engine.requests.values()
    return "".join(map(chr, request[0]))


async def test_chat_without_a_limit_runs_to_the_end(http: httpx.AsyncClient) -> None:
    answer = await chat(http, messages=HELLO)
    assert answer["id"].startswith("chatcmpl-") and answer["object"] == "chat.completion"
    choice = answer["choices"][0]
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"] == ANSWER
    assert choice["finish_reason"] == "stop" and choice["logprobs"] is None


async def test_max_completion_tokens_takes_precedence(http: httpx.AsyncClient) -> None:
    answer = await chat(http, messages=HELLO, max_tokens=9, max_completion_tokens=3)
    assert answer["usage"]["completion_tokens"] == 3


async def test_content_parts_are_joined(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    system = {"role": "system", "content": "be brief"}
    await chat(http, messages=[system, {"role": "user", "content": parts}])
    assert prompt_of(engine) == "<system>be brief<user>one\ntwo<assistant>"


async def test_other_content_is_refused(http: httpx.AsyncClient) -> None:
    image = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}
    body = {"messages": [{"role": "user", "content": [image]}]}
    reply = await http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400 and "messages.0.content" in reply.json()["error"]["message"]


async def test_logprobs(http: httpx.AsyncClient) -> None:
    answer = await chat(http, messages=HELLO, max_tokens=1, logprobs=True, top_logprobs=2)
    (entry,) = answer["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ("H", -0.5, [72])
    assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.5, -9999.0]


async def test_first_chunk_has_the_role_and_the_last_the_finish_reason(
    http: httpx.AsyncClient,
) -> None:
    chunks = await chunks_of(
        http,
        "/v1/chat/completions",
        messages=HELLO,
        max_tokens=3,
        n=2,
        stream_options={"include_usage": True},
    )
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 6
    for index in (0, 1):
        own = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(entry["delta"].get("content", "") for entry in own) == ANSWER[:3]
        assert [entry["finish_reason"] for entry in own][-1] == "length"
        assert all("role" not in entry["delta"] for entry in own[1:])
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


async def test_chat_without_a_template_is_refused() -> None:
    app = create_app(FakeEngine(has_template=False))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        reply = await http.post("/v1/chat/completions", json={"messages": HELLO})
    assert reply.status_code == 400
    assert "chat template" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "content"),
    [
        ({"refusal": "I cannot help."}, "I cannot help."),
        ({"reasoning_content": "hm"}, ""),
        ({"reasoning": "hm"}, ""),
        ({"content": "yes", "refusal": None}, "yes"),
    ],
)
async def test_assistant_without_content_has_its_refusal_or_reasoning(
    http: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], content: str
) -> None:
    message = {"role": "assistant", "content": None, **fields}
    await chat(http, messages=[*HELLO, message, *HELLO])
    assert f"<assistant>{content}<user>" in prompt_of(engine)


@pytest.mark.parametrize("fields", [{}, {"tool_calls": []}, {"reasoning_content": ""}])
async def test_assistant_without_anything_is_refused(
    http: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    message = {"role": "assistant", "content": None, **fields}
    reply = await http.post("/v1/chat/completions", json={"messages": [*HELLO, message]})
    assert reply.status_code == 400 and "content is missing" in reply.json()["error"]["message"]
