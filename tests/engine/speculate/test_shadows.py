"""What is learnt from guesses that nobody verified is what verification would have told."""

from __future__ import annotations

import random

import pytest

from ridgeline.engine.core.drafting import Open, Room
from ridgeline.engine.speculate.base import NO_GUESS, Guess
from ridgeline.engine.speculate.choose import Costs, best_plan
from ridgeline.engine.speculate.combined import Combined, Lookups
from ridgeline.engine.speculate.cost import DraftCost, StepCost
from ridgeline.engine.speculate.shadows import Shadows
from ridgeline.records import Sampling


def opened(tokens: list[int], seq_id: int = 0) -> Open:
    return Open(seq_id, tokens, 1, "", Sampling(), 0, 99)


def test_plain_decoding_judges_a_guess() -> None:
    shadows, rng = Shadows(), random.Random(4)
    tokens = [0]
    for _ in range(3000):
        right = [len(tokens) + i for i in range(3)]
        guess = tuple(t if rng.random() < 0.7 else -1 for t in right)
        shadows.compare(0, tokens)
        shadows.keep(opened(tokens), Guess(guess, 3))
        tokens += range(len(tokens), len(tokens) + rng.randint(1, 3))
    assert shadows.of(3).rates(3) == pytest.approx([0.7] * 3, abs=0.15)
    assert shadows.of(2).rates(1)[0] == 0.3, "of other kinds nothing was learnt"


def test_a_guess_waits_until_it_is_judged() -> None:
    shadows = Shadows()
    shadows.keep(opened([1, 2]), Guess((3, 4, 5), 4))
    shadows.compare(0, [1, 2])
    shadows.compare(0, [1, 2, 3])
    assert not shadows.of(4)._all.tried, "right so far"
    shadows.keep(opened([1, 2, 3]), Guess((9,), 4))
    shadows.compare(0, [1, 2, 3, 4, 6])
    assert len(shadows.of(4)._all.tried) == 3 and not shadows._pending
    shadows.keep(opened([1], 7), Guess((3,), 4))
    shadows.forget(7)
    assert not shadows._pending


class _Says:
    """A lookup that always says the same."""

    def __init__(self, name: str, guess: Guess) -> None:
        self.name, self.guess, self.forgotten = name, guess, 0

    def look(self, each: Open, most: int) -> Guess:
        return Guess(self.guess.tokens[:most], self.guess.kind)

    def forget(self, seq_id: int, tokens: object, tenant: str) -> None:
        self.forgotten += 1


class _Computes:
    name = "computes"

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def draft(self, opens: list[Open], depths: list[int]) -> list[tuple[int, ...]]:
        self.asked.append(list(depths))
        return [(7,) * depth for depth in depths]

    def forget(self, seq_id: int, tokens: object, tenant: str) -> None:
        pass


def test_the_longest_evidence_speaks_and_the_model_where_there_is_none() -> None:
    short, long = _Says("short", Guess((1, 2), 2)), _Says("long", Guess((3, 4), 5))
    both = Lookups([short, long])
    assert both.look(opened([0]), 9).tokens == (3, 4)
    long.guess = NO_GUESS
    assert both.look(opened([0]), 9).tokens == (1, 2)
    model = _Computes()
    combined = Combined(both, model)
    assert combined.draft([opened([0])], [1]) == [(1,)]
    short.guess = NO_GUESS
    assert combined.draft([opened([0])], [3]) == [(7, 7, 7)]
    assert model.asked == [[0], [3]], "asked in every step, so that what it drew before is dropped"
    combined.forget(0, [], "")
    assert short.forgotten == long.forgotten == 1


def test_the_plan_is_the_best_of_all_plans() -> None:
    """Against every combination of depths; nearly, where drafting costs by the deepest draft."""
    rng = random.Random(9)
    for turn in range(60):
        grid = {(2, rows): 1.0 + rng.random() * rows for rows in (2, 3, 4, 5, 6, 8)}
        costs = Costs(StepCost(grid), DraftCost([(1, 1, 0.2), (1, 4, 0.5), (8, 1, 0.6), (8, 4, 2)]))
        survivals = [sorted((rng.random() for _ in range(3)), reverse=True) for _ in range(2)]
        computed = [turn % 2 == 1 and rng.random() < 0.7 for _ in range(2)]
        room = Room(2, 2, 6)
        found = best_plan(survivals, computed, room, costs)
        rates = [_rate([a, b], survivals, computed, costs) for a in range(4) for b in range(4)]
        assert found.rate == pytest.approx(_rate(found.depths, survivals, computed, costs))
        assert found.rate >= (0.9 if any(computed) else 0.999) * max(rates)


def _rate(
    depths: list[int], survivals: list[list[float]], computed: list[bool], costs: Costs
) -> float:
    tokens = 2 + sum(sum(own[:depth]) for own, depth in zip(survivals, depths, strict=True))
    deepest = max((d for d, own in zip(depths, computed, strict=True) if own), default=0)
    assert costs.draft is not None
    drafting_s = costs.draft.seconds(sum(computed), deepest)
    return tokens / (costs.step.seconds(2, 2 + sum(depths)) + drafting_s)
