"""One engine on a virtual clock: what would this configuration do under this load?

    arrivals ─add─▶ Scheduler ─plan─▶ priced, clock advances ─commit─▶ events ─▶ RequestTrace

Scheduler, block pool, prefix cache and batching policies are the classes that the engine runs; only
the runner is replaced by a model of step times. Batching, chunking, caching, preemption and
admission therefore cannot differ from the engine's. Every request gets the output length it names.

The load is open (a request is sent when it is due) or closed (`concurrency` clients, each of which
sends its next request when its last one has finished).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from ridgeline.engine.scheduler.plan import Run, RunOutput, StepPlan, StepResult
from ridgeline.engine.scheduler.scheduler import Scheduler
from ridgeline.errors import BadInput
from ridgeline.plan.simulate.kv_tiers import TierClock
from ridgeline.records import (
    Event,
    Finished,
    Request,
    RequestTrace,
    Sampling,
    Started,
    StepStat,
    Token,
)

Shapes = Sequence[tuple[int, int]]
StepSeconds = Callable[[Shapes, int], float]
"""(shapes of the runs, number of sampled positions) -> seconds of the step."""

FILLER = 0  # every sampled token


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """One request of the load: when it is due, its prompt, and the number of output tokens."""

    at_s: float
    prompt: tuple[int, ...]
    num_output: int
    kind: str = ""
    tenant: str = ""


class SimulationTrace(msgspec.Struct, frozen=True, kw_only=True):
    """Traces of a simulation; times on the virtual clock, which starts at 0."""

    requests: tuple[RequestTrace, ...]
    steps: tuple[StepStat, ...]
    duration_s: float


class _InFlight:
    """One simulated request in flight."""

    def __init__(self, arrival: Arrival) -> None:
        self.arrival = arrival
        self.sent_s = arrival.at_s
        self.started_s: float | None = None
        self.cached_tokens = 0
        self.token_s: list[float] = []
        self.finished_s: float | None = None

    def handle(self, event: Event) -> None:
        match event:
            case Started():
                self.started_s, self.cached_tokens = event.at_s, event.cached_tokens
            case Token():
                self.token_s.append(event.at_s)
            case Finished(reason="stop" | "length"):
                self.finished_s = event.at_s

    def trace(self, name: str, end_s: float) -> RequestTrace:
        done = self.finished_s is not None
        return RequestTrace(
            id=name,
            kind=self.arrival.kind,
            scheduled_s=self.sent_s,
            sent_s=self.sent_s,
            started_s=self.started_s,
            token_s=tuple(self.token_s),
            token_counts=(1,) * len(self.token_s),
            finished_s=self.finished_s if done else end_s,
            prompt_tokens=len(self.arrival.prompt),
            cached_tokens=self.cached_tokens,
            output_tokens=len(self.token_s),
            requested_tokens=self.arrival.num_output,
            finish_reason="length" if done else "abort",
            error=None if done else "unfinished when the simulation ended",
        )


def simulate(
    scheduler: Scheduler,
    arrivals: Sequence[Arrival],
    seconds: StepSeconds,
    *,
    end_s: float,
    concurrency: int | None = None,
) -> SimulationTrace:
    """Serve `arrivals`, ascending in time, until all have finished or `end_s` is reached.

    With a `concurrency` the loop is closed: at most that many requests are in flight, and the next
    one is sent when one finishes, but not before its `at_s`. Raises BadInput for a concurrency
    below 1, and what `Scheduler.add` raises for a request that could never be served.
    """
    if concurrency is not None and concurrency < 1:
        raise BadInput("the concurrency must be positive", value=concurrency, limit=">= 1")
    simulation = _ReplicaSimulation(scheduler, arrivals, seconds, concurrency)
    while simulation.now_s < end_s and simulation.advance():
        pass
    return simulation.result()


class _ReplicaSimulation:
    """The virtual clock, the requests, and the steps so far."""

    def __init__(
        self,
        scheduler: Scheduler,
        arrivals: Sequence[Arrival],
        seconds: StepSeconds,
        concurrency: int | None,
    ) -> None:
        self.scheduler, self.seconds, self.now_s = scheduler, seconds, 0.0
        self.tiers = TierClock(scheduler)
        self.closed, self.num_free = concurrency is not None, concurrency or math.inf
        self.lives = {str(i): _InFlight(arrival) for i, arrival in enumerate(arrivals)}
        self.due = list(reversed(self.lives.items()))
        self.steps: list[StepStat] = []

    def advance(self) -> bool:
        """Run one step, or move the clock to the next one; False at the end."""
        self.tiers.advance(self.now_s)
        while self._next_due_s <= self.now_s:
            self._add(*self.due.pop())
        wakes = [self._next_due_s] if self._next_due_s < math.inf else []
        wake_s = self.scheduler.next_wake_s(self.now_s)
        if wake_s is not None:
            wakes += (wake_s, self.tiers.next_end_s)
        if not wakes:
            return False
        if min(wakes) > self.now_s:
            self.now_s = min(wakes)
        else:
            self._step()
        return True

    @property
    def _next_due_s(self) -> float:
        """When the next request may be sent; inf while every client waits for an answer."""
        return self.due[-1][1].arrival.at_s if self.due and self.num_free else math.inf

    def _add(self, name: str, request: _InFlight) -> None:
        arrival = request.arrival
        self.num_free -= 1
        if self.closed:
            request.sent_s = self.now_s
        sampling = Sampling(temperature=0.0, max_tokens=arrival.num_output, ignore_eos=True)
        self.scheduler.add(
            Request(
                id=name,
                prompt=arrival.prompt,
                sampling=sampling,
                arrival_s=request.sent_s,
                tenant=arrival.tenant,
            )
        )

    def _step(self) -> None:
        began_s = self.now_s
        plan = self.scheduler.plan(began_s)
        view = self.scheduler.stats()
        shapes = tuple((len(run.tokens), run.num_cached) for run in plan.runs)
        num_sampled = sum(run.sample is not None for run in plan.runs)
        took_s = self.seconds(shapes, num_sampled) if shapes else 0.0
        took_s += self.tiers.transfer_s(plan)
        self.now_s += took_s
        for event in self.scheduler.commit(plan, _filled(plan), self.now_s):
            self.lives[event.request_id].handle(event)
            self.num_free += isinstance(event, Finished)
        if shapes:
            self.steps.append(
                StepStat(
                    index=plan.index,
                    at_s=began_s,
                    plan_s=0.0,
                    run_s=took_s,
                    shapes=shapes,
                    num_sampled=num_sampled,
                    **msgspec.structs.asdict(view),
                )
            )

    def result(self) -> SimulationTrace:
        waiting = {name for name, _ in self.due} if self.closed else set()
        seen = [
            (name, request)
            for name, request in self.lives.items()
            if request.arrival.at_s <= self.now_s and name not in waiting
        ]
        traces = tuple(request.trace(name, self.now_s) for name, request in seen)
        return SimulationTrace(requests=traces, steps=tuple(self.steps), duration_s=self.now_s)


def _filled(plan: StepPlan) -> StepResult:
    return StepResult(tuple(_sampled(run) for run in plan.runs))


def _sampled(run: Run) -> RunOutput:
    return RunOutput() if run.sample is None else RunOutput((FILLER,))
