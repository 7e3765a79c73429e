"""Waiting time in the engine's totals, by the resource that was short."""

from __future__ import annotations

import pytest

from ridgeline.engine.profiling.step_stats import StepLog, StepTotals
from ridgeline.engine.scheduler.plan import DraftBranch, Run, SamplePoint, StepPlan
from ridgeline.engine.scheduler.step_builder import SchedulerStats
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.cost import cost_model
from ridgeline.records import Sampling, StepStat


def _step(num_tokens: int, *, running: int, waiting: int) -> StepStat:
    return StepStat(
        index=0,
        at_s=0.0,
        plan_s=0.5,
        run_s=1.5,
        shapes=((num_tokens, 0),),
        num_sampled=1,
        num_running=running,
        num_waiting=waiting,
        used_blocks=1,
        num_blocks=8,
        max_num_seqs=4,
    )


def test_waiting_time_is_split_by_the_short_resource() -> None:
    totals = StepTotals(cost_model(load_spec("demo")), token_budget=100)
    totals.add(_step(10, running=4, waiting=3))  # no free slot
    totals.add(_step(90, running=2, waiting=2))  # no tokens left
    totals.add(_step(89, running=2, waiting=1))  # neither: a policy, or blocks
    totals.add(_step(100, running=4, waiting=0))
    figures = totals.as_dict()
    assert figures["step_waiting_s"] == pytest.approx(2 * (3 + 2 + 1))
    assert figures["step_full_waiting_s"] == pytest.approx(6)
    assert figures["step_spent_waiting_s"] == pytest.approx(4)
    assert figures["step_slot_s"] == pytest.approx(4 * 8)
    assert figures["step_wasted_slot_s"] == pytest.approx(2 * (2 + 2))  # not with none waiting
    assert figures["step_plan_s"] == pytest.approx(2.0) and figures["step_busy_s"] == pytest.approx(
        8.0
    )


def test_draft_tree_counts_all_paths_as_work_but_one_sequence() -> None:
    at = SamplePoint(sampling=Sampling(temperature=0.0), seed=0, index=0, num_prompt=20)
    tree = Run(
        seq_id=1, start=20, tokens=(5, 6, 7), blocks=(0, 1), sample=at, num_drafts=2,
        branches=(
            DraftBranch(drafts=(8,), blocks=(0, 2)),
            DraftBranch(drafts=(9, 4), blocks=(0, 3)),
        ),
    )  # fmt: skip
    plain = Run(seq_id=2, start=30, tokens=(3,), blocks=(4, 5), sample=at)
    view = SchedulerStats(
        num_running=2, num_waiting=0, used_blocks=6, num_blocks=8, max_num_seqs=4, num_preempted=0,
        queried_tokens=0, hit_tokens=0,
    )  # fmt: skip
    log = StepLog(StepTotals(cost_model(load_spec("demo")), token_budget=100))
    log.record(StepPlan(index=0, runs=(tree, plain)), view, 0.0, 0.1, 0.3)
    (stat,) = log.drain()
    assert stat.shapes == ((3, 20), (2, 20), (3, 20), (1, 30))
    figures = log.totals.as_dict()
    assert figures["step_tokens"] == stat.num_tokens == 9
    assert figures["step_seqs"] == 2 and figures["step_slots"] == 4
