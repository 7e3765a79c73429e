"""The simulator as the optimiser's simulator: plan's virtual engine with step times learnt from real
ones.

Steps of one sequence cannot tell what a second one would cost: the time per step, per run and of
the weights are then one number. Until fuller steps have been measured, a few made-up ones stand
in for them (`_prior`), and the first measured batch overrules them.

Lookups (n-gram, suffix) are simulated as faster decode steps: how much faster is what replaying the
workload's own prompts gives, the later half of each taken for an answer, with the learnt step times
as the curve over rows.

With a calibration of this machine (`priced.py`) its step times are used instead, scaled to what was
measured; weights in a format that it does not have are priced by what was learnt, as above.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import msgspec

from ridgeline.config.settings import Settings
from ridgeline.engine.scheduler.scheduler import Scheduler
from ridgeline.errors import CannotRun
from ridgeline.measure.workload.base import LoadRequest
from ridgeline.modelspec.cost import CostModel, step_work
from ridgeline.optimize.environment import Load, arrival_times_s
from ridgeline.plan.calibration.roofline_fit import (
    LEAST_STEPS,
    StepSample,
    StepTime,
    fit_step_time,
)
from ridgeline.plan.simulate.single import Arrival, simulate
from ridgeline.records import RunTrace, StepStat
from ridgeline.roofline import Peaks, bound
from ridgeline.workflows.optimize.calibrated_step_times import Prices

PRIOR_PER_RUN = 0.06  # share of a lone step's time that each further sequence is believed to add
PRIOR_BATCHES = (2, 4, 8, 16)
MOST_STEPS = 3_000  # that one fit looks at
REPLAYED = 8  # prompts
REPLAY_ROWS = (1, 2, 3, 5, 9, 17)  # of a sequence, that the curve is made for
Shapes = Sequence[tuple[int, int]]


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """What prices the steps of one configuration on this machine."""

    model: CostModel
    peaks: Peaks

    def bound_s(self, shapes: Sequence[tuple[int, int]], num_sampled: int) -> float:
        return bound(step_work(self.model, shapes, num_sampled), self.peaks).seconds


class SimulatedEngine:
    """See the head of this file. `requests(n, seed)` is the tokenised workload."""

    def __init__(
        self,
        costs_of: Callable[[Settings], Costs],
        scheduler_of: Callable[[Settings], Scheduler],
        requests: Callable[[int, int], Sequence[LoadRequest]],
        prices: Prices | None = None,
    ) -> None:
        self._costs_of, self._scheduler_of, self._requests = costs_of, scheduler_of, requests
        self._prices = prices
        self._samples: dict[tuple[str, str | None], list[StepSample]] = {}
        self._time: StepTime | None = None

    def learn(self, settings: Settings, steps: Sequence[StepStat]) -> None:
        """Refit to everything measured with these weights; other weights have other kernels."""
        if self._prices is not None:
            self._prices.learn(settings, steps)
        costs = self._costs_of(settings)
        samples = self._samples.setdefault((settings.model, settings.quantization), [])
        samples += [_sample(costs, step) for step in steps if step.shapes]
        del samples[:-MOST_STEPS]
        if len(samples) >= LEAST_STEPS:
            self._time = fit_step_time([*samples, *_prior(costs, samples)])

    def run(self, settings: Settings, load: Load) -> RunTrace:
        """Simulate one run. Raises CannotRun before enough steps were learnt, or calibrated."""
        plain_s = self._plain(settings)
        gain = self._lookups(settings, load.seed, plain_s)

        def seconds(shapes: Sequence[tuple[int, int]], num_sampled: int) -> float:
            decodes = gain is not None and all(new == 1 for new, _ in shapes)
            return plain_s(shapes, num_sampled) / (gain(len(shapes)) if decodes and gain else 1.0)

        done = simulate(
            self._scheduler_of(settings),
            self._arrivals(load),
            seconds,
            end_s=load.window_s + load.grace_s,
        )
        return RunTrace(
            target="simulated",
            workload="simulated",
            arrivals=f"poisson:{load.rate!r}",
            seed=load.seed,
            started_unix_s=0.0,
            duration_s=max(done.duration_s, load.window_s),
            requests=done.requests,
            steps=done.steps,
        )

    def _plain(self, settings: Settings) -> Callable[[Shapes, int], float]:
        """Seconds of steps without drafts: calibrated ones where there are, else as learnt."""
        priced = None if self._prices is None else self._prices.of(settings)
        if priced is not None:
            return priced
        time = self._time
        if time is None:
            raise CannotRun("too few steps were measured to predict from", limit=LEAST_STEPS)
        costs = self._costs_of(settings)

        def plain_s(shapes: Shapes, num_sampled: int) -> float:
            num_tokens = sum([new for new, _ in shapes])
            return time.seconds(costs.bound_s(shapes, num_sampled), len(shapes), num_tokens)

        return plain_s

    def _lookups(
        self, settings: Settings, seed: int, plain_s: Callable[[Shapes, int], float]
    ) -> Callable[[int], float] | None:
        """By how much lookups shorten the decode steps of so many sequences; None without them."""
        asked = settings.speculative_config
        if asked is None or asked.method not in ("ngram", "suffix", "auto"):
            return None
        prompts = [each.prompt for each in self._requests(REPLAYED, seed)]
        texts = [(p, len(p) // 2) for p in prompts if isinstance(p, tuple) and len(p) > 3]

        @functools.cache
        def gain(num_runs: int) -> float:
            return _gain(texts, num_runs, plain_s)

        return lambda num_runs: gain(1 << (num_runs.bit_length() - 1))

    def _arrivals(self, load: Load) -> list[Arrival]:
        dues = arrival_times_s(load)
        requests = self._requests(len(dues), load.seed)
        return [_arrival(*pair) for pair in zip(requests, dues, strict=True)]


def _gain(
    texts: Sequence[tuple[Sequence[int], int]],
    num_runs: int,
    plain_s: Callable[[Shapes, int], float],
) -> float:
    from ridgeline.engine.speculate.depth_control.replay import replay
    from ridgeline.engine.speculate.depth_control.step_cost import CONTEXT, StepTimeCurve
    from ridgeline.engine.speculate.drafters.ngram import NgramDrafter

    curve = StepTimeCurve(
        {
            (num_runs, num_runs * rows): plain_s([(rows, CONTEXT)] * num_runs, num_runs * rows)
            for rows in REPLAY_ROWS
        }
    )
    found = replay(texts, NgramDrafter(2, 4), curve, num_runs, max(REPLAY_ROWS) - 1)
    return max(1.0, found.gain)


def _arrival(request: LoadRequest, due_s: float) -> Arrival:
    assert isinstance(request.prompt, tuple), "the workload is tokenised before"
    return Arrival(
        at_s=due_s,
        prompt=request.prompt,
        num_output=request.max_tokens,
        kind=request.kind,
        tenant=request.tenant,
    )


def _sample(costs: Costs, step: StepStat) -> StepSample:
    bound_s = costs.bound_s(step.shapes, step.num_sampled)
    return StepSample(bound_s, len(step.shapes), step.num_tokens, step.run_s + step.plan_s)


def _prior(costs: Costs, samples: Sequence[StepSample]) -> list[StepSample]:
    """Made-up batches of decodes, a few per measured lone one; none once there are real ones."""
    if any(sample.num_runs > 1 for sample in samples):
        return []
    lone = sorted(sample.seconds for sample in samples if sample.num_tokens == 1)
    if not lone:
        return []
    typical_s = lone[len(lone) // 2]
    made = [
        StepSample(
            costs.bound_s([(1, 256)] * batch, batch),
            batch,
            batch,
            typical_s * (1 + PRIOR_PER_RUN * (batch - 1)),
        )
        for batch in PRIOR_BATCHES
    ]
    return made * max(1, len(lone) // 20)
