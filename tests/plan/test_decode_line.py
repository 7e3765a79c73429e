"""The simulator's line through decode steps against the price of each of them."""

from __future__ import annotations

import pytest

from ridgeline.hardware.catalogue import load_catalogue
from ridgeline.modelspec.checkpoints.planning import load_planning_spec
from ridgeline.plan.step_time.parallel_layout import Layout
from ridgeline.plan.step_time.replica import build_replica
from ridgeline.plan.step_time.simulated import ModelledStepTimes

ROWS = load_catalogue()


@pytest.mark.parametrize("batch", [1, 64, 512])
@pytest.mark.parametrize(
    ("model", "device", "tp"),
    [("llama-3.1-8b", "h100-sxm", 1), ("qwen3-235b-a22b", "h200-sxm", 8)],
)
def test_line_is_exact_where_parts_have_different_bounds(
    model: str, device: str, tp: int, batch: int
) -> None:
    """At 512 sequences the linears are bound by compute and attention by bandwidth."""
    replica = build_replica(
        load_planning_spec(model), ROWS[device], Layout(tp=tp), weight_dtype="float8_e4m3"
    )
    times = ModelledStepTimes(replica)
    for length in (200, 8000):
        line = times.linear_steps([length] * batch, 5)
        assert line is not None
        steps = [times.step_s([(1, length + i)] * batch, batch) for i in range(5)]
        assert line.first_s == pytest.approx(steps[0], rel=1e-6)
        assert line.seconds(5) == pytest.approx(sum(steps), rel=1e-6)
