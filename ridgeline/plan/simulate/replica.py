"""One replica of a simulated fleet: the engine's own scheduler, driven on a virtual clock.

    idle ──request──▶ stepping ──commit──▶ decoding ──▶ stepping …
                                              │
                                              └─request─▶ decoding until the step under way ends

While stepping, one step is under way: it has been planned, and is committed when its time has
passed. A step that only admits requests is not planned but applied with the same outcome
(`fast_forward_prefill`). While decoding, the replica is somewhere within steps that only decode
(`fast_forward_decode`); they are applied together just before something else happens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from ridgeline.engine.scheduler.plan import RunOutput, StepPlan, StepResult
from ridgeline.engine.scheduler.scheduler import Scheduler
from ridgeline.plan.calibration.interference import InterferenceSampler
from ridgeline.plan.simulate.fast_forward_decode import (
    apply_steady_steps,
    count_steady_steps,
    insert_transferred_kv,
)
from ridgeline.plan.simulate.fast_forward_prefill import (
    AdmissionStep,
    Shapes,
    begin_admission_step,
    commit_admission_step,
)
from ridgeline.plan.simulate.kv_tiers import TierClock
from ridgeline.plan.step_time.simulated import LinearSteps, StepTimes
from ridgeline.records import Event, Finished, Request

FILLER = 0  # every sampled token
_SAMPLED = RunOutput((FILLER,))
_NOT_SAMPLED = RunOutput()


class Device(Protocol):
    """Where steps run."""

    def begin_s(self, now_s: float) -> float:
        """When the next step can begin, `now_s` at the earliest."""

    def end_s(self, now_s: float, step_s: float) -> float:
        """When a step of `step_s` seconds ends that begins now."""


class OwnDevice:
    """A device that no other scheduler uses."""

    def begin_s(self, now_s: float) -> float:
        return now_s

    def end_s(self, now_s: float, step_s: float) -> float:
        return now_s + step_s


class SimulatedReplica:
    """Advances when `advance` is called at `wake_s`, the time of its next event (inf: never).

    With `fast_forward` False every step is planned and committed, which is slow and gives the same
    outcome. Interference implies it, since no two steps then lie on one line.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        step_times: StepTimes,
        *,
        fast_forward: bool = True,
        interference: InterferenceSampler | None = None,
        device: Device | None = None,
    ) -> None:
        self.scheduler, self._step_times, self._interference = scheduler, step_times, interference
        self._device = OwnDevice() if device is None else device
        self._fast_forward = fast_forward and interference is None
        self._tiers = TierClock(scheduler)
        self.wake_s = math.inf
        self.num_steps = 0
        self.busy_s = 0.0
        self.check: Callable[[Scheduler], None] = _no_check
        self._free_s = 0.0  # when the step under way ends
        self._under_way: StepPlan | AdmissionStep | None = None
        self._decoding: tuple[float, int, LinearSteps] | None = None  # since, steps, their times

    @property
    def schedulers(self) -> tuple[Scheduler, ...]:
        return (self.scheduler,)

    @property
    def is_stepping(self) -> bool:
        """Whether a planned step is under way."""
        return self._under_way is not None

    def add(
        self, request: Request, now_s: float, _model: str = "", *, has_kv: bool = False
    ) -> None:
        """Take a request at `now_s`; `has_kv`: with the cache of its prompt, computed elsewhere.

        Raises what `Scheduler.add` raises.
        """
        if has_kv:
            insert_transferred_kv(self.scheduler, request.prompt, request.tenant, now_s)
        if self._decoding is not None:
            from_s, num_steps, times = self._decoding
            steps_so_far = times.steps_until(now_s - from_s)
            if steps_so_far < num_steps:
                self._apply_decoding(steps_so_far, all_steps=False)
        self._tiers.advance(now_s)
        self.scheduler.add(request)
        if self._under_way is None and self._decoding is None:
            self.wake_s = max(now_s, self._free_s)

    def stop(self, now_s: float, request_ids: Sequence[str]) -> list[int]:
        """The replica failed and the step under way is lost: output tokens that each of the
        requests had until then."""
        if self._decoding is not None:
            from_s, num_steps, times = self._decoding
            steps = min(num_steps, times.steps_until(now_s - from_s))
            whole = steps - (times.seconds(steps) > now_s - from_s)
            self._apply_decoding(max(0, whole), all_steps=False)
        # `add` has applied the step under way, which is lost.
        early = {seq.request.id for seq in self.scheduler.running} if self._free_s > now_s else ()
        self._under_way = None
        self.wake_s, self._free_s = math.inf, now_s
        return [
            _num_output(self.scheduler.cancel(name, now_s)) - (name in early)
            for name in request_ids
        ]

    def advance(self, now_s: float) -> list[Event]:
        """Commit the step that ends now and return its events, or plan the next step."""
        if self._under_way is not None:
            return self._commit(now_s)
        if self._decoding is not None:
            events = self._apply_decoding(self._decoding[1])
            self.check(self.scheduler)
            self._start_decoding(now_s)
            return events
        self._plan(now_s)
        return []

    def _plan(self, now_s: float) -> None:
        begins_s = self._device.begin_s(now_s)
        if begins_s > now_s:
            self.wake_s = begins_s
            return
        self._tiers.advance(now_s)
        wake_s = self.scheduler.next_wake_s(now_s)
        if wake_s is None or wake_s > now_s:
            self.wake_s = math.inf if wake_s is None else min(wake_s, self._tiers.next_end_s)
            return
        admission = begin_admission_step(self.scheduler, now_s) if self._fast_forward else None
        if admission is not None:
            self._under_way = admission
            self._start_step(now_s, admission.shapes, len(admission.shapes))
            return
        plan = self._under_way = self.scheduler.plan(now_s)
        shapes = [(len(run.tokens), run.num_cached) for run in plan.runs]
        num_sampled = sum([run.sample is not None for run in plan.runs])
        self._start_step(now_s, shapes, num_sampled, self._tiers.transfer_s(plan))

    def _start_step(
        self, now_s: float, shapes: Shapes, num_sampled: int, transfer_s: float = 0.0
    ) -> None:
        """Set when the step that begins now will end: at once if it has no runs."""
        step_s = transfer_s + (self._step_times.step_s(shapes, num_sampled) if shapes else 0.0)
        if shapes and self._interference is not None:
            step_s *= self._interference.slowness(shapes, now_s)
        self.num_steps += bool(shapes)
        self.busy_s += step_s
        self.wake_s = self._device.end_s(now_s, step_s)

    def _commit(self, now_s: float) -> list[Event]:
        step, self._under_way = self._under_way, None
        assert step is not None
        if isinstance(step, AdmissionStep):
            events = commit_admission_step(self.scheduler, step, now_s, FILLER)
        else:
            outputs = tuple([_NOT_SAMPLED if run.sample is None else _SAMPLED for run in step.runs])
            events = self.scheduler.commit(step, StepResult(outputs), now_s)
        self.check(self.scheduler)
        self._start_decoding(now_s)
        return events

    def _start_decoding(self, now_s: float) -> None:
        """After a commit: if the next steps only decode, wake at the end of the last of them."""
        steps = count_steady_steps(self.scheduler) if self._fast_forward else 0
        times = None
        if steps > 0:
            computed = [seq.num_computed for seq in self.scheduler.running]
            times = self._step_times.linear_steps(computed, steps)
        if times is None:
            self.wake_s = now_s if self.scheduler.has_work else math.inf
            return
        self.scheduler.background_budget.begin_step(now_s)  # as the first plan would
        self._decoding = (now_s, steps, times)
        self.wake_s = now_s + times.seconds(steps)

    def _apply_decoding(self, steps: int, *, all_steps: bool = True) -> list[Event]:
        """Apply the first `steps` decode steps; the next plan follows the last of them."""
        assert self._decoding is not None
        (from_s, _, times), self._decoding = self._decoding, None
        took_s = times.seconds(steps)
        self.num_steps += steps
        self.busy_s += took_s
        self.wake_s = self._free_s = from_s + took_s
        if not steps:
            return []
        return apply_steady_steps(self.scheduler, steps, self._free_s, FILLER, all_steps=all_steps)


def _num_output(events: Sequence[Event]) -> int:
    """Output tokens of a request, by the events of its end."""
    return sum(event.usage.completion_tokens for event in events if isinstance(event, Finished))


def _no_check(_scheduler: Scheduler) -> None:
    """Invariants are checked in tests only."""
