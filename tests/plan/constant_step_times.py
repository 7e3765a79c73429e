"""A step_times for tests against queueing theory."""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.modelspec.cost import Shape
from ridgeline.plan.step_time.simulated import LinearSteps


class ConstantStepTimes:
    """Every step takes the same time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def step_s(self, shapes: Sequence[Shape], num_sampled: int) -> float:
        return self._seconds

    def linear_steps(self, computed: Sequence[int], num_steps: int) -> LinearSteps | None:
        return LinearSteps(self._seconds, 0.0)
