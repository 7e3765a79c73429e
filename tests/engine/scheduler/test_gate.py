"""The gate before the queue: bounds, an honest time to retry, and the throttle."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.engine.scheduler.admission.queue_limits import WINDOW, Gate, GateLimits
from ridgeline.errors import EngineFull
from ridgeline.records import Slo

SLO = Slo(ttft_s=1.0, tpot_s=0.1)


def refused(gate: Gate, name: str, num_tokens: int = 1, slo: Slo | None = None) -> EngineFull:
    before = gate.num_queued, gate.num_queued_tokens
    with pytest.raises(EngineFull) as caught:
        gate.admit(name, num_tokens, slo, 0.0)
    assert (gate.num_queued, gate.num_queued_tokens) == before  # a refusal changes nothing
    return caught.value


def test_as_many_may_wait_as_the_limit_says() -> None:
    gate = Gate(GateLimits(max_requests=2))
    gate.admit("a", 10, None, 0.0)
    gate.admit("b", 10, None, 0.0)
    assert refused(gate, "c").reason == "requests"
    gate.started("a", 1.0)
    gate.admit("c", 10, None, 1.0)
    assert gate.refused == {"requests": 1, "tokens": 0, "slo": 0}


def test_waiting_tokens_are_bounded_but_one_large_request_passes() -> None:
    gate = Gate(GateLimits(max_tokens=100))
    gate.admit("huge", 1000, None, 0.0)
    assert refused(gate, "small").reason == "tokens"
    gate.ended("huge")
    gate.admit("small", 100, None, 0.0)
    assert refused(gate, "more").reason == "tokens"


def test_the_time_to_retry_is_the_queue_over_its_pace() -> None:
    gate = Gate(GateLimits(max_requests=8))
    for index in range(4):
        gate.admit(f"s{index}", 50, None, 0.0)
        gate.started(f"s{index}", float(index))  # 200 tokens in 4 s when asked at 4 s
    for index in range(8):
        gate.admit(f"q{index}", 100, None, 4.0)
    assert gate.retry_after_s(4.0) == pytest.approx(800 / (200 / 4))
    assert gate.retry_after_s(1e9) == 60.0  # nothing has started for ages
    assert Gate(GateLimits()).retry_after_s(0.0) == 1.0


def run_window(gate: Gate, ttft_s: float, tpot_s: float) -> None:
    for index in range(WINDOW):
        name = f"w{index}"
        gate.admit(name, 1, SLO, 0.0)
        gate.started(name, 0.0)
        gate.token(name, ttft_s)
        gate.token(name, ttft_s + tpot_s)
        gate.ended(name)


def test_a_broken_promise_lets_fewer_in_and_a_kept_one_more() -> None:
    gate = Gate(GateLimits(throttle=True))
    for index in range(8):
        gate.admit(f"x{index}", 1, SLO, 0.0)
    run_window(gate, ttft_s=0.5, tpot_s=0.05)
    assert gate.limit_of(SLO) is None
    run_window(gate, ttft_s=0.5, tpot_s=0.2)  # TPOT broken
    limit = gate.limit_of(SLO)
    assert limit == 9 * 3 // 4
    assert refused(gate, "late", slo=SLO).reason == "slo"
    gate.admit("other", 1, Slo(ttft_s=9.0), 0.0)  # another promise is not held back
    for index in range(8):
        gate.ended(f"x{index}")
    run_window(gate, ttft_s=0.5, tpot_s=0.05)
    assert gate.limit_of(SLO) == limit + 1


def test_without_the_throttle_promises_hold_nobody_back() -> None:
    gate = Gate(GateLimits())
    run_window(gate, ttft_s=9.0, tpot_s=9.0)
    assert gate.limit_of(SLO) is None


@given(st.lists(st.tuples(st.sampled_from("asne"), st.integers(0, 5)), max_size=60))
def test_counts_come_back_to_zero(moves: list[tuple[str, int]]) -> None:
    gate, known = Gate(GateLimits(max_requests=3, max_tokens=40)), set[str]()
    for move, number in moves:
        name = str(number)
        if move == "a" and name not in known:
            with suppress(EngineFull):
                gate.admit(name, 10 * number, SLO if number % 2 else None, 0.0)
                known.add(name)
        elif move == "s":
            gate.started(name, 0.0)
        elif move == "e":
            gate.ended(name)
            known.discard(name)
        assert 0 <= gate.num_queued <= 3 and gate.num_queued_tokens >= 0
    for name in known:
        gate.ended(name)
    assert (gate.num_queued, gate.num_queued_tokens) == (0, 0)
