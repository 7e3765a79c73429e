"""Answers to similar questions: only where everything else of the request is equal, and only with a
threshold that holds on pairs of known meaning."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
import pytest

from ridgeline.config.server import ServerOptions
from ridgeline.errors import BadInput, CannotRun
from ridgeline.records import Finished, Token, Usage
from ridgeline.serve.app import create_app
from ridgeline.serve.generation.resume import IDENTITY_HEADER, RESUMABLE_HEADER
from ridgeline.serve.response_cache.cache import ResponseCache
from ridgeline.serve.response_cache.semantic import ScopedVector, SemanticIndex
from ridgeline.serve.service import RESPONSE_CACHE_HEADER
from ridgeline.similarity import (
    STEP,
    QuestionPair,
    SimilarityThreshold,
    calibrate,
    read_pairs,
)
from ridgeline.stats import proportion_upper_bound
from tests.serve.fake_engine import FakeEngine

UPPER, LOWER = "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "abcdefghijklmnopqrstuvwxyz"
PAIRS = [
    *(QuestionPair(f"{c} one", f"{c} two", True) for c in UPPER),
    *(QuestionPair(f"{UPPER[i % 26]} three", f"{LOWER[i % 26]} {i}", False) for i in range(60)),
]


def meaning(text: str) -> list[float]:
    """Texts that begin with the same letter mean nearly the same; all share a large part."""
    vector = [0.0] * 128
    vector[ord(text[0])] = 1.0
    vector[ord(text[-1]) % 32] += 0.1
    vector[127] = 50.0
    return vector


class MeaningfulEngine(FakeEngine):
    """Embeds texts by their first letter."""

    num_embedded = 0

    def embed(
        self, tokens: Sequence[int], pooling: Literal["mean", "last"]
    ) -> Future[Sequence[float]]:
        self.num_embedded += 1
        future: Future[Sequence[float]] = Future()
        future.set_result(meaning("".join(map(chr, tokens))))
        return future


@pytest.fixture
def pairs_file(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.jsonl"
    lines = [{"a": pair.a, "b": pair.b, "equal": pair.equal} for pair in PAIRS]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def client_of(engine: FakeEngine, pairs: Path, **options: Any) -> httpx.AsyncClient:
    own = ServerOptions(response_cache_size=1 << 20, semantic_cache_pairs=str(pairs), **options)
    transport = httpx.ASGITransport(create_app(engine, own), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")


def chat(text: str, **changes: Any) -> dict[str, Any]:
    system = {"role": "system", "content": changes.pop("system", "be brief")}
    messages = [system, {"role": "user", "content": text}]
    return {"model": "fake", "max_tokens": 6, "temperature": 0, "messages": messages} | changes


async def results(http: httpx.AsyncClient, *bodies: dict[str, Any]) -> list[str]:
    replies = [await http.post("/v1/chat/completions", json=body) for body in bodies]
    assert all(reply.status_code == 200 for reply in replies), replies[-1].text
    return [reply.headers.get(RESPONSE_CACHE_HEADER, "none").split(";")[0] for reply in replies]


async def test_similar_question_gets_the_stored_answer_with_its_similarity(
    pairs_file: Path,
) -> None:
    engine = MeaningfulEngine()
    async with client_of(engine, pairs_file) as http:
        bodies = chat("X first"), chat("X second", stream=True), chat("X first"), chat("Y first")
        assert await results(http, *bodies) == ["miss", "semantic-hit", "hit", "miss"]
        num_embedded = engine.num_embedded
        assert await results(http, chat("X first")) == ["hit"]
        assert engine.num_embedded == num_embedded, "an exact hit needs no embedding"
        reply = await http.post("/v1/chat/completions", json=chat("X third"))
        metrics = (await http.get("/metrics")).text
    assert len(engine.requests) == 2
    fields = dict(
        part.split("=", 1) for part in reply.headers[RESPONSE_CACHE_HEADER].split("; ")[1:]
    )
    assert float(fields["threshold"]) <= float(fields["similarity"]) <= 1
    assert 0.04 < float(fields["false-hits<"]) < 0.05
    assert 'result="semantic_hit"} 2.0' in metrics
    assert "ridgeline_semantic_cache_threshold{" in metrics
    assert "ridgeline_semantic_cache_false_hit_bound{" in metrics


async def test_no_gateway_continues_the_answer_of_a_similar_question(pairs_file: Path) -> None:
    async with client_of(MeaningfulEngine(), pairs_file) as http:
        await results(http, chat("X first"))
        for text, result in (("X first", "hit"), ("X second", "semantic-hit")):
            body, headers = chat(text, stream=True), {RESUMABLE_HEADER: "1"}
            reply = await http.post("/v1/chat/completions", json=body, headers=headers)
            assert reply.headers[RESPONSE_CACHE_HEADER].startswith(result)
            assert (IDENTITY_HEADER in reply.headers) == (result == "hit")
            assert (b"\n\n: " in reply.content) == (result == "hit")


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    "changes",
    [
        {"system": "be long"},
        {"max_tokens": 5},
        {"cache_salt": "other"},
        {"temperature": 1.0},
        {"stop": ["x"]},
        {"tools": [TOOL], "tool_choice": "none"},
        {"response_format": {"type": "json_object"}},
        {"logprobs": True},
        {"chat_template_kwargs": {"style": "new"}},
        {"cache_control": {"type": "no_store"}},
    ],
    ids=str,
)
async def test_other_requests_are_computed(changes: dict[str, Any], pairs_file: Path) -> None:
    async with client_of(MeaningfulEngine(), pairs_file) as http:
        first, second = await results(http, chat("X first"), chat("X second", **changes))
    assert first == "miss"
    assert second in ("miss", "none")


async def test_answer_of_a_similar_question_is_not_stored_under_another(pairs_file: Path) -> None:
    async with client_of(MeaningfulEngine(), pairs_file) as http:
        assert await results(http, chat("X a"), *[chat("X b")] * 2) == [
            "miss",
            "semantic-hit",
            "semantic-hit",
        ]


async def test_earlier_messages_must_be_equal(pairs_file: Path) -> None:
    def turns(first: str, last: str) -> dict[str, Any]:
        body = chat(last)
        history = [{"role": "user", "content": first}, {"role": "assistant", "content": "yes"}]
        return {**body, "messages": [*history, body["messages"][-1]]}

    async with client_of(MeaningfulEngine(), pairs_file) as http:
        bodies = turns("A one", "X a"), turns("A two", "X b"), turns("A one", "X c")
        assert await results(http, *bodies) == ["miss", "miss", "semantic-hit"]


def answer(size: int) -> list[list[Any]]:
    usage = Usage(prompt_tokens=1, cached_tokens=0, completion_tokens=1)
    end = Finished(request_id="r", index=0, reason="stop", at_s=0.0, usage=usage)
    return [[Token(request_id="r", index=0, token=1, text="x" * size, at_s=0.0), end]]


def place(angle: float, scope: bytes = b"s") -> ScopedVector:
    return ScopedVector(scope, np.array([np.cos(angle), np.sin(angle)], np.float32))


def index_with(threshold: float) -> SemanticIndex:
    return SemanticIndex(
        SimilarityThreshold(
            threshold=threshold,
            num_equal=1,
            num_hits=1,
            num_mistaken=0,
            num_different=60,
            num_false_hits=0,
            false_hit_bound=0.05,
            centre=(0.0, 0.0),
        )
    )


def test_nearest_answer_of_the_scope_is_found_as_by_a_scan() -> None:
    draw = random.Random(3)
    cache = ResponseCache(1 << 20, 60.0, lambda: 0.0, index_with(0.97))
    stored: dict[bytes, tuple[bytes, float]] = {}
    for i in range(60):
        key, scope, angle = b"%d" % i, draw.choice([b"s", b"t"]), draw.uniform(0, 6)
        cache.store(key, "", answer(10), place(angle, scope))
        stored[key] = scope, angle
    for _ in range(100):
        scope, angle = draw.choice([b"s", b"t", b"u"]), draw.uniform(0, 6.2)
        found = cache.find(b"none", place(angle, scope))
        cosines = [np.cos(angle - own) for own_scope, own in stored.values() if own_scope == scope]
        best = max(cosines, default=-1)
        assert (found is not None) == (best >= 0.97)
        if found is not None:
            assert found.similarity == pytest.approx(best, abs=1e-5)


def test_expired_evicted_and_forgotten_answers_are_not_found() -> None:
    now = [0.0]
    index = index_with(0.9)
    cache = ResponseCache(8_000, 60.0, lambda: now[0], index)
    cache.store(b"a", "t", answer(500), place(0.0))
    assert cache.find(b"x", place(0.1)) is not None
    now[0] = 61.0
    assert cache.find(b"x", place(0.1)) is None
    assert (len(index), cache.num_bytes) == (0, 0)
    for i in range(20):
        cache.store(b"%d" % i, "t", answer(500), place(float(i)))
        assert cache.num_bytes <= 4_000
    assert len(index) == len(cache) < 6
    cache.forget("t")
    assert len(index) == 0


def test_calibrated_threshold_equals_that_of_a_scan_of_every_pair() -> None:
    draw = random.Random(5)
    pairs, vectors = [], {}
    for i in range(120):
        base = [draw.gauss(0, 1) for _ in range(4)]
        noise = 0.15 if i < 60 else 2.0
        vectors[f"a{i}"] = base
        vectors[f"b{i}"] = [value + draw.gauss(0, noise) for value in base]
        pairs.append(QuestionPair(f"a{i}", f"b{i}", i < 60))
    limit = 0.3
    calibration = calibrate(pairs, vectors.__getitem__, limit)
    centre = np.mean([vectors[f"{side}{i}"] for i in range(60) for side in "ab"], axis=0)

    def cosine(a: str, b: str) -> float:
        x, y = np.array(vectors[a]) - centre, np.array(vectors[b]) - centre
        return float(x @ y / np.sqrt((x @ x) * (y @ y)))

    nearest = [max(cosine(f"b{i}", f"a{j}") for j in range(120)) for i in range(60, 120)]
    mistaken = []
    for i in range(60):
        other = max(cosine(f"b{i}", f"a{j}") for j in range(120) if j != i)
        mistaken += [other] if other > cosine(f"b{i}", f"a{i}") else []
    threshold = 1.0
    while True:
        num_false = sum(s >= threshold - STEP for s in nearest + mistaken)
        rate_bound = proportion_upper_bound(num_false, 60)
        if rate_bound > limit:
            break
        threshold -= STEP
    assert calibration.threshold == pytest.approx(threshold)
    assert calibration.num_false_hits == sum(s >= threshold for s in nearest)
    assert calibration.num_mistaken == sum(s >= threshold for s in mistaken)
    assert calibration.false_hit_bound <= limit


def test_paraphrases_that_get_the_answer_to_another_question_are_false_hits() -> None:
    """All questions of one form lie together, far from the different ones."""
    turn = math.pi / 200
    vectors = {f"d{i}": [-9.0, float(i), 1.0] for i in range(120)}
    pairs = [QuestionPair(f"d{i}", f"d{i + 1}", False) for i in range(0, 120, 2)]
    for i in range(20):  # each second question is nearer to the next pair's first one
        for name, at in (("a", i), ("b", i + 0.8)):
            vectors[f"{name}{i}"] = [9.0 + math.cos(at * turn), math.sin(at * turn), 0.0]
        pairs.append(QuestionPair(f"a{i}", f"b{i}", True))
    with pytest.raises(CannotRun, match="would never hit"):
        calibrate(pairs, vectors.__getitem__, 0.05)


def test_too_few_pairs_are_refused() -> None:
    with pytest.raises(BadInput, match="59 different"):
        calibrate(PAIRS[:70], meaning, 0.05)


def test_embeddings_that_tell_nothing_apart_are_refused(pairs_file: Path) -> None:
    with pytest.raises(CannotRun, match="would never hit"):
        calibrate(PAIRS, lambda text: [float(text[0].isupper()), float(len(text)), 1.0], 0.05)
    with pytest.raises(CannotRun, match="would never hit"):
        client_of(FakeEngine(), pairs_file)


def test_unreadable_pair_is_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"a": "x", "b": "y", "equal": true}\n{"a": "x"}\n')
    with pytest.raises(BadInput, match="line 2"):
        read_pairs(path)


@pytest.mark.parametrize(("successes", "total"), [(0, 59), (1, 60), (7, 20), (20, 20)])
def test_upper_bound_is_the_rate_that_makes_the_count_unlikely(successes: int, total: int) -> None:
    from scipy.stats import binom

    bound = proportion_upper_bound(successes, total)
    if successes == total:
        assert bound == 1
    else:
        assert binom.cdf(successes, total, bound) == pytest.approx(0.05)
