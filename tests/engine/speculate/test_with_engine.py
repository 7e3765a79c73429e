"""Speculation through the engine's face: nothing of it shows but the time."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest

from ridgeline import Engine, Sampling
from ridgeline.engine.completion import Completion
from ridgeline.engine.sampling import sample
from ridgeline.engine.speculate.drafters import sampling as guess
from ridgeline.engine.tokenization import HfTokenizer
from tests.engine.tokenization.test_stop_against_reference import Answer, Case, expected

PROMPTS = [
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n",
    "for name in names:\n    print(name)\nfor name in names:\n",
    "import os\n",
]
GREEDY = Sampling(temperature=0.0, max_tokens=48, ignore_eos=True, logprobs=2)
SEEDED = Sampling(
    temperature=0.6, seed=11, max_tokens=48, ignore_eos=True, repetition_penalty=1.05, logprobs=1
)
CONFIGS: list[dict[str, Any]] = [
    {"method": "ngram", "num_speculative_tokens": 5},
    {"method": "lookahead", "num_speculative_tokens": 6},
    {"method": "draft_model", "model": "demo-draft", "num_speculative_tokens": 3},
    {"method": "self", "num_speculative_tokens": 3},
    {"method": "auto", "model": "demo-draft", "num_speculative_tokens": 4},
]


@pytest.fixture(scope="module")
def plain() -> Iterator[Engine]:
    with Engine.open("demo", kv_cache_memory_bytes=32 << 20, num_threads=1) as contexts:
        yield contexts


@pytest.fixture(scope="module", params=CONFIGS, ids=lambda config: config["method"])
def drafting(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine.open(
        "demo",
        kv_cache_memory_bytes=32 << 20,
        num_threads=1,
        speculative_config=request.param,
    ) as contexts:
        yield contexts


def same(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    """All that a client sees; log-probabilities up to rounding."""
    for a, b in zip(found, expected, strict=True):
        assert a.usage.completion_tokens == b.usage.completion_tokens
        for one, other in zip(a.answers, b.answers, strict=True):
            assert len(one.logprobs) == len(other.logprobs)
            for x, y in zip(one.logprobs, other.logprobs, strict=True):
                assert (x.token, x.rank) == (y.token, y.rank)
                assert x.logprob == pytest.approx(y.logprob, abs=1e-3)
            assert msgspec.structs.replace(one, logprobs=()) == msgspec.structs.replace(
                other, logprobs=()
            )


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_answers_are_those_of_plain_decoding(
    plain: Engine, drafting: Engine, sampling: Sampling
) -> None:
    before = drafting.counters()
    same(drafting.generate(PROMPTS, sampling), plain.generate(PROMPTS, sampling))
    after = drafting.counters()
    gained = {name: after[name] - before.get(name, 0.0) for name in after}
    accepted = gained["spec_decode_num_accepted_tokens"]
    assert accepted > 5
    assert accepted <= gained["spec_decode_num_draft_tokens"]
    assert accepted == sum(n for name, n in gained.items() if "per_pos/" in name)
    assert gained["generation_tokens"] == 3 * 48
    assert gained["num_steps"] <= 48


@pytest.mark.slow
def test_rejected_drafts_change_no_token(
    plain: Engine, drafting: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third choice of a guess has no finite logit, in the middle of whatever was begun."""
    calls = itertools.count(1)

    def failing(*args: Any) -> Any:
        if next(calls) % 3 == 0:
            raise ArithmeticError("row 0: no token can be chosen")
        return sample(*args)

    monkeypatch.setattr(guess, "sample", failing)
    penalised = msgspec.structs.replace(GREEDY, repetition_penalty=1.05)
    same(drafting.generate(PROMPTS, penalised), plain.generate(PROMPTS, penalised))
    assert drafting.is_healthy()
    speculation = drafting.resolved.speculative_config
    assert speculation is not None
    computes = speculation.method in ("draft_model", "self")  # auto may find drafts in the text
    assert not computes or next(calls) > 3


@pytest.mark.slow
@pytest.mark.parametrize("include", [False, True])
def test_stop_string_inside_a_draft_ends_the_answer(
    plain: Engine, drafting: Engine, include: bool
) -> None:
    """At every place of the answer: text, tokens, usage and reason are those of plain decoding."""
    [free] = plain.generate(PROMPTS[:1], GREEDY)
    samplings = [
        Sampling(
            temperature=0.0,
            max_tokens=48,
            ignore_eos=True,
            stop=(free.text[at : at + 3],),
            include_stop_str_in_output=include,
            min_tokens=at % 5,
        )
        for at in range(0, len(free.text) - 3, 7)
    ]
    prompts = PROMPTS[:1] * len(samplings)
    same(drafting.generate(prompts, samplings), plain.generate(prompts, samplings))


@pytest.mark.slow
def test_stop_tokens_and_max_tokens_end_drafted_answers(plain: Engine, drafting: Engine) -> None:
    """The end of an answer inside a draft: a stop token, max_tokens, several choices."""
    [free] = plain.generate(PROMPTS[:1], GREEDY)
    samplings = [
        Sampling(temperature=0.0, max_tokens=at, stop_token_ids=(free.tokens[at],), n=1 + at % 2)
        for at in range(1, 24)
    ]
    prompts = PROMPTS[:1] * len(samplings)
    same(drafting.generate(prompts, samplings), plain.generate(prompts, samplings))


def random_stops(rng: random.Random, texts: Sequence[str]) -> tuple[str, ...]:
    """Pieces of the texts, wherever tokens begin and end, and one that is in none of them."""
    stops = ["\x01"]
    for text in rng.choices([text for text in texts if text], k=rng.randint(1, 3)):
        start = rng.randrange(min(len(text), 60))
        stops.append(text[start : start + rng.randint(1, 12)])
    return tuple(dict.fromkeys(stops))


@pytest.mark.slow
def test_drafted_answers_are_cut_where_the_first_stop_string_ends(
    plain: Engine, drafting: Engine
) -> None:
    """Against whole answers of plain decoding, which are decoded and cut afterwards."""
    rng, tokenizer = random.Random(5), plain.tokenizer
    assert isinstance(tokenizer, HfTokenizer)
    whole = [
        Sampling(
            temperature=rng.choice((0.0, 0.5, 1.0)),
            seed=seed,
            n=rng.choice((1, 2, 3)),
            max_tokens=40,
            min_tokens=rng.choice((0, 0, 3, 12)),
            ignore_eos=True,
            skip_special_tokens=rng.random() < 0.7,
            include_stop_str_in_output=rng.random() < 0.4,
        )
        for seed in range(36)
    ]
    prompts = [rng.choice(PROMPTS) for _ in whole]
    free = plain.generate(prompts, whole)
    stopping = [
        msgspec.structs.replace(own, stop=random_stops(rng, [each.text for each in one.answers]))
        for own, one in zip(whole, free, strict=True)
    ]
    before = drafting.counters().get("spec_decode_num_accepted_tokens", 0.0)
    found = drafting.generate(prompts, stopping)
    num_stopped = 0
    for prompt, sampling, one, other in zip(prompts, stopping, free, found, strict=True):
        choices = tuple(answer.tokens for answer in one.answers)
        case = Case(tokenizer, tuple(tokenizer.encode(prompt)), choices, -1, sampling)
        wanted = [expected(case, tokens) for tokens in choices]
        assert [
            Answer(own.text, own.finish_reason, own.stop_reason, len(own.tokens))
            for own in other.answers
        ] == wanted, sampling
        num_stopped += sum(answer.reason == "stop" for answer in wanted)
    assert num_stopped > 30
    assert drafting.counters()["spec_decode_num_accepted_tokens"] - before > 30
