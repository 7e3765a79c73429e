"""Documents of a chat: where they stand in the prompt, which of them are left, and what of them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from ridgeline.config.server import ServerOptions
from ridgeline.records import Event, Token
from ridgeline.serve.app import create_app
from ridgeline.serve.context.passages import canonical_order, drop_duplicates, shingles
from ridgeline.serve.context.reduce import CONTEXT_HEADER
from ridgeline.serve.context.selection import (
    CompressedTexts,
    KeepUnit,
    ScoredUnit,
    select_units,
    split_units,
)
from tests.serve.fake_engine import FakeEngine

QUESTION = [{"role": "user", "content": "why?"}]


class LetterEngine(FakeEngine):
    """Predicts vowels with ease, and digits not at all."""

    async def _script(self, tokens: tuple[int, ...], sampling: Any, request_id: str) -> Any:
        async for event in super()._script(tokens, sampling, request_id):
            yield self._scored(event, tokens)

    def _scored(self, event: Event, tokens: Sequence[int]) -> Event:
        if not isinstance(event, Token) or event.prompt_logprobs is None:
            return event
        found = [
            None if known is None else replace(known, logprob=letter_logprob(chr(token)))
            for known, token in zip(event.prompt_logprobs, tokens, strict=True)
        ]
        return replace(event, prompt_logprobs=tuple(found))


def letter_logprob(letter: str) -> float:
    return -9.0 if letter.isdigit() else -0.1 if letter in "aeiou" else -1.0


def client_of(engine: FakeEngine) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_app(engine, ServerOptions()))
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")


async def send(
    engine: FakeEngine, documents: Sequence[Any], **fields: Any
) -> tuple[httpx.Response, str]:
    """The response, and the prompt of its answer."""
    body = {"model": "fake", "messages": QUESTION, "documents": [*documents], "max_tokens": 2}
    async with client_of(engine) as http:
        reply = await http.post("/v1/chat/completions", json=body | fields)
    prompts = ["".join(map(chr, tokens)) for tokens, *_ in engine.requests.values()]
    return reply, prompts[-1] if prompts else ""


async def test_documents_follow_the_system_message_of_a_template_without_them() -> None:
    documents = ["one", {"text": "two", "title": "Second"}]
    _, prompt = await send(FakeEngine(), documents)
    assert prompt == "<system>Documents:\n\none\n\nSecond\ntwo<user>why?<assistant>"
    messages = [{"role": "system", "content": "be brief"}, *QUESTION]
    _, prompt = await send(FakeEngine(), ["one"], messages=messages)
    assert prompt == "<system>be brief\n\nDocuments:\n\none<user>why?<assistant>"


async def test_template_that_takes_documents_gets_them() -> None:
    engine = FakeEngine()
    engine.tokenizer.template_uses_documents = True
    _, prompt = await send(engine, ["one", {"text": "two", "title": "Second", "url": "u"}])
    assert engine.tokenizer.variables["documents"] == [
        {"title": "", "text": "one"},
        {"title": "Second", "text": "two", "url": "u"},
    ]
    assert prompt == "<user>why?<assistant>"


async def test_duplicates_go_and_the_header_and_the_metrics_say_so() -> None:
    engine = FakeEngine()
    async with client_of(engine) as http:
        body = {
            "model": "fake",
            "messages": QUESTION,
            "documents": ["one  passage", "two", "one passage"],
            "context_reduction": {},
            "max_tokens": 2,
        }
        reply = await http.post("/v1/chat/completions", json=body)
        metrics = (await http.get("/metrics")).text
    assert reply.headers[CONTEXT_HEADER] == "documents=2/3; tokens=15/26"
    [(tokens, *_)] = engine.requests.values()
    assert "one  passage\n\ntwo<user>" in "".join(map(chr, tokens))
    assert 'ridgeline_context_documents_dropped_total{model_name="fake"} 1.0' in metrics
    assert 'ridgeline_context_tokens_saved_total{model_name="fake"} 11.0' in metrics


async def test_canonical_order_makes_the_prompts_of_equal_sets_equal() -> None:
    draw, prompts = random.Random(1), set()
    documents = [f"passage {i}" for i in range(6)]
    for _ in range(5):
        draw.shuffle(documents)
        _, prompt = await send(FakeEngine(), documents, context_reduction={"order": "canonical"})
        prompts.add(prompt)
    assert len(prompts) == 1


async def test_compression_keeps_what_the_model_cannot_predict() -> None:
    engine = LetterEngine()
    text = "Aeiou aeiou aeiou aeiou. Code 48291. Oui a oui."
    reduction = {"keep_ratio": 0.2}
    reply, prompt = await send(engine, [text], context_reduction=reduction)
    assert "Documents:\n\nCode 48291.<user>" in prompt
    assert reply.headers[CONTEXT_HEADER] == f"documents=1/1; tokens=11/{len(text)}"
    num_requests = len(engine.requests)
    async with client_of(engine) as http:
        body = {"model": "fake", "messages": QUESTION, "documents": [text], "max_tokens": 2}
        for _ in range(2):
            await http.post("/v1/chat/completions", json=body | {"context_reduction": reduction})
    assert len(engine.requests) == num_requests + 3, "scored once, answered twice"


async def test_long_document_is_scored_in_windows_of_the_context() -> None:
    engine = LetterEngine()
    text = " ".join(["aeiou."] * 90 + ["7391."])
    _, prompt = await send(engine, [text], context_reduction={"keep_ratio": 0.005})
    assert "Documents:\n\n7391." in prompt


@pytest.mark.parametrize(
    "fields",
    [
        {"context_reduction": {}, "documents": []},
        {"context_reduction": {"similarity": 0.5}},
        {"context_reduction": {"keep_unit": "word"}},
        {"context_reduction": {"keep_ratio": 0}},
        {"context_reduction": {"order": "random"}},
        {"context_reduction": {"unknown": 1}},
        {"documents": ["x"] * 257},
        {"documents": [{"title": "no text"}]},
    ],
    ids=lambda fields: str(fields)[:50],
)
async def test_reductions_without_effect_are_refused(fields: dict[str, Any]) -> None:
    engine = FakeEngine()
    reply, _ = await send(engine, **{"documents": ["x"], **fields})
    assert reply.status_code == 400, reply.text
    assert not engine.requests


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/v1/messages"])
async def test_documents_are_refused_outside_chats(path: str) -> None:
    prompt = {
        "/v1/completions": {"prompt": "x", "max_tokens": 2},
        "/v1/responses": {"input": "x"},
        "/v1/messages": {"messages": QUESTION, "max_tokens": 2},
    }[path]
    async with client_of(FakeEngine()) as http:
        reply = await http.post(path, json={"model": "fake", "documents": ["x"], **prompt})
    assert reply.status_code == 400
    assert "documents" in reply.text


def random_texts(draw: random.Random) -> list[str]:
    words = ["a", "b", "c", "d"]
    texts = [" ".join(draw.choices(words, k=draw.randint(1, 12))) for _ in range(12)]
    return texts + [text.replace(" ", "  ", 1) for text in draw.sample(texts, 3)]


@pytest.mark.parametrize("similarity", [1.0, 0.8, 0.5])
def test_dropped_passages_equal_those_of_a_comparison_of_every_pair(similarity: float) -> None:
    for seed in range(40):
        texts = random_texts(random.Random(seed))
        kept: list[int] = []
        for index, text in enumerate(texts):
            own = shingles(text)
            is_new = all(
                text.split() != texts[k].split()
                and (
                    similarity == 1
                    or len(own & shingles(texts[k])) / len(own | shingles(texts[k])) < similarity
                )
                for k in kept
            )
            if is_new:
                kept.append(index)
        assert drop_duplicates(texts, similarity) == kept


def test_order_depends_on_the_texts_alone() -> None:
    texts = [f"text {i}" for i in range(20)]
    expected = [texts[i] for i in canonical_order(texts)]
    random.Random(0).shuffle(texts)
    assert [texts[i] for i in canonical_order(texts)] == expected


@pytest.mark.parametrize("unit", ["sentence", "word"])
def test_units_join_to_the_text(unit: KeepUnit) -> None:
    for text in ("", "One. Two!  Three?\n\nFour 3.14 is.", " a", "no end", "\n"):
        assert "".join(split_units(text, unit)) == text
    assert split_units("One. Two 3.1!\nThree", "sentence") == ["One.", " Two 3.1!", "\nThree"]


def test_kept_units_are_the_most_informative_that_reach_the_ratio() -> None:
    draw = random.Random(2)
    for _ in range(50):
        units = [
            ScoredUnit(tuple(draw.choice([-1.0, -2.0, -5.0]) for _ in range(draw.randint(1, 5))))
            for _ in range(8)
        ]
        ratio = draw.random()
        kept = select_units(units, ratio)
        total = sum(unit.num_tokens for unit in units)
        num_kept = sum(units[i].num_tokens for i in kept)
        assert num_kept >= ratio * total
        least = min(kept, key=lambda i: (units[i].information, -i))
        assert num_kept - units[least].num_tokens < ratio * total, "one unit fewer is too few"
        for other in set(range(8)) - set(kept):
            assert units[other].information <= units[least].information
    assert math.isinf(ScoredUnit((None,)).information)


def test_memory_of_compressed_texts_is_bounded() -> None:
    memory = CompressedTexts(1_000)
    for i in range(20):
        memory.store(("t", 0.5, "word", b"%d" % i), "x" * 100)
    assert memory.find(("t", 0.5, "word", b"0")) is None
    assert memory.find(("t", 0.5, "word", b"19")) == "x" * 100
    assert memory.find(("u", 0.5, "word", b"19")) is None
