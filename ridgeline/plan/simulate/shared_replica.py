"""One replica that several schedulers share: pipeline stages, attention groups, several models.

Every scheduler is a lane with its own sequences and its own part of the memory, and what the lanes
share is a device on which their steps take turns:

    models of one device       one step at a time, that of the lane which waited longest first
    stages of a pipeline       a step passes them one after another and overtakes none; as many
                               steps are under way as there are stages
    attention groups           all groups step together, for as long as the fullest one needs, since
                               they meet at the experts of every layer

With several models each model of a pipeline has its own lanes, so that the two combine. A new
request takes the emptiest lane of its model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ridgeline.engine.scheduler.scheduler import Scheduler
from ridgeline.plan.simulate.replica import SimulatedReplica
from ridgeline.plan.step_time.simulated import StepTimes
from ridgeline.records import Event, Finished, Request


class DeviceStages:
    """The stages of a pipeline, each of which takes an equal part of every step.

    One stage is a device whose steps take turns.
    """

    def __init__(self, num_stages: int) -> None:
        self._free_s = [0.0] * num_stages

    def begin_s(self, now_s: float) -> float:
        """When the next step can begin."""
        return max(now_s, self._free_s[0])

    def end_s(self, now_s: float, step_s: float) -> float:
        """Begin a step of `step_s` seconds over all stages; when it ends."""
        part_s, at_s = step_s / len(self._free_s), now_s
        for stage, free_s in enumerate(self._free_s):
            at_s = self._free_s[stage] = max(at_s, free_s) + part_s
        return at_s


class CommonRounds:
    """Attention groups: steps that begin together also end together."""

    def __init__(self) -> None:
        self._began_s, self.end_of_round_s = -math.inf, -math.inf

    def begin_s(self, now_s: float) -> float:
        """When the next step can begin: now if a round begins now, or when the present one ends."""
        return now_s if now_s == self._began_s else max(now_s, self.end_of_round_s)

    def end_s(self, now_s: float, step_s: float) -> float:
        """Begin the step of one group; the end of its round, as far as it is known."""
        self._began_s = now_s
        self.end_of_round_s = max(self.end_of_round_s, now_s + step_s)
        return self.end_of_round_s


class SharedReplica:
    """Lanes (model, scheduler, step times) on one device; the interface of `SimulatedReplica`.

    `groups`: the lanes are attention groups, else `num_stages` are those of a pipeline. Every step
    is planned: what the lanes do depends on each other.
    """

    def __init__(
        self,
        lanes: Sequence[tuple[str, Scheduler, StepTimes]],
        *,
        num_stages: int = 1,
        groups: bool = False,
    ) -> None:
        self._rounds = CommonRounds() if groups else None
        device = self._rounds or DeviceStages(num_stages)
        self._models = [model for model, _, _ in lanes]
        self._lanes = [
            SimulatedReplica(scheduler, times, fast_forward=False, device=device)
            for _, scheduler, times in lanes
        ]
        self._turns = list(range(len(lanes)))  # those that stepped longest ago first
        self._parallel = len(lanes) if groups else num_stages
        self._lane_of: dict[str, int] = {}
        self._num_open = [0] * len(lanes)

    @property
    def wake_s(self) -> float:
        return min([lane.wake_s for lane in self._lanes])

    @property
    def num_steps(self) -> int:
        return sum([lane.num_steps for lane in self._lanes])

    @property
    def busy_s(self) -> float:
        """Seconds of all stages or groups, over their number."""
        return sum([lane.busy_s for lane in self._lanes]) / self._parallel

    @property
    def schedulers(self) -> tuple[Scheduler, ...]:
        return tuple(lane.scheduler for lane in self._lanes)

    @property
    def check(self) -> Callable[[Scheduler], None]:
        return self._lanes[0].check

    @check.setter
    def check(self, check: Callable[[Scheduler], None]) -> None:
        for lane in self._lanes:
            lane.check = check

    def add(self, request: Request, now_s: float, model: str, *, has_kv: bool) -> None:
        """Take a request for `model` at `now_s`. Raises what `Scheduler.add` raises."""
        lanes = [i for i, name in enumerate(self._models) if name == model]
        chosen = min(lanes, key=lambda i: self._num_open[i])
        self._lanes[chosen].add(request, now_s, has_kv=has_kv)
        self._lane_of[request.id] = chosen
        self._num_open[chosen] += 1

    def advance(self, now_s: float) -> list[Event]:
        """Commit the steps that end now, then begin those that can, each lane in its turn."""
        events: list[Event] = []
        for lane in self._lanes:
            if lane.wake_s <= now_s and lane.is_stepping:
                events += lane.advance(now_s)
        for number in list(self._turns):
            lane = self._lanes[number]
            while lane.wake_s <= now_s:
                events += lane.advance(now_s)
                if lane.is_stepping and lane.wake_s > now_s:
                    self._turns.remove(number)
                    self._turns.append(number)
        if self._rounds is not None:
            for lane in self._lanes:
                if lane.is_stepping:
                    lane.wake_s = self._rounds.end_of_round_s
        for event in events:
            if isinstance(event, Finished):
                self._num_open[self._lane_of.pop(event.request_id)] -= 1
        return events

    def stop(self, now_s: float, request_ids: Sequence[str]) -> list[int]:
        """The replica failed: output tokens that each of the requests had until then."""
        known = [(self._lanes[self._lane_of[name]], name) for name in request_ids]
        return [lane.stop(now_s, [name])[0] for lane, name in known]
