"""What pays, by arithmetic: break-even chances and gains against the plainest way to say them."""

from __future__ import annotations

import pytest

from ridgeline.engine.speculate.depth_control.plan import DraftingCosts
from ridgeline.engine.speculate.depth_control.report import break_even, rows, survivals, verdict
from ridgeline.engine.speculate.depth_control.step_cost import DraftCost, StepTimeCurve


@pytest.mark.parametrize(("alpha", "depth"), [(0.1, 1), (0.5, 3), (0.9, 8)])
def test_break_even_inverts_the_expected_slowdown(alpha: float, depth: int) -> None:
    slower = sum(alpha**i for i in range(depth + 1))
    assert break_even(slower, depth) == pytest.approx(alpha, abs=1e-6)


def test_too_expensive_drafts_never_pay() -> None:
    assert break_even(2.1, 1) is None
    assert break_even(1.0, 3) == pytest.approx(0.0, abs=1e-6)


def test_rows_state_cost_and_yield_of_a_step() -> None:
    step = StepTimeCurve({(1, 1): 1.0, (1, 2): 1.2, (1, 3): 1.4, (1, 5): 3.0})
    alive = survivals([10.0, 8.0, 0.0], [8.0, 4.0, 0.0])
    assert alive == [0.8, 0.5, 0.0]
    assert survivals([10.0, 2.0], [5.0, 2.0]) == [0.5, 0.5], "never likelier than the place before"
    one, two, _, four = rows(DraftingCosts(step, None), 1, alive, 4)
    assert (one.slower, one.tokens) == (pytest.approx(1.2), pytest.approx(1.8))
    assert two.gain == pytest.approx(2.3 / 1.4) and two.gain > one.gain > four.gain
    assert two.break_even == pytest.approx(break_even(1.4, 2))
    assert "up to 2 drafts: 1.64x" in verdict([one, two, four], 1.0, 0.03)
    assert "about 1.24x in all" in verdict([one, two, four], 0.5, 0.03)


def test_cost_of_the_drafter_is_subtracted() -> None:
    step = StepTimeCurve({(1, 1): 1.0, (1, 2): 1.0, (1, 5): 1.0})
    draft = DraftCost([(1, 1, 0.5), (1, 4, 2.0), (8, 1, 0.5), (8, 4, 2.0)])
    [row] = rows(DraftingCosts(step, draft), 1, [0.3], 1)
    assert row.slower == pytest.approx(1.5, abs=0.01) and row.gain < 1
    assert verdict([row], 1.0, 0.03).startswith("off")
