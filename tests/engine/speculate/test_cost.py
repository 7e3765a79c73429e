"""Measuring the curve in whatever room there is."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from ridgeline.engine.config import ResolvedSettings
from ridgeline.engine.scheduler.plan import StepPlan, StepResult
from ridgeline.engine.scheduler.speculation.base import DraftContext
from ridgeline.engine.speculate.build import measure_drafts
from ridgeline.engine.speculate.depth_control.step_cost import (
    CONTEXT,
    DEPTHS,
    StepTimeCurve,
    measure,
)
from ridgeline.modelspec.checkpoints.load import load_spec
from tests.engine.speculate.slow_cost import SlowStepCost


class _Room:
    """A runner that minds the cache's and the model's ends; a step takes a second per row."""

    def __init__(self, num_blocks: int, block_size: int, max_model_len: int) -> None:
        self.num_blocks, self.block_size, self.max_model_len = num_blocks, block_size, max_model_len
        self.now_s, self.deepest = 0.0, 0

    def run(self, plan: StepPlan) -> StepResult:
        used = list(itertools.chain.from_iterable(run.blocks for run in plan.runs))
        assert len(set(used)) == len(used) and max(used) < self.num_blocks
        for run in plan.runs:
            end = run.start + len(run.tokens)
            assert 1 <= run.start <= CONTEXT
            assert end <= min(self.max_model_len, len(run.blocks) * self.block_size)
            self.now_s += len(run.tokens)
            self.deepest = max(self.deepest, run.num_drafts)
        return StepResult(())


@pytest.mark.parametrize("num_blocks", [1, 4, 9, 40, 400])
@pytest.mark.parametrize("max_model_len", [2, 16, 60, 4096])
def test_calibration_stays_within_cache_and_context(num_blocks: int, max_model_len: int) -> None:
    runner = _Room(num_blocks, 16, max_model_len)
    found = measure(
        runner,
        lambda: runner.now_s,
        num_blocks=num_blocks,
        block_size=16,
        max_num_seqs=4,
        max_model_len=max_model_len,
        budget_s=1e9,
    )
    assert all(seconds == rows for (_, rows), seconds in found.items())
    assert (1, 1) in found and runner.deepest == max(
        d for d in DEPTHS if d + 2 <= min(max_model_len, num_blocks * 16)
    )


def test_calibration_ends_when_its_time_is_spent() -> None:
    runner = _Room(1000, 16, 4096)
    found = measure(
        runner,
        lambda: runner.now_s,
        num_blocks=1000,
        block_size=16,
        max_num_seqs=64,
        max_model_len=4096,
        budget_s=10.0,
    )
    assert {runs for runs, _ in found} == {1}, "the smallest batch is always measured"
    assert max(rows for _, rows in found) == 9, "and its deep steps only in time"


def test_disturbed_plain_step_does_not_make_drafts_look_free() -> None:
    """A step that took longer than one with more rows was disturbed by other work."""
    cost = StepTimeCurve({(1, 1): 5.0, (1, 2): 2.0, (1, 4): 4.0, (8, 8): 3.0, (8, 16): 6.0})
    assert [cost.seconds(1, rows) for rows in (1, 2, 3, 4)] == [2.0, 2.0, 3.0, 4.0]
    assert [cost.seconds(8, rows) for rows in (8, 16)] == [3.0, 6.0]


def test_untried_depths_are_interpolated_from_neighbours() -> None:
    """The start was disturbed: drafts took three times what they take. A few depths tell."""
    for runs in (1, 8):
        cost = StepTimeCurve({(runs, runs * d): 3.0 + 3 * d for d in (1, 2, 3, 5, 9, 17, 25)})
        for _ in range(12):
            for depth in (3, 9, 17):
                cost.learn(runs, runs * depth, 1.0 + depth)
        for depth in (2, 5, 7, 12, 14):
            assert cost.seconds(runs, runs * depth) == pytest.approx(1.0 + depth, rel=0.25)
        assert cost.seconds(runs, runs) == 6.0, "plain steps took what they took"


def test_depth_recovers_after_disturbed_observations() -> None:
    """Two steps were disturbed; later observations of other depths show it."""
    cost = StepTimeCurve({(8, 8 * d): 2.0 + d for d in (1, 2, 3, 5, 9, 17, 25)})
    for _ in range(2):
        cost.learn(8, 16, 9.0)
    assert cost.seconds(8, 16) > 5.5
    for _ in range(120):
        cost.learn(8, 40, 7.0)
    assert cost.seconds(8, 16) == pytest.approx(4.0, rel=0.1)


def test_cost_grows_monotonically_with_rows() -> None:
    cost = StepTimeCurve({(1, rows): 1.0 + 0.1 * rows for rows in range(1, 30)})
    for _ in range(20):
        cost.learn(1, 5, 3.0)
        cost.learn(1, 9, 2.0)
    assert cost.seconds(1, 5) > 2.5 > cost.seconds(1, 9)
    line = cost.line(1, 2, 20)
    assert line == sorted(line) and line[-1] == pytest.approx(cost.seconds(1, 21))


@pytest.mark.slow
def test_fast_cost_curve_equals_the_reference() -> None:
    """Whatever was measured, and whatever was learnt since."""
    rng = random.Random(8)
    for _ in range(60):
        grid = dict[tuple[int, int], float]()
        for runs in rng.sample((1, 2, 4, 8, 16), rng.randint(1, 5)):
            seconds = 1.0
            for depth in rng.sample(DEPTHS, rng.randint(1, 6)):
                grid[runs, runs * (depth + 1)] = 0.0
            for key in sorted(key for key in grid if key[0] == runs):
                seconds += rng.random()
                grid[key] = seconds
        cost, slow = StepTimeCurve(grid), SlowStepCost(grid)
        for _ in range(rng.randint(0, 60)):
            runs = rng.randint(1, 20)
            rows = runs * rng.choice((1, 1, 2, 3)) + rng.choice((0, 0, rng.randint(0, 40 * runs)))
            seconds = slow.seconds(runs, rows) * rng.choice((0.5, 0.9, 1.0, 1.1, 3.0, 11.0))
            assert cost.seconds(runs, rows) == pytest.approx(slow.seconds(runs, rows))
            cost.learn(runs, rows, seconds)
            slow.learn(runs, rows, seconds)
            first, count = runs + rng.randint(1, 90), rng.randint(0, 40)
            assert cost.line(runs, first, count) == pytest.approx(slow.line(runs, first, count))
            assert cost.has_seen(runs) == (runs in slow.plain)


def test_a_curve_without_points_and_steps_without_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="batch"):
        StepTimeCurve({})
    cost = StepTimeCurve({(1, 1): 1.0, (1, 2): 1.5})
    for runs, rows in ((0, 1), (1, -1)):
        with pytest.raises(ValueError, match="runs and rows"):
            cost.seconds(runs, rows)
    with pytest.raises(ValueError, match=r"at most 2\*\*24 rows"):
        cost.seconds(1, 2**30)
    with pytest.raises(ValueError, match="add rows"):
        cost.line(3, 3, 1)


@pytest.mark.parametrize(("num_blocks", "max_model_len"), [(9, 4096), (16, 40), (400, 4096)])
def test_drafting_is_timed_on_texts_that_fit_the_context(
    num_blocks: int, max_model_len: int
) -> None:
    """Where a drafter had no room it would draft nothing, and seem to cost nothing."""

    class Minds:
        name = "minds"

        def draft(
            self, contexts: Sequence[DraftContext], depths: Sequence[int]
        ) -> list[tuple[int, ...]]:
            ends = [len(o.tokens) + d for o, d in zip(contexts, depths, strict=True)]
            assert max(ends) <= max_model_len
            assert sum(-(-end // 16) for end in ends) <= num_blocks
            return [(1,) * depth for depth in depths]

        def forget(self, seq_id: int, tokens: Sequence[int], tenant: str) -> None:
            pass

    asked = {"max_num_seqs": 8, "max_model_len": max_model_len, "num_blocks": num_blocks}
    more = {"block_size": 16, "spec": load_spec("demo"), "dtype": "float32", "device": "cpu"}
    resolved = cast(ResolvedSettings, SimpleNamespace(**asked, **more))
    found = measure_drafts(Minds(), resolved, time.perf_counter)
    assert [each[:2] for each in found] == [(1, 1), (1, 4), (8, 1), (8, 4)]
