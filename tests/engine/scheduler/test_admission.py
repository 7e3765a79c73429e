"""Requests that a scheduler rejects, and the fix each error names."""

from __future__ import annotations

import pytest

from ridgeline.engine.scheduler import BlockPool, SchedulerLimits
from ridgeline.engine.scheduler.admission.limits import check_request
from ridgeline.errors import BadInput, DoesNotFit
from tests.engine.scheduler.helpers import make_request, scheduler

LIMITS = SchedulerLimits(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=40)


def test_prompt_and_one_token_must_fit_in_the_context() -> None:
    pool = BlockPool(10, 4)
    check_request(make_request(num_prompt=39), LIMITS, pool)
    with pytest.raises(BadInput) as caught:
        check_request(make_request(num_prompt=40), LIMITS, pool)
    assert (caught.value.value, caught.value.limit) == ("40 tokens", "39 tokens")


def test_request_that_never_fits_is_rejected_with_a_working_fix() -> None:
    pool = BlockPool(5, 4)
    with pytest.raises(DoesNotFit, match="lower max_tokens to 11") as caught:
        check_request(make_request(num_prompt=10, max_tokens=12), LIMITS, pool)
    assert "20 tokens (5 blocks of 4)" in str(caught.value)
    check_request(
        make_request(num_prompt=10, max_tokens=11), LIMITS, pool
    )  # the last token takes no position in the cache
    with pytest.raises(DoesNotFit, match="kv-cache-memory-bytes"):
        check_request(make_request(num_prompt=30, max_tokens=1), LIMITS, pool)


def test_without_max_tokens_the_whole_context_must_fit() -> None:
    with pytest.raises(DoesNotFit, match="39 tokens"):
        check_request(make_request(num_prompt=10, max_tokens=None), LIMITS, BlockPool(9, 4))
    check_request(make_request(num_prompt=10, max_tokens=None), LIMITS, BlockPool(10, 4))


@pytest.mark.parametrize("priority", [10**400, -(10**9)])
def test_priorities_are_bounded(priority: int) -> None:
    with pytest.raises(BadInput, match="priority"):
        check_request(make_request(priority=priority), LIMITS, BlockPool(10, 4))


def test_arrival_times_must_be_finite() -> None:
    with pytest.raises(BadInput, match="arrival"):
        check_request(make_request(at_s=float("nan")), LIMITS, BlockPool(10, 4))


@pytest.mark.parametrize(
    "changed", [{"max_num_seqs": 0}, {"max_num_batched_tokens": -1}, {"aging_s": 0.0}]
)
def test_limits_are_positive(changed: dict[str, float]) -> None:
    with pytest.raises(BadInput, match=next(iter(changed))):
        scheduler(**changed)


def test_rejected_request_leaves_no_trace() -> None:
    sched = scheduler()
    with pytest.raises(BadInput):
        sched.add(make_request(num_prompt=1000))
    assert not sched.has_work
    sched.add(make_request("a"))
    with pytest.raises(BadInput, match="id"):
        sched.add(make_request("a"))
    assert sched.stats().num_waiting == 1
