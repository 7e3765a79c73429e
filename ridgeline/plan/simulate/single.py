"""The engine's own scheduler on a virtual clock: what would this configuration do under this load?

    arrivals ─add─▶ Scheduler ─plan─▶ priced, the clock moves on ─commit─▶ events ─▶ RequestTrace

The scheduler, the block pool, the prefix cache and the batching policies are the very classes that
serve; only the runner is a model (`step_time`). So batching, chunking, caching, preemption and
admission cannot drift from what the engine does. Answers have the length that was asked for.

Two kinds of load: open (a request is sent when it is due, whatever the engine is doing) and closed
(`concurrency` clients, each of which sends its next request when it has the answer to its last).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from ridgeline.engine.scheduler.plan import Run, RunOutput, StepPlan, StepResult
from ridgeline.engine.scheduler.scheduler import Scheduler
from ridgeline.errors import BadInput
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
"""(shapes of the runs, how many of them sample) -> seconds the step takes."""

FILLER = 0  # every simulated output token: answers share nothing that a prefix cache could reuse


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """One request of the load: when it is due, its prompt's tokens, how many tokens it gets."""

    at_s: float
    prompt: tuple[int, ...]
    num_output: int
    kind: str = ""
    tenant: str = ""


class SimulationTrace(msgspec.Struct, frozen=True, kw_only=True):
    """What would happen; instants on the virtual clock, which begins at 0."""

    requests: tuple[RequestTrace, ...]
    steps: tuple[StepStat, ...]
    duration_s: float


class _Life:
    """One simulated request in flight."""

    def __init__(self, arrival: Arrival) -> None:
        self.arrival = arrival
        self.sent_s = arrival.at_s
        self.started_s: float | None = None
        self.cached_tokens = 0
        self.token_s: list[float] = []
        self.finished_s: float | None = None

    def note(self, event: Event) -> None:
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
            asked_tokens=self.arrival.num_output,
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
    """Run `arrivals` (ascending) through a fresh scheduler until all are served or `end_s` comes.

    With a `concurrency` the loop is closed: that many requests are in flight at most, and the next
    one is sent when one ends, not before its own `at_s`. Raises what `Scheduler.add` raises for a
    request that could never be served, and BadInput for a concurrency below one.
    """
    if concurrency is not None and concurrency < 1:
        raise BadInput("the concurrency must be positive", value=concurrency, limit=">= 1")
    world = _ReplicaSimulation(scheduler, arrivals, seconds, concurrency)
    while world.now_s < end_s and world.advance():
        pass
    return world.result()


class _ReplicaSimulation:
    """The virtual clock and everything that moves on it."""

    def __init__(
        self,
        scheduler: Scheduler,
        arrivals: Sequence[Arrival],
        seconds: StepSeconds,
        concurrency: int | None,
    ) -> None:
        self.scheduler, self.seconds, self.now_s = scheduler, seconds, 0.0
        self.closed, self.num_free = concurrency is not None, concurrency or math.inf
        self.lives = {str(i): _Life(arrival) for i, arrival in enumerate(arrivals)}
        self.due = list(reversed(self.lives.items()))
        self.steps: list[StepStat] = []

    def advance(self) -> bool:
        """One step, or a leap to the next instant at which there is one; False at the end."""
        while self._next_due_s <= self.now_s:
            self._add(*self.due.pop())
        wakes = [self._next_due_s] if self._next_due_s < math.inf else []
        wake_s = self.scheduler.next_wake_s(self.now_s)
        if wake_s is not None:
            wakes.append(wake_s)
        if not wakes:
            return False
        if min(wakes) > self.now_s:
            self.now_s = min(wakes)
        else:
            self._step()
        return True

    @property
    def _next_due_s(self) -> float:
        """When the next request may be sent; never, while every client awaits an answer."""
        return self.due[-1][1].arrival.at_s if self.due and self.num_free else math.inf

    def _add(self, name: str, life: _Life) -> None:
        arrival = life.arrival
        self.num_free -= 1
        if self.closed:
            life.sent_s = self.now_s
        sampling = Sampling(temperature=0.0, max_tokens=arrival.num_output, ignore_eos=True)
        self.scheduler.add(
            Request(
                id=name,
                prompt=arrival.prompt,
                sampling=sampling,
                arrival_s=life.sent_s,
                tenant=arrival.tenant,
            )
        )

    def _step(self) -> None:
        began_s = self.now_s
        plan = self.scheduler.plan(began_s)
        view = self.scheduler.stats()
        shapes = tuple((len(run.tokens), run.start) for run in plan.runs)
        num_sampled = sum(run.sample is not None for run in plan.runs)
        took_s = self.seconds(shapes, num_sampled) if shapes else 0.0
        self.now_s += took_s
        for event in self.scheduler.commit(plan, _filled(plan), self.now_s):
            self.lives[event.request_id].note(event)
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
            (name, life)
            for name, life in self.lives.items()
            if life.arrival.at_s <= self.now_s and name not in waiting
        ]
        traces = tuple(life.trace(name, self.now_s) for name, life in seen)
        return SimulationTrace(requests=traces, steps=tuple(self.steps), duration_s=self.now_s)


def _filled(plan: StepPlan) -> StepResult:
    return StepResult(tuple(_sampled(run) for run in plan.runs))


def _sampled(run: Run) -> RunOutput:
    return RunOutput() if run.sample is None else RunOutput((FILLER,))
