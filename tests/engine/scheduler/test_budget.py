"""The token budget: what each sequence is offered, chunked and whole."""

from __future__ import annotations

import math
import random

import pytest

from ridgeline.engine.scheduler.token_budget import ChunkedBudget, WholeBudget
from ridgeline.records import Token
from tests.engine.scheduler.helpers import make_request, scheduler, step


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


@pytest.mark.parametrize("row_tokens", [0.0, 0.45, 1.0, 7.3])
def test_positions_with_prompt_logprobs_count_for_their_row_of_logits(row_tokens: float) -> None:
    """A step of them costs no more than the budget, and wastes less than one position of it."""
    sched = scheduler(
        num_blocks=64, max_num_batched_tokens=40, prompt_logprob_tokens=row_tokens, max_num_seqs=2
    )
    sched.add(make_request("scored", 200, prompt_logprobs=1))
    while len((run := step(sched)[0].runs[0]).tokens) and run.sample is None:
        cost = len(run.tokens) + math.ceil(len(run.tokens) * row_tokens)
        is_last = run.start + len(run.tokens) >= 199
        assert cost <= 40 and (is_last or cost > 40 - 1 - row_tokens - 1)
    assert run.start + len(run.tokens) == 200


def test_a_prompt_with_logprobs_leaves_a_token_for_every_running_sequence() -> None:
    sched = scheduler(
        num_blocks=64, max_num_batched_tokens=8, prompt_logprob_tokens=3.0, max_num_seqs=8
    )
    for i in range(7):
        sched.add(make_request(f"plain{i}", 1, first=300 + i, max_tokens=9))
    step(sched)
    sched.add(make_request("scored", 60, prompt_logprobs=1, priority=-1))
    step(sched)
    assert [len(run.tokens) for run in step(sched)[0].runs] == [1] * 8


def test_a_whole_prompt_with_logprobs_is_computed_in_one_step() -> None:
    sched = scheduler(
        num_blocks=64, max_num_batched_tokens=10, prompt_logprob_tokens=2.0, chunked_prefill=False
    )
    sched.add(make_request("scored", 9, prompt_logprobs=1))
    sched.add(make_request("short", 2, first=300))
    assert [len(run.tokens) for run in step(sched)[0].runs] == [9]  # 9 + 16, a budget of its own
    assert [len(run.tokens) for run in step(sched)[0].runs] == [1, 2]


@pytest.mark.parametrize("seed", range(5))
def test_the_price_of_prompt_logprobs_changes_no_token(seed: int) -> None:
    """And every position is reported once, whatever the steps are."""
    rng = random.Random(seed)
    requests = [
        make_request(
            f"r{i}", rng.randint(1, 20), first=50 * i, prompt_logprobs=rng.choice((None, 0, 2))
        )
        for i in range(4)
    ]
    served = []
    for row_tokens in (0.0, 0.3, 5.0):
        sched = scheduler(
            num_blocks=64, max_num_batched_tokens=9, prompt_logprob_tokens=row_tokens, eos=()
        )
        for request in requests:
            sched.add(request)
        tokens: dict[str, list[object]] = {}
        while sched.has_work:
            for event in step(sched)[1]:
                if isinstance(event, Token):
                    own = event.prompt_logprobs and [
                        at and at.token for at in event.prompt_logprobs
                    ]
                    tokens.setdefault(event.request_id, []).append((event.token, own))
        served.append(tokens)
    assert served[0] == served[1] == served[2]


def test_a_step_computes_less_after_other_work_but_half_of_its_budget() -> None:
    sched = scheduler(num_blocks=64, max_num_batched_tokens=12)
    sched.add(make_request(num_prompt=60))
    sizes = [len(sched.plan(0.0, extra).runs[0].tokens) for extra in (0, 5, 12, 40)]
    assert sizes == [12, 7, 6, 6]
