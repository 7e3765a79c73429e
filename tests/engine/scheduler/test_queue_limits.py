"""Queue limits: bounds, the retry time, and the throttle."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.engine.scheduler.admission.queue_limits import WINDOW, QueueLimiter, QueueLimits
from ridgeline.errors import EngineFull
from ridgeline.records import Slo

SLO = Slo(ttft_s=1.0, tpot_s=0.1)


def refused(
    queue_limiter: QueueLimiter, name: str, num_tokens: int = 1, slo: Slo | None = None
) -> EngineFull:
    before = queue_limiter.num_queued, queue_limiter.num_queued_tokens
    with pytest.raises(EngineFull) as caught:
        queue_limiter.admit(name, num_tokens, slo, 0.0)
    assert (
        queue_limiter.num_queued,
        queue_limiter.num_queued_tokens,
    ) == before  # a refusal changes no count
    return caught.value


def test_queued_requests_are_bounded() -> None:
    queue_limiter = QueueLimiter(QueueLimits(max_requests=2))
    queue_limiter.admit("a", 10, None, 0.0)
    queue_limiter.admit("b", 10, None, 0.0)
    assert refused(queue_limiter, "c").reason == "requests"
    queue_limiter.note_started("a", 1.0)
    queue_limiter.admit("c", 10, None, 1.0)
    assert queue_limiter.refused == {"requests": 1, "tokens": 0, "slo": 0, "account": 0}


def test_queued_tokens_are_bounded_but_a_single_large_request_passes() -> None:
    queue_limiter = QueueLimiter(QueueLimits(max_tokens=100))
    queue_limiter.admit("huge", 1000, None, 0.0)
    assert refused(queue_limiter, "small").reason == "tokens"
    queue_limiter.remove("huge")
    queue_limiter.admit("small", 100, None, 0.0)
    assert refused(queue_limiter, "more").reason == "tokens"


def test_retry_time_is_the_queue_over_its_rate() -> None:
    queue_limiter = QueueLimiter(QueueLimits(max_requests=8))
    for index in range(4):
        queue_limiter.admit(f"s{index}", 50, None, 0.0)
        queue_limiter.note_started(f"s{index}", float(index))  # 200 tokens in 4 s when asked at 4 s
    for index in range(8):
        queue_limiter.admit(f"q{index}", 100, None, 4.0)
    assert queue_limiter.retry_after_s(4.0) == pytest.approx(800 / (200 / 4))
    assert queue_limiter.retry_after_s(1e9) == 60.0  # nothing has started for a long time
    assert QueueLimiter(QueueLimits()).retry_after_s(0.0) == 1.0


def run_window(queue_limiter: QueueLimiter, ttft_s: float, tpot_s: float) -> None:
    for index in range(WINDOW):
        name = f"w{index}"
        queue_limiter.admit(name, 1, SLO, 0.0)
        queue_limiter.note_started(name, 0.0)
        queue_limiter.note_token(name, ttft_s)
        queue_limiter.note_token(name, ttft_s + tpot_s)
        queue_limiter.remove(name)


def test_violated_slo_lowers_the_limit_and_a_kept_one_raises_it() -> None:
    queue_limiter = QueueLimiter(QueueLimits(throttle=True))
    for index in range(8):
        queue_limiter.admit(f"x{index}", 1, SLO, 0.0)
    run_window(queue_limiter, ttft_s=0.5, tpot_s=0.05)
    assert queue_limiter.slo_limit(SLO) is None
    run_window(queue_limiter, ttft_s=0.5, tpot_s=0.2)  # TPOT violated
    limit = queue_limiter.slo_limit(SLO)
    assert limit == 9 * 3 // 4
    assert refused(queue_limiter, "late", slo=SLO).reason == "slo"
    queue_limiter.admit("other", 1, Slo(ttft_s=9.0), 0.0)  # another SLO is not throttled
    for index in range(8):
        queue_limiter.remove(f"x{index}")
    run_window(queue_limiter, ttft_s=0.5, tpot_s=0.05)
    assert queue_limiter.slo_limit(SLO) == limit + 1


def test_without_throttle_slos_do_not_limit_admission() -> None:
    queue_limiter = QueueLimiter(QueueLimits())
    run_window(queue_limiter, ttft_s=9.0, tpot_s=9.0)
    assert queue_limiter.slo_limit(SLO) is None


@given(st.lists(st.tuples(st.sampled_from("asne"), st.integers(0, 5)), max_size=60))
def test_counts_return_to_zero(moves: list[tuple[str, int]]) -> None:
    queue_limiter, known = QueueLimiter(QueueLimits(max_requests=3, max_tokens=40)), set[str]()
    for move, number in moves:
        name = str(number)
        if move == "a" and name not in known:
            with suppress(EngineFull):
                queue_limiter.admit(name, 10 * number, SLO if number % 2 else None, 0.0)
                known.add(name)
        elif move == "s":
            queue_limiter.note_started(name, 0.0)
        elif move == "e":
            queue_limiter.remove(name)
            known.discard(name)
        assert 0 <= queue_limiter.num_queued <= 3 and queue_limiter.num_queued_tokens >= 0
    for name in known:
        queue_limiter.remove(name)
    assert (queue_limiter.num_queued, queue_limiter.num_queued_tokens) == (0, 0)
