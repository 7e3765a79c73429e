"""The roofline's bound, its limiting side and the utilisation figures, worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.records import StepStat
from ridgeline.roofline import Peaks, Work, bound, phase_of

PEAKS = Peaks(flops_s=1e10, bytes_s=1e9, dtype="float32", flops_s_by_dtype={"int8": 4e10})


def test_ridge_is_where_both_roofs_meet() -> None:
    assert PEAKS.ridge == 10
    assert PEAKS.attainable_flops_s(1) == 1e9
    assert PEAKS.attainable_flops_s(10) == PEAKS.attainable_flops_s(100) == 1e10


def test_peaks_of_other_dtypes_do_not_move_the_bound() -> None:
    assert PEAKS.all_flops_s == {"int8": 4e10, "float32": 1e10}
    assert bound(Work(1e10, 1.0), PEAKS).seconds == 1.0


@pytest.mark.parametrize(
    ("work", "seconds", "limit"),
    [
        (Work(1e6, 1e6), 1e-3, "bandwidth"),
        (Work(1e8, 1e6), 1e-2, "compute"),
        (Work(1e7, 1e6), 1e-3, "bandwidth"),  # on the ridge
    ],
)
def test_bound_is_the_longer_side(work: Work, seconds: float, limit: str) -> None:
    least = bound(work, PEAKS)
    assert least.seconds == pytest.approx(seconds)
    assert least.limit == limit


def test_utilisation_is_a_share_of_the_time_taken() -> None:
    least = bound(Work(1e8, 1e6), PEAKS)
    assert least.utilisation(0.02) == pytest.approx(0.5)
    assert least.mfu(0.02) == pytest.approx(0.5)
    assert least.mbu(0.02) == pytest.approx(0.05)
    assert least.utilisation(0.0) == least.mfu(0.0) == least.mbu(0.0) == 0.0


@given(st.floats(1, 1e15), st.floats(1, 1e12), st.floats(1, 1e3))
def test_bound_scales_with_work(flops: float, nbytes: float, factor: float) -> None:
    once = bound(Work(flops, nbytes), PEAKS)
    scaled = bound(Work(factor * flops, factor * nbytes), PEAKS)
    assert scaled.seconds == pytest.approx(factor * once.seconds)
    assert once.seconds >= max(once.bandwidth_s, once.compute_s)
    assert max(once.mfu(once.seconds), once.mbu(once.seconds)) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("shapes", "phase"),
    [
        (((1, 5), (1, 9)), "decode"),
        (((64, 0), (1, 0)), "prefill"),  # a prompt of one token has nothing cached
        (((1, 5), (64, 0)), "mixed"),
    ],
)
def test_phase_follows_from_the_shapes(shapes: tuple[tuple[int, int], ...], phase: str) -> None:
    step = StepStat(
        index=0,
        at_s=0.0,
        plan_s=0.0,
        run_s=0.01,
        shapes=shapes,
        num_sampled=len(shapes),
        num_running=len(shapes),
        num_waiting=0,
        used_blocks=1,
        num_blocks=8,
        max_num_seqs=8,
    )
    assert phase_of(step) == phase
