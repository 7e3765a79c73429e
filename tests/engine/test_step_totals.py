"""What the engine adds up about waiting: how long, and what was short meanwhile."""

from __future__ import annotations

import pytest

from ridgeline.engine.stats import StepTotals
from ridgeline.records import StepStat
from ridgeline.spec.cost import cost_model
from ridgeline.spec.load import load_spec


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


def test_waiting_is_told_by_what_was_short() -> None:
    totals = StepTotals(cost_model(load_spec("demo")), token_budget=100)
    totals.add(_step(10, running=4, waiting=3))  # no seat
    totals.add(_step(90, running=2, waiting=2))  # no tokens left
    totals.add(_step(89, running=2, waiting=1))  # neither: a policy, or blocks
    totals.add(_step(100, running=4, waiting=0))
    told = totals.as_dict()
    assert told["step_waiting_s"] == pytest.approx(2 * (3 + 2 + 1))
    assert told["step_full_waiting_s"] == pytest.approx(6)
    assert told["step_spent_waiting_s"] == pytest.approx(4)
    assert told["step_plan_s"] == pytest.approx(2.0) and told["step_busy_s"] == pytest.approx(8.0)
