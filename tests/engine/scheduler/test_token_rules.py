"""Bad words and thinking budgets against slow references, on random outputs."""

from __future__ import annotations

import random

import msgspec
import pytest

from ridgeline.engine.scheduler.plan import Run, SamplePoint, sample_points
from ridgeline.engine.scheduler.token_rules import forced_token, open_thinking, tokens_completing
from ridgeline.records import Sampling, ThinkingLimit

START, END, FORCED = (8,), (9,), (5, 9)


def completing_reference(words: list[tuple[int, ...]], output: tuple[int, ...]) -> set[int]:
    """Tokens after which the output ends with a bad word, tried one by one."""
    tries = ((*output, token) for token in range(6))
    return {own[-1] for own in tries if any(own[-len(word) :] == word for word in words)}


def test_completing_tokens_are_those_after_which_a_word_stands() -> None:
    rng = random.Random(3)
    for _ in range(200):
        words = [tuple(rng.choices(range(6), k=rng.randint(1, 3))) for _ in range(3)]
        output = tuple(rng.choices(range(6), k=rng.randint(0, 6)))
        expected = completing_reference(words, output)
        assert set(tokens_completing(words, output)) == expected


class BudgetReference:
    """Counts token by token, as vLLM's logits processor does."""

    def __init__(self, limit: ThinkingLimit) -> None:
        self.limit, self.recent, self.queue = limit, [], list[int]()
        self.count = limit.num_open

    def forced(self) -> int | None:
        if not self.queue and self.count is not None and self.count >= self.limit.num_tokens:
            self.queue = list(self.limit.forced_end)
        return self.queue[0] if self.queue else None

    def add(self, token: int) -> None:
        if self.queue:
            self.queue.pop(0)
            self.count = None if not self.queue else self.count
            self.recent = []
            return
        self.recent.append(token)
        inside = self.count is not None
        mark = self.limit.end if inside else self.limit.start
        if inside:
            self.count += 1
        if tuple(self.recent[-len(mark) :]) == mark:
            self.count, self.recent = (None if inside else 0), []


@pytest.mark.parametrize("start", [START, (7, 8)])
@pytest.mark.parametrize("end", [END, (6, 9)])
def test_budget_is_kept_as_by_a_state_machine(start: tuple[int, ...], end: tuple[int, ...]) -> None:
    rng = random.Random(11)
    for _ in range(150):
        budget, num_open = rng.randint(0, 5), rng.choice([None, 0, 2, 7])
        limit = ThinkingLimit(budget, start, end, (5, *end), num_open)
        reference, output = BudgetReference(limit), ()
        for _ in range(24):
            expected = reference.forced()
            assert forced_token(limit, output) == expected, (limit, output)
            token = expected if expected is not None else rng.choice([4, 6, 7, 8, 9, 8, 9])
            reference.add(token)
            output = (*output, token)


def test_thinking_in_the_prompt_counts() -> None:
    limit = ThinkingLimit(4, START, END, FORCED)
    assert open_thinking(limit, (1, 2, 3)) is None
    assert open_thinking(limit, (1, 8, 2, 3)) == 2
    assert open_thinking(limit, (8, 2, 9, 3)) is None
    assert open_thinking(limit, (8, 2, 9, 8)) == 0


def test_rules_hold_after_every_draft() -> None:
    limit = ThinkingLimit(2, START, END, FORCED, num_open=0)
    sampling = Sampling(
        temperature=0.0,
        thinking_token_budget=2,
        thinking_limit=limit,
        bad_words_token_ids=((3, 4), (1,)),
    )
    point = SamplePoint(sampling, 0, 0, 2, (7, 7), completing=(1,))
    run = Run(0, 1, (7, 3, 3, 5, 9, 3), (0,), point, num_drafts=5)
    points = sample_points(run)
    assert [own.forced for own in points] == [None, None, 5, 9, None, None]
    assert [own.completing for own in points] == [(1,), (4, 1), (4, 1), (1,), (1,), (4, 1)]
    assert msgspec.structs.replace(points[0], forced=4).forbids
