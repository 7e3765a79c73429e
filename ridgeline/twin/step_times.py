"""How long the steps of a twin take: that of `simulate`, and the host's share."""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.modelspec.cost import Shape
from ridgeline.plan.step_time.replica import Replica
from ridgeline.plan.step_time.simulated import LinearSteps, ModelledStepTimes
from ridgeline.plan.step_time.speculation import SpeculationModel
from ridgeline.twin.config import HostTime


class TwinStepTimes:
    """Modelled seconds of a step of one replica.

    A step with drafts yields several tokens per sequence, and the simulated scheduler plans one: a
    planned step that only decodes has its share of the host's time, as of the device's.
    """

    def __init__(
        self, replica: Replica, speculation: SpeculationModel | None, host: HostTime
    ) -> None:
        self._modelled = ModelledStepTimes(replica, speculation)
        self._launch_s = host.layer_s * len(replica.spec.layers)
        self._host = host
        self._yield = 1.0 if speculation is None else speculation.tokens_per_step

    def linear_steps(self, computed: Sequence[int], num_steps: int) -> LinearSteps | None:
        """The next `num_steps` decode steps, as of `StepTimes`; None too where the launches take
        longer than some of them and not longer than others.
        """
        steps = self._modelled.linear_steps(computed, num_steps)
        if steps is None:
            return None
        share = 1 / self._yield
        launch_s, last_s = share * self._launch_s, steps.first_s + steps.more_s * (num_steps - 1)
        host_s = share * (self._host.step_s + self._host.sequence_s * len(computed))
        if last_s <= launch_s:
            return LinearSteps(launch_s + host_s, 0.0)
        if steps.first_s < launch_s:
            return None
        return LinearSteps(steps.first_s + host_s, steps.more_s)

    def step_s(self, shapes: Sequence[Shape], num_sampled: int) -> float:
        share = 1 / self._yield if all(new == 1 for new, _ in shapes) else 1.0
        device_s = max(self._modelled.step_s(shapes, num_sampled), share * self._launch_s)
        return device_s + share * (self._host.step_s + self._host.sequence_s * len(shapes))
