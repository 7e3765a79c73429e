"""/v1/completions: prompts, choices, echo, log-probabilities, usage."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from ridgeline.serve.openai.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    CompletionRequestBase,
)
from tests.serve.fake_engine import ANSWER, FakeEngine


async def complete(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    reply = await http.post("/v1/completions", json={"model": "fake", **fields})
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


async def chunks_of(http: httpx.AsyncClient, path: str, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": "fake", "stream": True, **fields}
    reply = await http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in reply.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def test_default_is_sixteen_tokens(http: httpx.AsyncClient) -> None:
    answer = await complete(http, prompt="hi")
    assert answer["id"].startswith("cmpl-") and answer["object"] == "text_completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "text": ANSWER[:16],
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 16,
        "total_tokens": 18,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


@pytest.mark.parametrize(
    ("prompt", "lengths"),
    [
        ("abc", [3]),
        (["abc", "de"], [3, 2]),
        ([97, 98, 99], [3]),
        ([[97, 98], [99]], [2, 1]),
    ],
)
async def test_all_shapes_of_prompt(
    http: httpx.AsyncClient, engine: FakeEngine, prompt: Any, lengths: list[int]
) -> None:
    answer = await complete(http, prompt=prompt, max_tokens=2)
    assert sorted(len(request[0]) for request in engine.requests.values()) == sorted(lengths)
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(lengths)))
    assert answer["usage"]["prompt_tokens"] == sum(lengths)
    assert answer["usage"]["completion_tokens"] == 2 * len(lengths)


async def test_choices_of_list_prompts_are_numbered_prompt_by_prompt(
    http: httpx.AsyncClient,
) -> None:
    answer = await complete(http, prompt=["a", "bb"], n=2, max_tokens=1, echo=True)
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == ["aH", "aH", "bbH", "bbH"]
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 4


async def test_logprobs(http: httpx.AsyncClient) -> None:
    answer = await complete(http, prompt="a", logprobs=2, max_tokens=2)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["H", "e"]
    assert logprobs["token_logprobs"] == [-0.5, -0.5]
    assert logprobs["top_logprobs"][0] == {"H": -0.5, "?": -9999.0}
    assert logprobs["text_offset"] == [0, 1]


async def test_echo_with_logprobs_covers_the_prompt(http: httpx.AsyncClient) -> None:
    answer = await complete(http, prompt="abc", echo=True, logprobs=1, max_tokens=1)
    choice = answer["choices"][0]
    assert choice["text"] == "abcH"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c", "H"]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -1.0, -0.5]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]


async def test_echo_with_zero_tokens_scores_the_prompt(http: httpx.AsyncClient) -> None:
    answer = await complete(http, prompt="abc", echo=True, logprobs=1, max_tokens=0)
    choice = answer["choices"][0]
    assert choice["text"] == "abc" and choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert answer["usage"]["completion_tokens"] == 0


async def test_prompt_logprobs(http: httpx.AsyncClient) -> None:
    answer = await complete(http, prompt="ab", prompt_logprobs=1, max_tokens=1)
    first, second = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    assert second[str(ord("b"))] == {"logprob": -1.0, "rank": 2, "decoded_token": "b"}


async def test_stream_is_one_chunk_per_token(http: httpx.AsyncClient) -> None:
    chunks = await chunks_of(http, "/v1/completions", prompt="hi", max_tokens=4)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == list(ANSWER[:4])
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None, None, None, "length"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


async def test_stream_usage(http: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await chunks_of(
        http, "/v1/completions", prompt="hi", max_tokens=3, stream_options=options
    )
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


async def test_stream_with_echo_and_logprobs(http: httpx.AsyncClient) -> None:
    chunks = await chunks_of(
        http, "/v1/completions", prompt="ab", echo=True, logprobs=0, max_tokens=2
    )
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["abH", "e"]
    offsets = [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks]
    assert offsets == [[0, 1, 2], [3]]


async def test_stream_of_several_prompts_has_every_choice(http: httpx.AsyncClient) -> None:
    chunks = await chunks_of(http, "/v1/completions", prompt=["a", "b"], n=2, max_tokens=5)
    texts = dict.fromkeys(range(4), "")
    for chunk in chunks:
        choice = chunk["choices"][0]
        texts[choice["index"]] += choice["text"]
    assert texts == dict.fromkeys(range(4), ANSWER[:5])


async def test_sampling_parameters_reach_the_engine(
    http: httpx.AsyncClient, engine: FakeEngine
) -> None:
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1,
        "presence_penalty": 0.2, "frequency_penalty": 0.3, "seed": 42, "min_tokens": 1,
        "ignore_eos": True, "include_stop_str_in_output": True,
    }  # fmt: skip
    await complete(
        http,
        prompt="a",
        stop=["x", "y"],
        stop_token_ids=[1],
        logit_bias={"5": -1.5},
        priority=7,
        cache_salt="tenant-a",
        **fields,
    )
    (request,) = engine.requests.values()
    for name, value in fields.items():
        assert getattr(request[1], name) == value
    assert (request[1].stop, request[1].stop_token_ids, request[1].logit_bias) == (
        ("x", "y"),
        (1,),
        {5: -1.5},
    )
    assert request[2:] == (7, "tenant-a")


@pytest.mark.parametrize(
    ("path", "kind", "body"),
    [
        ("/v1/completions", CompletionRequest, {"prompt": "ab"}),
        (
            "/v1/chat/completions",
            ChatCompletionRequest,
            {"messages": [{"role": "user", "content": "ab"}]},
        ),
    ],
)
async def test_any_null_field_is_the_same_as_absent(
    http: httpx.AsyncClient,
    engine: FakeEngine,
    path: str,
    kind: type[CompletionRequestBase],
    body: Any,
) -> None:
    nulls = dict.fromkeys(set(kind.model_fields) - set(body) - {"request_id"})
    for fields in ({}, nulls, *({name: None} for name in nulls)):
        reply = await http.post(path, json={**body, **fields})
        assert reply.status_code == 200, reply.text
    first, *others = engine.requests.values()
    assert len(others) == len(nulls) + 1 and all(other[1] == first[1] for other in others)


async def test_null_fields_give_the_same_sampling(
    http: httpx.AsyncClient, engine: FakeEngine
) -> None:
    names = ["n", "temperature", "top_p", "stop", "logprobs", "seed", "echo", "stream", "suffix"]
    await complete(http, prompt="a", **dict.fromkeys([*names, "stream_options", "logit_bias"]))
    await complete(http, prompt="a")
    with_nulls, without = engine.requests.values()
    assert with_nulls[1] == without[1]
