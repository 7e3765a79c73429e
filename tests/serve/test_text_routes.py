"""`/tokenize`, `/detokenize` and `/v1/embeddings`."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import httpx
import msgspec
import pytest

from tests.serve.fake_engine import FakeEngine


async def test_tokenize_and_detokenize(http: httpx.AsyncClient) -> None:
    body = {"prompt": "héj", "return_token_strs": True}
    payload = (await http.post("/tokenize", json=body)).json()
    assert payload == {
        "count": 3, "max_model_len": 256, "tokens": [104, 233, 106], "token_strs": ["h", "é", "j"],
    }  # fmt: skip
    decoded = await http.post("/detokenize", json={"tokens": payload["tokens"]})
    assert decoded.json() == {"prompt": "héj"}
    chat = {"messages": [{"role": "user", "content": "a"}]}
    assert (await http.post("/tokenize", json=chat)).json()["count"] == len("<user>a<assistant>")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}),
        ("/tokenize", {"prompt": "x", "wild": 1}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": "x"}),
        ("/v1/embeddings", {"input": ""}),
        ("/v1/embeddings", {"input": []}),
        ("/v1/embeddings", {"input": ["x"] * 2049}),
        ("/v1/embeddings", {"input": "x" * 300}),
        ("/v1/embeddings", {"input": "x", "dimensions": 7}),
        ("/v1/embeddings", {"input": "x", "encoding_format": "int8"}),
    ],
)
async def test_bad_bodies_are_refused(
    http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    assert (await http.post(path, json=body)).status_code == 400


async def test_embeddings_take_as_many_inputs_as_openais(http: httpx.AsyncClient) -> None:
    """LangChain's OpenAIEmbeddings sends 1,000 at a time."""
    reply = await http.post("/v1/embeddings", json={"input": ["x"] * 2048})
    assert reply.status_code == 200 and len(reply.json()["data"]) == 2048


async def test_tokenize_counts_a_chat_as_it_is_served(
    engine: FakeEngine, http: httpx.AsyncClient
) -> None:
    fields = {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b ("}],
        "continue_final_message": True,
        "chat_template_kwargs": {"enable_thinking": False},
        "reasoning_effort": "low",
        "add_special_tokens": False,
    }
    tokens = (await http.post("/tokenize", json=fields)).json()["tokens"]
    assert "".join(map(chr, tokens)) == "<user>a<assistant>b ("
    expected = {"enable_thinking": False, "reasoning_effort": "low"}
    assert engine.tokenizer.variables == expected
    await http.post("/v1/chat/completions", json=fields)
    ((served, *_),) = engine.requests.values()
    assert list(served) == tokens


async def test_ids_outside_the_vocabulary_are_not_decoded(
    engine: FakeEngine, http: httpx.AsyncClient
) -> None:
    engine.info = msgspec.structs.replace(engine.info, vocab_size=200)
    reply = await http.post("/detokenize", json={"tokens": [97, 200]})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == "tokens.1: not a token id; got 200; limit: 199"
    assert (await http.post("/detokenize", json={"tokens": [97, 199]})).status_code == 200


async def test_chat_returns_the_prompts_token_ids(
    engine: FakeEngine, http: httpx.AsyncClient
) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "return_token_ids": True}
    whole = (await http.post("/v1/chat/completions", json=body)).json()
    text = (await http.post("/v1/chat/completions", json={**body, "stream": True})).text
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert "".join(map(chr, whole["prompt_token_ids"])) == "<user>a<assistant>"
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])


async def test_embeddings_are_unit_vectors_in_both_encodings(http: httpx.AsyncClient) -> None:
    body = {"input": [[97, 98], [99, 100]]}
    payload = (await http.post("/v1/embeddings", json=body)).json()
    assert payload["usage"] == {"prompt_tokens": 4, "total_tokens": 4}
    vectors = [entry["embedding"] for entry in payload["data"]]
    assert [entry["index"] for entry in payload["data"]] == [0, 1]
    assert all(sum(v * v for v in vector) == pytest.approx(1) for vector in vectors)
    encoded = await http.post("/v1/embeddings", json={**body, "encoding_format": "base64"})
    raw = base64.b64decode(encoded.json()["data"][1]["embedding"])
    assert struct.unpack(f"<{len(raw) // 4}f", raw) == pytest.approx(vectors[1])


async def test_pooling_without_normalisation(engine: FakeEngine, http: httpx.AsyncClient) -> None:
    body = {"input": "ab", "pooling": "last", "normalize": False}
    payload = (await http.post("/v1/embeddings", json=body)).json()
    assert payload["data"][0]["embedding"] == [98.0, 1.0]


async def test_embedding_responses_have_different_ids(http: httpx.AsyncClient) -> None:
    replies = [await http.post("/v1/embeddings", json={"input": "x"}) for _ in range(3)]
    ids = {reply.headers["x-request-id"] for reply in replies}
    assert len(ids) == 3 and all(each.startswith("embd-") for each in ids)
    sent = {"x-request-id": "mine"}
    reply = await http.post("/v1/embeddings", json={"input": "x"}, headers=sent)
    assert reply.headers["x-request-id"] == "mine"


async def test_responses_input_is_counted_as_it_is_served(
    engine: FakeEngine, http: httpx.AsyncClient
) -> None:
    fields = {"input": [{"role": "user", "content": "a"}], "instructions": "be brief"}
    count = (await http.post("/v1/responses/input_tokens", json=fields)).json()
    await http.post("/v1/responses", json=fields)
    ((served, *_),) = engine.requests.values()
    assert count == {"object": "response.input_tokens", "input_tokens": len(served)}
    too_long = await http.post("/v1/responses/input_tokens", json={"input": "x" * 1_000_000})
    assert too_long.status_code == 400 and too_long.json()["error"]["param"] == "input"


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")],
)
async def test_stored_responses_are_refused_with_the_reason(
    http: httpx.AsyncClient, method: str, path: str
) -> None:
    reply = await http.request(method, f"/v1/responses/resp_1{path}")
    assert reply.status_code == 404
    assert "stores no responses" in reply.json()["error"]["message"]


async def test_embedded_texts_are_truncated_to_their_last_tokens(http: httpx.AsyncClient) -> None:
    url = "/v1/embeddings"
    cut = (await http.post(url, json={"input": "abcde", "truncate_prompt_tokens": 2})).json()
    assert cut["usage"]["prompt_tokens"] == 2
    whole = (await http.post(url, json={"input": "de"})).json()
    assert cut["data"] == whole["data"]
