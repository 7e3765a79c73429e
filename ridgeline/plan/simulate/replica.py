"""One replica of a simulated fleet: the engine's own scheduler between two instants.

    idle ──request──▶ busy ──commit──▶ calm ──▶ busy …          a step is planned, then committed
                                     │
                                     └─request─▶ calm until the step under way ends, then busy

A busy station has a step under way: what it computes was planned, and is committed when its time
has passed; a step in which requests join and nothing else happens is foreseen instead, with the same
outcome (`engine.core.entering`). A calm one is somewhere within steps of which nothing happens but
decoding (`engine.core.leap`); they are done at once, when something is about to happen.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ridgeline.engine.scheduler.plan import RunOutput, StepPlan, StepResult
from ridgeline.engine.scheduler.scheduler import Scheduler
from ridgeline.plan.calibration.interference import InterferenceSampler
from ridgeline.plan.simulate.fast_forward_decode import apply_steady_steps, count_steady_steps
from ridgeline.plan.simulate.fast_forward_prefill import (
    AdmissionStep,
    Shapes,
    begin_admission_step,
    commit_admission_step,
)
from ridgeline.plan.step_time.simulated import LinearSteps, StepTimes
from ridgeline.records import Event, Request

FILLER = 0
_ONE = RunOutput((FILLER,))
_NONE = RunOutput()
StepSeconds = Callable[[Shapes, int, float], float]


class SimulatedReplica:
    """`wake_s` is when something happens here by itself (inf: never); call `advance` then.

    `leaps` False goes step by step: the slow twin of the fast way, and the only one under a `sky`,
    where no two steps are on one line.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        pace: StepTimes,
        *,
        leaps: bool = True,
        sky: InterferenceSampler | None = None,
    ) -> None:
        self.scheduler, self._pace, self._leaps = scheduler, pace, leaps and sky is None
        self._step_s = _fitted(pace) if sky is None else _under(pace, sky)
        self.wake_s = math.inf
        self.num_steps = 0
        self.busy_s = 0.0
        self.check: Callable[[Scheduler], None] = _no_check
        self._free_s = 0.0  # when the step under way ends
        self._under_way: StepPlan | AdmissionStep | None = None
        self._calm: tuple[float, int, LinearSteps] | None = None

    def add(self, request: Request, now_s: float) -> None:
        """Take a request at `now_s`. Raises what `Scheduler.add` raises."""
        if self._calm is not None:
            from_s, most, glide = self._calm
            steps = glide.steps_until(now_s - from_s)
            if steps < most:
                self._land(steps, all_steps=False)
        self.scheduler.add(request)
        if self._under_way is None and self._calm is None:
            self.wake_s = max(now_s, self._free_s)

    def drop(self, now_s: float) -> None:
        """The replica is gone: whatever was under way is lost."""
        self._under_way = self._calm = None
        self.wake_s, self._free_s = math.inf, now_s

    def advance(self, now_s: float) -> list[Event]:
        """What happens at `wake_s`, which has come: a commit's events, or none and a plan."""
        if self._under_way is not None:
            return self._commit(now_s)
        if self._calm is not None:
            events = self._land(self._calm[1])
            self.check(self.scheduler)
            self._settle(now_s)
            return events
        self._begin(now_s)
        return []

    def _begin(self, now_s: float) -> None:
        """Plan the next step, or find out when to try again."""
        wake_s = self.scheduler.next_wake_s(now_s)
        if wake_s is None or wake_s > now_s:
            self.wake_s = math.inf if wake_s is None else wake_s
            return
        entry = begin_admission_step(self.scheduler, now_s) if self._leaps else None
        if entry is not None:
            self._under_way = entry
            self._takes(now_s, entry.shapes, len(entry.shapes))
            return
        plan = self._under_way = self.scheduler.plan(now_s)
        shapes = [(len(run.tokens), run.start) for run in plan.runs]
        self._takes(now_s, shapes, sum([run.sample is not None for run in plan.runs]))

    def _takes(self, now_s: float, shapes: Shapes, num_sampled: int) -> None:
        """The step that begins now ends when its time has passed; one without runs at once."""
        took_s = self._step_s(shapes, num_sampled, now_s) if shapes else 0.0
        self.num_steps += bool(shapes)
        self.busy_s += took_s
        self.wake_s = now_s + took_s

    def _commit(self, now_s: float) -> list[Event]:
        step, self._under_way = self._under_way, None
        assert step is not None
        if isinstance(step, AdmissionStep):
            events = commit_admission_step(self.scheduler, step, now_s, FILLER)
        else:
            sampled = tuple([_NONE if run.sample is None else _ONE for run in step.runs])
            events = self.scheduler.commit(step, StepResult(sampled), now_s)
        self.check(self.scheduler)
        self._settle(now_s)
        return events

    def _settle(self, now_s: float) -> None:
        """After a commit: glide through the calm steps, if there are any."""
        steps = count_steady_steps(self.scheduler) if self._leaps else 0
        glide = None
        if steps > 0:
            computed = [seq.num_computed for seq in self.scheduler.running]
            glide = self._pace.glide(computed, steps)
        if glide is None:
            self.wake_s = now_s if self.scheduler.has_work else math.inf
            return
        self.scheduler.background_budget.begin_step(now_s)  # as the plan of the first of them would
        self._calm = (now_s, steps, glide)
        self.wake_s = now_s + glide.seconds(steps)

    def _land(self, steps: int, *, all_steps: bool = True) -> list[Event]:
        """Do `steps` of the calm ones; the next plan is when the last of them ends."""
        assert self._calm is not None
        (from_s, _, glide), self._calm = self._calm, None
        took_s = glide.seconds(steps)
        self.num_steps += steps
        self.busy_s += took_s
        self.wake_s = self._free_s = from_s + took_s
        if not steps:
            return []
        return apply_steady_steps(self.scheduler, steps, self._free_s, FILLER, all_steps=all_steps)


def _fitted(pace: StepTimes) -> StepSeconds:
    return lambda shapes, num_sampled, _now_s: pace.step_s(shapes, num_sampled)


def _under(pace: StepTimes, sky: InterferenceSampler) -> StepSeconds:
    return lambda shapes, num_sampled, now_s: (
        pace.step_s(shapes, num_sampled) * sky.slowness(shapes, now_s)
    )


def _no_check(_scheduler: Scheduler) -> None:
    """Invariants are checked only where it was asked for."""
