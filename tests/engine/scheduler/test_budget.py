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


def test_a_long_prompt_leaves_a_token_for_each_who_comes_later() -> None:
    budget = ChunkedBudget(10)
    assert budget.offer(100, later=4) == 6
    budget.take(6, later=4)
    for later in (3, 2, 1, 0):
        assert budget.offer(1, later) == 1
        budget.take(1, later)
    assert budget.left == 0


def test_the_first_gets_one_even_if_the_budget_is_smaller_than_the_batch() -> None:
    assert ChunkedBudget(2).offer(5, later=8) == 1
    assert WholeBudget(2).offer(1, later=8) == 1


def test_whole_never_splits() -> None:
    budget = WholeBudget(10)
    assert budget.offer(6) == 6
    budget.take(6)
    assert budget.offer(6) == 0
    assert budget.offer(4) == 4


def test_whole_takes_the_first_prompt_whatever_its_length() -> None:
    budget = WholeBudget(10)
    budget.take(1, later=3)
    assert budget.offer(50, later=2) == 50
    budget.take(50, later=2)
    assert budget.offer(1, later=1) == 1  # what was set aside for the others is still there
    budget.take(1, later=1)
    assert budget.offer(30) == 0  # but no second prompt
    assert budget.offer(1) == 1
