"""The optimiser's simulator: the engine's scheduler on a virtual clock, with learnt step times.

Steps of a single sequence do not show what a second one would add: time per step, per run and per
byte of weights cannot be separated. Until larger batches were measured, a few assumed ones
(`_assumed_batches`) are used; the first measured batch replaces them.

Speculation by lookup (n-gram, suffix) is simulated as faster decode steps. How much faster follows
from replaying the workload's prompts, with the second half of each as the output, and the learnt
step times as the cost of a step by its rows.

With a calibration of this machine, its step times are used instead, scaled to the measurements;
weight formats that it does not cover use the learnt step times.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from ridgeline.config.settings import Settings
from ridgeline.engine.scheduler.scheduler import Scheduler
from ridgeline.errors import CannotRun
from ridgeline.measure.workload.base import LoadRequest
from ridgeline.optimize.environment import Load, arrival_times_s
from ridgeline.plan.calibration.roofline_fit import (
    MIN_STEPS,
    StepSample,
    StepTime,
    fit_step_time,
)
from ridgeline.plan.simulate.single import Arrival, simulate
from ridgeline.records import RunTrace, StepStat
from ridgeline.workflows.configuration_costs import StepBounds
from ridgeline.workflows.load.tokenized_workload import prompt_of
from ridgeline.workflows.optimize.calibrated_step_times import (
    CalibratedStepTimes,
    Shapes,
    StepSeconds,
)
from ridgeline.workflows.optimize.split_simulation import Split, simulate_split

ASSUMED_SHARE_PER_RUN = 0.06  # of a single-sequence step's time, for each further sequence
ASSUMED_BATCHES = (2, 4, 8, 16)
MAX_SAMPLES = 3_000  # steps in one fit
NUM_REPLAYED_PROMPTS = 8
REPLAY_ROWS = (1, 2, 3, 5, 9, 17)  # rows per sequence at which the replay's step cost is known


FlagEffect = Callable[[Settings, Settings], StepSeconds | None]
"""(settings, measured settings) → factor on the step times learnt from the latter, or None."""


class SimulatedEngine:
    """Predicts runs of engine configurations. `requests(n, seed)`: the tokenised workload.

    `flag_effect`: what flags change that only another server has.
    """

    def __init__(
        self,
        bounds_of: Callable[[Settings], StepBounds],
        scheduler_of: Callable[[Settings], Scheduler],
        requests: Callable[[int, int], Sequence[LoadRequest]],
        step_times: CalibratedStepTimes | None = None,
        flag_effect: FlagEffect | None = None,
    ) -> None:
        self._bounds_of, self._scheduler_of, self._requests = bounds_of, scheduler_of, requests
        self._calibrated, self._flag_effect = step_times, flag_effect
        self._learnt: Settings | None = None
        self._samples: dict[tuple[str, str | None], list[StepSample]] = {}
        self._fit: StepTime | None = None

    def learn(self, settings: Settings, steps: Sequence[StepStat]) -> None:
        """Fit again to all steps measured with these weights; other weights use other kernels."""
        if self._calibrated is not None:
            self._calibrated.learn(settings, steps)
        bounds = self._bounds_of(settings)
        samples = self._samples.setdefault((settings.model, settings.quantization), [])
        samples += [_sample(bounds, step) for step in steps if step.shapes]
        del samples[:-MAX_SAMPLES]
        self._learnt = settings
        if len(samples) >= MIN_STEPS:
            self._fit = fit_step_time([*samples, *_assumed_batches(bounds, samples)])

    def run(self, settings: Settings, load: Load) -> RunTrace:
        """Simulate one run. CannotRun before enough steps were learnt or calibrated."""
        outcome = simulate(
            self._scheduler_of(settings),
            self._arrivals(load),
            self._step_s(settings, load.seed),
            end_s=load.window_s + load.grace_s,
        )
        return load.simulated(outcome.duration_s, outcome.requests, outcome.steps)

    def run_split(self, settings: Settings, load: Load, split: Split) -> RunTrace:
        """Simulate one run of servers with prefill and decode apart. CannotRun as above."""
        receiver = msgspec.structs.replace(settings, enable_prefix_caching=True)
        return simulate_split(
            split,
            (partial(self._scheduler_of, settings), partial(self._scheduler_of, receiver)),
            self._step_s(settings, load.seed),
            self._arrivals(load),
            load,
        )

    def _step_s(self, settings: Settings, seed: int) -> StepSeconds:
        """Step times, decode steps shortened by what lookups draft."""
        plain_s = self._plain_step_s(settings)
        lookup_gain = self._lookup_gain(settings, seed, plain_s)

        def step_s(shapes: Shapes, num_sampled: int) -> float:
            seconds = plain_s(shapes, num_sampled)
            if lookup_gain is not None and all(new == 1 for new, _ in shapes):
                return seconds / lookup_gain(len(shapes))
            return seconds

        return step_s

    def _plain_step_s(self, settings: Settings) -> StepSeconds:
        """Step times without speculation: calibrated if there are any, else as learnt."""
        calibrated = None if self._calibrated is None else self._calibrated.of(settings)
        if calibrated is not None:
            return calibrated
        fit = self._fit
        if fit is None:
            raise CannotRun("too few steps were measured to predict from", limit=MIN_STEPS)
        bounds = self._bounds_of(settings)
        effect = None
        if self._flag_effect is not None and self._learnt is not None:
            effect = self._flag_effect(settings, self._learnt)

        def step_s(shapes: Shapes, num_sampled: int) -> float:
            num_tokens = sum([new for new, _ in shapes])
            plain_s = fit.seconds(bounds.bound_s(shapes, num_sampled), len(shapes), num_tokens)
            return plain_s if effect is None else plain_s * effect(shapes, num_sampled)

        return step_s

    def _lookup_gain(
        self, settings: Settings, seed: int, plain_s: StepSeconds
    ) -> Callable[[int], float] | None:
        """The factor by which lookups shorten decode steps, per number of sequences, or None."""
        speculative = settings.speculative_config
        if speculative is None or speculative.method not in ("ngram", "suffix", "auto"):
            return None
        prompts = [request.prompt for request in self._requests(NUM_REPLAYED_PROMPTS, seed)]
        texts = [(p, len(p) // 2) for p in prompts if isinstance(p, tuple) and len(p) > 3]

        @functools.cache
        def gain(num_runs: int) -> float:
            return _replay_gain(texts, num_runs, plain_s)

        return lambda num_runs: gain(1 << (num_runs.bit_length() - 1))

    def _arrivals(self, load: Load) -> list[Arrival]:
        times_s = arrival_times_s(load)
        requests = self._requests(len(times_s), load.seed)
        return [
            Arrival(
                at_s=at_s,
                prompt=prompt_of(request),
                num_output=request.max_tokens,
                kind=request.kind,
                tenant=request.tenant,
            )
            for request, at_s in zip(requests, times_s, strict=True)
        ]


def _replay_gain(
    texts: Sequence[tuple[Sequence[int], int]], num_runs: int, plain_s: StepSeconds
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
    result = replay(texts, NgramDrafter(2, 4), curve, num_runs, max(REPLAY_ROWS) - 1)
    return max(1.0, result.gain)


def _sample(bounds: StepBounds, step: StepStat) -> StepSample:
    bound_s = bounds.bound_s(step.shapes, step.num_sampled)
    return StepSample(bound_s, len(step.shapes), step.num_tokens, step.run_s + step.plan_s)


def _assumed_batches(bounds: StepBounds, samples: Sequence[StepSample]) -> list[StepSample]:
    """Assumed decode batches, a few per measured single decode; none once batches were measured."""
    if any(sample.num_runs > 1 for sample in samples):
        return []
    single_s = sorted(sample.seconds for sample in samples if sample.num_tokens == 1)
    if not single_s:
        return []
    typical_s = single_s[len(single_s) // 2]
    batches = [
        StepSample(
            bounds.bound_s([(1, 256)] * batch, batch),
            batch,
            batch,
            typical_s * (1 + ASSUMED_SHARE_PER_RUN * (batch - 1)),
        )
        for batch in ASSUMED_BATCHES
    ]
    return batches * max(1, len(single_s) // 20)
