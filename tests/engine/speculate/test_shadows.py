"""What is learnt from guesses, verified or not, is how good their kinds are."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

import ridgeline._native as _native
from ridgeline.engine.scheduler.speculation.base import DraftContext, StepCapacity
from ridgeline.engine.speculate.depth_control.lookup_accuracy import LookupAccuracy, prior
from ridgeline.engine.speculate.depth_control.plan import MIN_CHANCE, DraftingCosts, best_plan
from ridgeline.engine.speculate.depth_control.step_cost import DraftCost, StepTimeCurve
from ridgeline.engine.speculate.drafters.base import (
    AGREES,
    DIFFERS,
    KINDS,
    NO_GUESS,
    LookupGuess,
    kind_of,
)
from ridgeline.engine.speculate.drafters.combined import Combined, Lookups
from ridgeline.records import Sampling
from tests.engine.speculate.slow_lookup import SlowShadows, slow_depths


def contexts(tokens: list[int], seq_id: int = 0) -> DraftContext:
    return DraftContext(seq_id, tokens, 1, "", Sampling(), 0, 99)


def guess(tokens: Sequence[int], *kinds: int) -> LookupGuess:
    return LookupGuess(tuple(tokens), (kinds * len(tokens))[: len(tokens)])


def test_shadow_guesses_are_judged_by_plain_decoding() -> None:
    """Of each kind it is learnt how often it was right where the tokens before it were."""
    shadows, rng = LookupAccuracy(), random.Random(4)
    tokens, good, bad = [0], kind_of(8), kind_of(8, DIFFERS)
    for _ in range(3000):
        right = [len(tokens) + i for i in range(3)]
        shadows.compare(0, tokens)
        chances = (0.9, 0.3, 0.9)
        said = [
            t if rng.random() < chance else -1 for t, chance in zip(right, chances, strict=True)
        ]
        shadows.keep(contexts(tokens), guess(said, good, bad, good))
        tokens += range(len(tokens), len(tokens) + rng.randint(1, 3))
    assert shadows.chance(good) == pytest.approx(0.9, abs=0.12)
    assert shadows.chance(bad) == pytest.approx(0.3, abs=0.15)
    other = kind_of(3)
    assert shadows.chance(other) == prior(other), "of other kinds nothing was learnt"
    alive = shadows.survivals(7, guess((1, 2, 3), good, bad, good))
    a, b = shadows.chance(good), shadows.chance(bad)
    assert alive == pytest.approx([a, a * b, a * b * a])


def test_outcome_of_a_guess_is_counted_once() -> None:
    shadows, kind = LookupAccuracy(), kind_of(8)
    shadows.keep(contexts([1, 2]), guess((3, 4, 5), kind))
    shadows.compare(0, [1, 2])
    assert shadows.chance(kind) == prior(kind) and not shadows._record.num_pending
    shadows.keep(contexts([1, 2]), guess((3, 4, 5), kind))
    shadows.compare(0, [1, 2, 3, 9])
    shadows.compare(0, [1, 2, 3, 9, 5])
    assert shadows._record.counts(kind) == (pytest.approx(0.99), pytest.approx(1.99))
    shadows.keep(contexts([1], 7), guess((3,), kind))
    shadows.keep(contexts([1], 7), NO_GUESS)
    assert not shadows._record.num_pending
    shadows.keep(contexts([1], 7), guess((3,), kind))
    shadows.forget(7)
    assert not shadows._record.num_pending


def test_sequence_starts_with_the_global_acceptance() -> None:
    shadows, kind = LookupAccuracy(), kind_of(8)
    for _ in range(40):
        shadows.keep(contexts([1]), guess((2, 3), kind))
        shadows.compare(0, [1, 2, 3])
    easy = shadows.survivals(5, guess((2,), kind))
    assert easy == [shadows.chance(kind)] and easy[0] > 0.95
    for _ in range(4):
        shadows.keep(contexts([1], 5), guess((2, 3), kind))
        shadows.compare(5, [1, 9])
    assert (
        shadows.survivals(5, guess((2,), kind))[0]
        < 0.6
        < shadows.survivals(6, guess((2,), kind))[0]
    )


def test_recorded_acceptance_equals_the_reference() -> None:
    rng, shadows, slow = random.Random(11), LookupAccuracy(), SlowShadows()
    pending = dict[int, tuple[int, LookupGuess]]()
    texts = {i: [rng.randrange(3) for _ in range(4)] for i in range(5)}
    for _ in range(2000):
        seq_id = rng.randrange(5)
        text = texts[seq_id]
        shadows.compare(seq_id, text)
        start, said = pending.pop(seq_id, (0, NO_GUESS))
        if len(text) > start:
            slow.judge(seq_id, said, text[start:])
        num, kinds = rng.randint(0, 6), [rng.randrange(56) for _ in range(6)]
        made = LookupGuess(tuple(rng.randrange(3) for _ in range(num)), tuple(kinds[:num]))
        assert shadows.survivals(seq_id, made) == pytest.approx(slow.survivals(seq_id, made.kinds))
        shadows.keep(contexts(text, seq_id), made)
        pending[seq_id] = len(text), made
        text += [rng.randrange(3) for _ in range(rng.randint(0, 7))]
        if rng.random() < 0.02:
            shadows.forget(seq_id)
            pending.pop(seq_id)
            slow.own.pop(seq_id, None)


def test_priors_follow_the_evidence() -> None:
    for own in (False, True):
        for history in range(4):
            rising = [prior(kind_of(n, history, own=own)) for n in (1, 2, 4, 8, 16, 32)]
            assert rising == sorted(rising) and rising[0] > 0 and rising[-1] < 1
        assert prior(kind_of(4, DIFFERS, own=own)) < prior(kind_of(4, AGREES, own=own))


class _Says:
    """A lookup that always says the same."""

    def __init__(self, name: str, guess: LookupGuess) -> None:
        self.name, self.guess, self.forgotten = name, guess, 0

    def look(self, context: DraftContext, most: int) -> LookupGuess:
        return LookupGuess(self.guess.tokens[:most], self.guess.kinds[:most])

    def forget(self, seq_id: int, tokens: object, tenant: str) -> None:
        self.forgotten += 1


class _Computes:
    name = "computes"

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def draft(self, contexts: list[DraftContext], depths: list[int]) -> list[tuple[int, ...]]:
        self.asked.append(list(depths))
        return [(7,) * depth for depth in depths]

    def forget(self, seq_id: int, tokens: object, tenant: str) -> None:
        pass


def test_longest_evidence_decides_with_the_model_as_fallback() -> None:
    short, long = _Says("short", guess((1, 2), 2)), _Says("long", guess((3, 4), 5))
    both = Lookups([short, long])
    assert both.look(contexts([0]), 9) == ((3, 4), (KINDS + 5,) * 2)
    long.guess = NO_GUESS
    assert both.look(contexts([0]), 9).tokens == (1, 2)
    model = _Computes()
    combined = Combined(both, model)
    assert combined.draft([contexts([0])], [1]) == [(1,)]
    short.guess = NO_GUESS
    assert combined.draft([contexts([0])], [3]) == [(7, 7, 7)]
    assert model.asked == [[0], [3]], "asked in every step, so that what it drew before is dropped"
    combined.forget(0, [], "")
    assert short.forgotten == long.forgotten == 1


def test_plan_is_the_best_of_all_plans() -> None:
    """Against every combination of depths; nearly, where drafting costs by the deepest draft."""
    rng = random.Random(9)
    for turn in range(60):
        grid = {(2, rows): 1.0 + rng.random() * rows for rows in (2, 3, 4, 5, 6, 8)}
        costs = DraftingCosts(
            StepTimeCurve(grid), DraftCost([(1, 1, 0.2), (1, 4, 0.5), (8, 1, 0.6), (8, 4, 2)])
        )
        survivals = [sorted((rng.random() for _ in range(3)), reverse=True) for _ in range(2)]
        computed = [turn % 2 == 1 and rng.random() < 0.7 for _ in range(2)]
        room = StepCapacity(2, 2, 6)
        found = best_plan(survivals, computed, room, costs)
        rates = [_rate([a, b], survivals, computed, costs) for a in range(4) for b in range(4)]
        assert found.rate == pytest.approx(_rate(found.depths, survivals, computed, costs))
        assert found.rate >= (0.9 if any(computed) else 0.999) * max(rates)


def test_depths_equal_those_of_the_reference() -> None:
    rng = random.Random(5)
    for _ in range(300):
        survivals = [
            sorted(rng.choice((0.01, 0.3, rng.random())) for _ in range(rng.randint(0, 9)))[::-1]
            for _ in range(rng.randint(1, 9))
        ]
        num, num_free = len(survivals), rng.randint(0, 40)
        computed = [rng.random() < 0.3 for _ in survivals]
        drafting_s = sorted(rng.random() for _ in range(9)) if any(computed) else []
        line = sorted(1 + 4 * rng.random() for _ in range(81))
        plain_s = 0.9 * line[0]
        found = _native.choose_depths(
            survivals, computed, num_free, num, plain_s, line, drafting_s, MIN_CHANCE
        )
        slow = slow_depths(survivals, computed, num_free, (num, plain_s), line, drafting_s)
        assert found[0] == slow[0]
        assert found[1:] == pytest.approx(slow[1:])
    with pytest.raises(ValueError, match="shorter"):
        _native.choose_depths([[0.9, 0.8]], [False], 5, 1, 1.0, [1.0], [], MIN_CHANCE)


def _rate(
    depths: list[int], survivals: list[list[float]], computed: list[bool], costs: DraftingCosts
) -> float:
    tokens = 2 + sum(sum(own[:depth]) for own, depth in zip(survivals, depths, strict=True))
    deepest = max((d for d, own in zip(depths, computed, strict=True) if own), default=0)
    assert costs.draft is not None
    drafting_s = costs.draft.seconds(sum(computed), deepest)
    return tokens / (costs.step.seconds(2, 2 + sum(depths)) + drafting_s)
