"""`/v1/rerank`, `/v1/score`, and embeddings as the model's files say: against transformers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from ridgeline.config.server import ServerOptions
from ridgeline.engine.embedding_settings import embedding_settings
from ridgeline.engine.engine import Engine
from ridgeline.errors import BadModel
from ridgeline.fleet.gateway import ROUTED_PATHS
from ridgeline.serve.app import create_app
from ridgeline.serve.config import LIMITS
from ridgeline.serve.rerank import routes, template
from ridgeline.serve.rerank.template import DEFAULT_INSTRUCTION
from tests.conformance.tiny_models import make_model
from tests.serve.fake_engine import FakeEngine

QUERY = "What is a roofline?"
DOCUMENTS = ["A plot of two bounds.", "Bread.", "A line on a roof, seen from below."]
PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    "the Instruct provided. Note that the answer can only be \"yes\" or \"no\"."
    "<|im_end|>\n<|im_start|>user\n"
)  # fmt: skip
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def save_tokenizer(directory: Path) -> tokenizers.Tokenizer:
    """Bytes, "yes", "no" and ChatML's marks."""
    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: i for i, word in enumerate([*words, "ye", "yes", "no"])}
    merges = [("y", "e"), ("ye", "s"), ("n", "o")]
    made = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    made.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text("{}")
    return made


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, tokenizers.Tokenizer]:
    """(directory, transformers' model, tokenizer) of a tiny Qwen3."""
    path = tmp_path_factory.mktemp("reranker")
    model = make_model("qwen3", path, vocab_size=300, max_position_embeddings=1024)
    (path / "modules.json").write_text(
        json.dumps(
            [
                {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
                {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
                {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
            ]
        )
    )
    (path / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 24, "pooling_mode_lasttoken": True}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return path, model, save_tokenizer(path)


@pytest.fixture(scope="module")
def engine(reranker: tuple[Path, Any, Any]) -> Iterator[Engine]:
    with Engine.open(str(reranker[0]), dtype="float32", max_num_seqs=4) as engine:
        yield engine


@pytest.fixture
async def client(engine: Engine) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=create_app(engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


def expected(
    reranker: tuple[Path, Any, tokenizers.Tokenizer], query: str, document: str, instruction: str
) -> float:
    """The probability of "yes" as Qwen3-Reranker's model card computes it."""
    _, model, tokenizer = reranker
    body = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    ids = [i for text in (PREFIX, body, SUFFIX) for i in tokenizer.encode(text).ids]
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0, -1]
    pair = logits[[tokenizer.token_to_id("no"), tokenizer.token_to_id("yes")]]
    return float(torch.softmax(pair.double(), 0)[1])


async def test_rerank_orders_documents_by_the_probability_of_yes(
    client: httpx.AsyncClient, reranker: tuple[Path, Any, Any]
) -> None:
    body = {"query": QUERY, "documents": [DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]]}
    payload = (await client.post("/v1/rerank", json=body)).json()
    wanted = [expected(reranker, QUERY, each, DEFAULT_INSTRUCTION) for each in DOCUMENTS]
    order = sorted(range(3), key=lambda i: -wanted[i])
    assert [result["index"] for result in payload["results"]] == order
    for result in payload["results"]:
        assert result["relevance_score"] == pytest.approx(wanted[result["index"]], abs=1e-4)
        assert result["document"] == {"text": DOCUMENTS[result["index"]]}
    assert payload["usage"]["total_tokens"] > 3 * 200
    assert payload["id"].startswith("rerank-")


@pytest.mark.parametrize("path", ["/rerank", "/v2/rerank", "/score"])
async def test_vllms_and_coheres_paths_are_served(client: httpx.AsyncClient, path: str) -> None:
    texts = {"text_1": QUERY, "text_2": DOCUMENTS}
    body = texts if path == "/score" else {"query": QUERY, "documents": DOCUMENTS}
    same = "/v1/score" if path == "/score" else "/v1/rerank"
    key = "data" if path == "/score" else "results"
    wanted = (await client.post(same, json=body)).json()[key]
    assert (await client.post(path, json=body)).json()[key] == wanted
    refused = await client.post(path, json=dict.fromkeys(body, ["x"] * 10_000))
    assert refused.status_code == 400
    assert path in ROUTED_PATHS


async def test_rerank_limits_results_and_truncates_documents(
    client: httpx.AsyncClient, reranker: tuple[Path, Any, Any]
) -> None:
    body = {
        "query": QUERY, "documents": DOCUMENTS, "top_n": 1, "return_documents": False,
        "max_tokens_per_doc": 4, "instruction": "Find plots.",
    }  # fmt: skip
    payload = (await client.post("/v1/rerank", json=body)).json()
    best = max(expected(reranker, QUERY, each[:4], "Find plots.") for each in DOCUMENTS)
    [result] = payload["results"]
    assert set(result) == {"index", "relevance_score"}
    assert result["relevance_score"] == pytest.approx(best, abs=1e-4)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v1/score"])
async def test_more_pairs_than_the_queue_holds_are_scored_in_parts(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(routes, "LIMITS", msgspec.structs.replace(LIMITS, max_prompts=4))
    sizes, submit = list[int](), routes._submit

    async def counted(*args: Any) -> Any:
        sizes.append(len(args[-1]))
        return await submit(*args)

    monkeypatch.setattr(routes, "_submit", counted)
    documents = [f"Document {i}." for i in range(10)]
    texts = {"query": QUERY, "documents": documents, "text_1": QUERY, "text_2": documents}
    names = ("query", "documents") if path == "/v1/rerank" else ("text_1", "text_2")
    body = {name: texts[name] for name in names}
    reply = await client.post(path, json=body, headers={"x-request-id": "own"})
    payload = reply.json()
    assert sizes == [4, 4, 2]
    alone = [(await client.post(path, json=body | {names[1]: [own]})).json() for own in documents]
    entries = payload.get("results") or payload["data"]
    key = "relevance_score" if path == "/v1/rerank" else "score"
    by_index = {entry["index"]: entry[key] for entry in entries}
    wanted = [(own.get("results") or own["data"])[0][key] for own in alone]
    assert [by_index[i] for i in range(10)] == pytest.approx(wanted, abs=1e-6)
    totals = [own["usage"]["total_tokens"] for own in alone]
    assert payload["usage"]["total_tokens"] == sum(totals)
    assert reply.headers["x-request-id"] == "own"


@pytest.mark.parametrize(
    "body",
    [
        {"query": "q" * 20_000, "documents": ["x"] * 2048},
        {"query": "q", "instruction": "q" * 20_000, "documents": ["x"] * 2048},
    ],
)
async def test_long_query_is_refused_before_it_is_joined_with_every_document(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]
) -> None:
    joined: list[str] = []

    def pair_text(*parts: Any) -> str:
        joined.append(template.pair_text(*parts))
        return joined[-1]

    monkeypatch.setattr(routes, "pair_text", pair_text)
    reply = await client.post("/v1/rerank", json=body)
    assert reply.status_code == 400 and "too long" in reply.text
    assert len(joined) == 1


async def test_scores_of_one_to_many_and_of_pairs(
    client: httpx.AsyncClient, reranker: tuple[Path, Any, Any]
) -> None:
    wanted = [expected(reranker, QUERY, each, DEFAULT_INSTRUCTION) for each in DOCUMENTS]
    for first in (QUERY, [QUERY], [QUERY] * 3):
        body = {"text_1": first, "text_2": DOCUMENTS}
        payload = (await client.post("/v1/score", json=body)).json()
        assert [entry["index"] for entry in payload["data"]] == [0, 1, 2]
        assert payload["id"].startswith("score-")
        assert [entry["score"] for entry in payload["data"]] == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/rerank", {"query": "", "documents": ["x"]}),
        ("/v1/rerank", {"query": "x", "documents": []}),
        ("/v1/rerank", {"query": "x", "documents": ["x"] * 2049}),
        ("/v1/rerank", {"query": "x", "documents": ["x"], "top_n": 0}),
        ("/v1/rerank", {"query": "x", "documents": ["x" * 2000]}),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}),
        ("/v1/score", {"text_1": "a", "text_2": []}),
        ("/v1/score", {"text_1": [], "text_2": ["a"]}),
    ],
)
async def test_bad_bodies_are_refused(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    assert (await client.post(path, json=body)).status_code == 400


async def test_too_long_document_is_named(client: httpx.AsyncClient) -> None:
    body = {"query": "x", "documents": ["x" * 200_000]}
    error = (await client.post("/v1/rerank", json=body)).json()["error"]
    assert error["param"] == "documents" and error["message"].startswith("documents is too long")


@pytest.mark.parametrize("path", ["/v1/rerank", "/v1/score"])
async def test_a_model_without_the_templates_tokens_is_refused(path: str) -> None:
    body = {"query": "a", "documents": ["b"], "text_1": "a", "text_2": "b"}
    transport = httpx.ASGITransport(app=create_app(FakeEngine()))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        response = await client.post(path, json=body)
    assert response.status_code == 400
    assert "<|im_start|>" in response.json()["error"]["message"]


async def test_reranking_is_charged_to_the_key(engine: Engine) -> None:
    options = ServerOptions(api_key="secret", tokens_per_minute=300)
    app = create_app(engine, options)
    transport = httpx.ASGITransport(app=app)
    body = {"text_1": "a", "text_2": "b"}
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert (await client.post("/v1/score", json=body)).status_code == 401
        headers = {"authorization": "Bearer secret"}
        assert (await client.post("/v1/score", json=body, headers=headers)).status_code == 200
        assert (await client.post("/v1/score", json=body, headers=headers)).status_code == 429


async def test_embeddings_are_pooled_as_the_models_files_say(
    client: httpx.AsyncClient, reranker: tuple[Path, Any, tokenizers.Tokenizer]
) -> None:
    _, model, tokenizer = reranker
    ids = tokenizer.encode(QUERY).ids
    with torch.inference_mode():
        state = model.model(torch.tensor([ids])).last_hidden_state[0, -1]
    payload = (await client.post("/v1/embeddings", json={"input": QUERY})).json()
    wanted = (state / state.norm()).tolist()
    assert payload["data"][0]["embedding"] == pytest.approx(wanted, abs=1e-4)


def test_steps_and_poolings_that_do_not_run_are_refused(tmp_path: Path) -> None:
    assert embedding_settings(str(tmp_path)).pooling == "mean"
    dense = [{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]
    (tmp_path / "modules.json").write_text(json.dumps(dense))
    with pytest.raises(BadModel, match="Dense"):
        embedding_settings(str(tmp_path))
    pooling = [{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(pooling))
    (tmp_path / "1_Pooling").mkdir()
    config = {"pooling_mode_cls_token": True}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadModel, match="pooling_mode_cls_token"):
        embedding_settings(str(tmp_path))
