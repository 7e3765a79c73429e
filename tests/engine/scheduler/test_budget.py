"""The token budget: what each sequence is offered, chunked and whole."""

from __future__ import annotations

from ridgeline.engine.scheduler.token_budget import ChunkedBudget, WholeBudget


def test_chunked_takes_what_is_left() -> None:
    budget = ChunkedBudget(10)
    assert budget.offer(7) == 7
    budget.take(7)
    assert budget.offer(7) == 3
    budget.take(3)
    assert budget.offer(7) == 0


def test_long_prompt_leaves_a_token_for_each_later_sequence() -> None:
    budget = ChunkedBudget(10)
    assert budget.offer(100, later=4) == 6
    budget.take(6, later=4)
    for later in (3, 2, 1, 0):
        assert budget.offer(1, later) == 1
        budget.take(1, later)
    assert budget.left == 0


def test_first_sequence_gets_a_token_even_if_the_budget_is_smaller_than_the_batch() -> None:
    assert ChunkedBudget(2).offer(5, later=8) == 1
    assert WholeBudget(2).offer(1, later=8) == 1


def test_whole_budget_never_splits_a_prompt() -> None:
    budget = WholeBudget(10)
    assert budget.offer(6) == 6
    budget.take(6)
    assert budget.offer(6) == 0
    assert budget.offer(4) == 4


def test_whole_budget_takes_the_first_prompt_of_any_length() -> None:
    budget = WholeBudget(10)
    budget.take(1, later=3)
    assert budget.offer(50, later=2) == 50
    budget.take(50, later=2)
    assert budget.offer(1, later=1) == 1  # what is reserved for the others is still there
    budget.take(1, later=1)
    assert budget.offer(30) == 0  # but not for a second prompt
    assert budget.offer(1) == 1
