"""Recording of a machine's interference, and its replay in simulations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

from ridgeline.engine.scheduler import NoPrefixCache, Scheduler, SchedulerLimits, make_policy
from ridgeline.plan.calibration.interference import (
    BIN_S,
    MEDIAN_LEVEL,
    InterferenceSampler,
    InterferenceTrace,
    LoadedStep,
    record_interference,
)
from ridgeline.plan.simulate.block_counter import CountingBlockPool
from ridgeline.plan.simulate.fleet import simulate_fleet
from ridgeline.plan.simulate.records import (
    FleetConfig,
    FleetOutcome,
    ReplicaConfig,
    SimulatedRequest,
)
from ridgeline.plan.step_time.simulated import LinearSteps

Shapes = Sequence[tuple[int, int]]


def fitted_s(shapes: Shapes, _num_sampled: int) -> float:
    """What a fit would say: 1 ms, and 0.1 ms per token."""
    return 1e-3 + 1e-4 * sum(new for new, _ in shapes)


class Line:
    """Step times by `fitted_s`."""

    def step_s(self, shapes: Shapes, num_sampled: int) -> float:
        return fitted_s(shapes, num_sampled)

    def linear_steps(self, computed: Sequence[int], num_steps: int) -> LinearSteps | None:
        return LinearSteps(fitted_s([(1, 0)] * len(computed), 0), 0.0)


def window(slow: Sequence[float], prompts: float = 1.0) -> list[LoadedStep]:
    """Two decodes and a prompt in each bin: `slow` of a decode, times `prompts` of the other."""
    steps = []
    for i, factor in enumerate(slow):
        for j, (shapes, more) in enumerate(
            ((((1, 50),), 1.0), (((64, 0), (1, 9)), prompts), (((1, 51), (1, 9)), 1.0))
        ):
            at_s = 7.0 + BIN_S * (i + 0.1 + 0.3 * j)
            seconds = factor * more * fitted_s(shapes, 1)
            steps.append(LoadedStep(at_s=at_s, seconds=seconds, shapes=shapes, num_sampled=1))
    return steps


def test_slow_steps_are_recorded_in_their_bins() -> None:
    slow = [1.0] * 20 + [2.0] * 10
    found = record_interference([window(slow, prompts=1.5)], fitted_s)
    assert found is not None and found.bin_s == BIN_S
    assert found.decode == pytest.approx(slow, rel=1e-3)
    assert found.prompt == pytest.approx([1.5 * each for each in slow], rel=1e-3)
    assert found.span_s == pytest.approx(30 * BIN_S)


def test_gaps_repeat_the_bin_before_them() -> None:
    steps = [each for i, each in enumerate(window([1.0] * 10 + [3.0] * 20)) if i // 3 % 2 == 0]
    found = record_interference([steps, window([2.0] * 5)], fitted_s)
    assert found is not None
    assert found.decode[:10] == pytest.approx([1.0] * 10) and found.decode[11] == 3.0
    assert found.decode[-5:] == pytest.approx([2.0] * 5)
    assert not any(math.isnan(each) for each in (*found.decode, *found.prompt))


def test_short_recordings_are_discarded() -> None:
    assert record_interference([], fitted_s) is None and record_interference([[]], fitted_s) is None
    assert record_interference([window([1.0] * 5)], fitted_s) is None
    only = [each for each in window([1.0] * 40) if len(each.shapes) == 1]
    assert record_interference([only], fitted_s) is None  # no prompt was seen


TRACE = InterferenceTrace(
    bin_s=BIN_S, decode=tuple([1.0] * 30 + [2.0] * 10), prompt=tuple([1.0] * 30 + [4.0] * 10)
)


def test_sampler_replays_the_whole_recording_from_an_offset() -> None:
    at_s = np.arange(40) * BIN_S + 0.01
    for seed in range(5):
        interference = InterferenceSampler(TRACE, seed, 0, 1.0)
        assert sorted(interference.slowness([(1, 9)], t) for t in at_s) == sorted(TRACE.decode)
        assert interference.slowness([(1, 9), (5, 0)], 0.3) == interference.slowness(
            [(5, 0)], 0.3 + 40 * BIN_S
        )
    starts = {
        tuple(InterferenceSampler(TRACE, 1, i, 1.0).slowness([(1, 9)], t) for t in at_s)
        for i in range(20)
    }
    assert len(starts) > 5, "replicas have a place each"


def test_level_interpolates_between_none_and_recorded_interference() -> None:
    slow = InterferenceTrace(bin_s=BIN_S, decode=(2.0,) * 40, prompt=(4.0,) * 40)
    fit, half = InterferenceSampler(slow, 0, 0, 0.0), InterferenceSampler(slow, 0, 0, 0.5)
    assert fit.slowness([(1, 1)], 0.0) == 1.0
    assert half.slowness([(5, 0)], 0.0) == pytest.approx(2.0)
    drawn = sorted(
        InterferenceSampler(slow, seed, 0).slowness([(1, 1)], 0.0) for seed in range(200)
    )
    assert 1.0 <= drawn[0] < 1.1 and 1.9 < drawn[-1] <= 2.0
    assert drawn[100] == pytest.approx(2**0.5, rel=0.1)


def test_speed_ratios_and_fit_errors_are_drawn_only_with_the_level() -> None:
    trace = InterferenceTrace(
        bin_s=BIN_S,
        decode=(1.0,) * 40,
        prompt=(1.0,) * 40,
        pass_ratios=(0.5, 2.0),
        decode_errors=(1.0, 3.0),
        prompt_errors=(5.0,),
    )

    def slow(interference: InterferenceSampler) -> tuple[float, float]:
        return interference.slowness([(1, 1)], 0.0), interference.slowness([(5, 0)], 0.0)

    assert slow(InterferenceSampler(trace, 3, 0, MEDIAN_LEVEL)) == (1.0, 1.0)
    drawn = {slow(InterferenceSampler(trace, seed, 0)) for seed in range(50)}
    assert drawn == {(mood * misfit, mood * 5.0) for mood in (0.5, 2.0) for misfit in (1.0, 3.0)}
    replicas = [slow(InterferenceSampler(trace, 7, i)) for i in range(20)]
    assert len({prompt for _, prompt in replicas}) == 2, "each replica has its own speed ratio"
    assert len({decode / prompt for decode, prompt in replicas}) == 1, "all have the same fit"


def served(interference: partial[InterferenceSampler] | None) -> FleetOutcome:
    requests = [SimulatedRequest(at_s=0.04 * i, num_prompt=40, num_output=20) for i in range(60)]
    limits = SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=256, max_model_len=512)

    def scheduler() -> Scheduler:
        pool = CountingBlockPool(400, 16)
        return Scheduler(limits, make_policy("continuous"), pool, NoPrefixCache())

    build = ReplicaConfig(
        name="x", scheduler=scheduler, step_times=Line(), interference=interference
    )
    return simulate_fleet(requests, FleetConfig(replicas=(build,)))


def test_fleet_with_interference() -> None:
    """Twice as slow all over is twice as busy; a place is a seed's, and the same twice."""
    calm = served(None)
    even = InterferenceTrace(bin_s=BIN_S, decode=(1.0,) * 40, prompt=(1.0,) * 40)
    same = served(partial(InterferenceSampler, even, 0))
    assert [life.finished_s for life in same.requests] == pytest.approx(
        [life.finished_s for life in calm.requests]
    )
    twice = InterferenceTrace(bin_s=BIN_S, decode=(2.0,) * 40, prompt=(2.0,) * 40)
    slow = served(partial(InterferenceSampler, twice, 0, level=1.0))
    assert slow.replicas[0].num_busy_s > 1.5 * calm.replicas[0].num_busy_s
    ends = [
        [life.finished_s for life in served(partial(InterferenceSampler, TRACE, n)).requests]
        for n in (3, 3, 4)
    ]
    assert ends[0] == ends[1] != ends[2]
