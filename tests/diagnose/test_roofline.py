"""Placing steps under the roofline and splitting the wall time, against figures done by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.diagnose import roofline_points, time_shares, verdict_of_point
from ridgeline.records import StepStat
from ridgeline.roofline import Peaks, Work

PEAKS = Peaks(flops_s=1e10, bytes_s=1e9, dtype="float32")


def step(run_s: float, *shapes: tuple[int, int], plan_s: float = 0.0) -> StepStat:
    return StepStat(
        index=0,
        at_s=0.0,
        plan_s=plan_s,
        run_s=run_s,
        shapes=shapes,
        num_sampled=len(shapes),
        num_running=len(shapes),
        num_waiting=0,
        used_blocks=1,
        num_blocks=10,
        max_num_seqs=4,
    )


def price(shapes: Sequence[tuple[int, int]], num_sampled: int) -> Work:
    """1 MB per step and 1 MFLOP per token: intensity is the number of tokens."""
    return Work(flops=1e6 * sum(new for new, _ in shapes), bytes=1e6)


def test_each_phase_has_its_own_point() -> None:
    steps = [step(0.002, (1, 5)), step(0.01, (50, 0)), step(0.02, (1, 5), (30, 0))]
    points = {point.phase: point for point in roofline_points("x", steps, price, PEAKS)}
    assert set(points) == {"decode", "prefill", "mixed"}
    assert points["decode"].intensity == 1
    assert points["decode"].achieved_flops_s == pytest.approx(5e8)
    assert points["decode"].share_of_roof == pytest.approx(0.5)
    assert points["prefill"].roof_flops_s == 1e10
    assert points["mixed"].intensity == 31


def test_wall_time_is_split_by_hand() -> None:
    """Decode: 1 ms of bytes in 2 ms. Prefill of 50: 5 ms of arithmetic in 10 ms. Wall 20 ms."""
    steps = [step(0.002, (1, 5), plan_s=0.001), step(0.010, (50, 0), plan_s=0.001)]
    shares = time_shares(steps, 0.020, price, PEAKS)
    assert shares.bandwidth == pytest.approx(0.05)
    assert shares.compute == pytest.approx(0.25)
    assert shares.overhead == pytest.approx(0.30)
    assert shares.planning == pytest.approx(0.10)
    assert shares.idle == pytest.approx(0.30)
    assert shares.mbu == pytest.approx(0.002 / 0.012)
    assert shares.mfu == pytest.approx(0.0051 / 0.012)


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.floats(1e-5, 1.0), st.integers(1, 500)), max_size=8),
    st.floats(0.0, 10.0),
)
def test_shares_always_sum_to_one(made: list[tuple[float, int]], wall_s: float) -> None:
    shares = time_shares([step(s, (n, 0)) for s, n in made], wall_s, price, PEAKS)
    total = shares.bandwidth + shares.compute + shares.overhead + shares.planning + shares.idle
    assert math.isclose(total, 1.0, abs_tol=1e-9)
    assert min(shares.bandwidth, shares.compute, shares.overhead, shares.idle) >= -1e-9


@pytest.mark.parametrize(
    ("run_s", "tokens", "bound"),
    [(0.0011, 1, "bandwidth"), (0.011, 100, "compute"), (0.1, 100, "overhead")],
)
def test_a_point_is_bound_by_its_side_or_by_overhead(run_s: float, tokens: int, bound: str) -> None:
    (point,) = roofline_points("x", [step(run_s, *[(1, 5)] * tokens)], price, PEAKS)
    found = verdict_of_point(point, PEAKS)
    assert found.bound == bound
    assert "GFLOP/s" in found.sentence
