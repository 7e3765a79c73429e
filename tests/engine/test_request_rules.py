"""Bad words, thinking budgets and predicted outputs with the demo model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ridgeline import Engine, Sampling
from ridgeline.errors import BadInput
from ridgeline.records import Event, Finished, ThinkingMarks, Token

PROMPT = "def add(a, b):\n    return"
GREEDY = {"temperature": 0.0, "max_tokens": 32, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.open("demo", kv_cache_memory_bytes=32 << 20, num_threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def drafting() -> Iterator[Engine]:
    config = {"method": "ngram", "num_speculative_tokens": 4}
    with Engine.open(
        "demo", kv_cache_memory_bytes=32 << 20, num_threads=1, speculative_config=config
    ) as opened:
        yield opened


def test_bad_words_never_appear(engine: Engine, drafting: Engine) -> None:
    plain = engine.generate([PROMPT], Sampling(**GREEDY))[0]
    words = tuple({plain.text[:2].strip() or "a", "return", "def"})
    sampling = Sampling(**GREEDY, bad_words=words)
    output = engine.generate([PROMPT], sampling)[0]
    assert output.tokens != plain.tokens
    spelled = [engine.tokenizer.encode(w, add_special_tokens=False) for w in words]
    assert not any(_contains(output.tokens, word) for word in spelled)
    assert drafting.generate([PROMPT], sampling)[0].tokens == output.tokens


def _contains(tokens: tuple[int, ...], word: list[int]) -> bool:
    return any(list(tokens[i : i + len(word)]) == word for i in range(len(tokens)))


@pytest.mark.parametrize("seed", [None, 5])
def test_thinking_ends_when_its_budget_is_spent(
    engine: Engine, drafting: Engine, seed: int | None
) -> None:
    marks = ThinkingMarks("<think>", "</think>", "\nEnough.</think>")
    fields = GREEDY if seed is None else {**GREEDY, "temperature": 1.0, "seed": seed}
    sampling = Sampling(**fields, thinking_token_budget=6, thinking_marks=marks)
    prompt = f"{PROMPT}<think>"
    tokens = engine.generate([prompt], sampling)[0].tokens
    forced = engine.tokenizer.encode(marks.forced_end, add_special_tokens=False)
    assert list(tokens[6 : 6 + len(forced)]) == forced
    free = engine.generate([prompt], Sampling(**fields))[0].tokens
    assert tokens[:6] == free[:6]
    assert drafting.generate([prompt], sampling)[0].tokens == tokens


def test_budget_with_structured_output_is_refused() -> None:
    with pytest.raises(BadInput, match="thinking_token_budget cannot be combined"):
        Sampling(thinking_token_budget=3, allowed_token_ids=(1,))


async def outcome(engine: Engine, sampling: Sampling, prediction: tuple[int, ...]) -> list[Event]:
    return [e async for e in engine.stream(PROMPT, sampling, prediction=prediction)]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(**GREEDY),
        Sampling(**{**GREEDY, "temperature": 0.8}, seed=3),
        Sampling(**{**GREEDY, "temperature": 0.8}, seed=3, n=2, repetition_penalty=1.2),
        Sampling(**GREEDY, bad_words=("return",), logprobs=2),
    ],
)
async def test_prediction_changes_no_token_and_is_counted(
    engine: Engine, drafting: Engine, sampling: Sampling
) -> None:
    plain = engine.generate([PROMPT], sampling)[0]
    own = plain.answers[0].tokens
    edited = (*own[:10], 3, 4, *own[12:])
    for served in (engine, drafting):
        before = served.counters()["spec_decode_num_accepted_tokens"]
        events = await outcome(served, sampling, edited)
        for answer in plain.answers:
            tokens = [e.token for e in events if isinstance(e, Token) and e.index == answer.index]
            assert tuple(tokens) == answer.tokens
        usages = [e.usage for e in events if isinstance(e, Finished)]
        accepted = [usage.accepted_prediction_tokens for usage in usages]
        assert all(usage.rejected_prediction_tokens is not None for usage in usages)
        assert accepted[0] is not None and accepted[0] >= 16
        after = served.counters()["spec_decode_num_accepted_tokens"]
        assert after - before == sum(n or 0 for n in accepted)


async def test_useless_prediction_costs_few_drafts(engine: Engine) -> None:
    sampling = Sampling(**GREEDY)
    plain = engine.generate([PROMPT], sampling)[0].tokens
    wrong = tuple((token + 1) % 200 for token in plain) * 3
    events = await outcome(engine, sampling, wrong)
    assert tuple(e.token for e in events if isinstance(e, Token)) == plain
    (usage,) = [e.usage for e in events if isinstance(e, Finished)]
    assert usage.accepted_prediction_tokens is not None
