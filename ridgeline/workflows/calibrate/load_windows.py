"""Measure an engine under load: every step, with an event loop that reads the tokens.

Steps timed one kind at a time show nothing of a client that shares the interpreter with the engine,
of a queue, or of how the machine varies from one second to the next. A few seconds of Poisson
arrivals with many lengths of prompts and outputs, at three shares of the capacity, do.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median

import msgspec

from ridgeline.measure.client.engine_target import EngineTarget
from ridgeline.measure.client.load_client import LoadOptions, run_load
from ridgeline.measure.workload.arrivals import RecordedArrivals
from ridgeline.measure.workload.base import LoadRequest
from ridgeline.plan.calibration.interference import LoadedStep, has_prompt
from ridgeline.records import RequestTrace, RunTrace, StepStat
from ridgeline.workflows.calibrate.step_bench import StepBench

LOAD_SHARES = (0.3, 0.55, 0.75)  # of the capacity
WINDOW_S, GRACE_S = 10.0, 3.0
PROMPT_TOKENS, OUTPUT_TOKENS = (16, 448), (8, 96)  # log-uniform between these
SAME_START_S = 1e-3  # between the recorded start of a step and that of its request
_MEAN_PROMPT = 128  # tokens of a prompt that costs about the mean
_SHARED_BATCH = 8  # sequences per decode step, to estimate the capacity


class LoadWindow(msgspec.Struct, frozen=True, kw_only=True):
    """One window at a share of the capacity.

    `waits_s`: of each request that found the engine idle, the time from the request to its first
    token, without the step.
    """

    model: str
    quantization: str | None
    share: float
    steps: tuple[LoadedStep, ...]
    waits_s: tuple[float, ...]


class _MixedWorkload:
    """Requests with many lengths of prompts and outputs."""

    name = "calibrate"

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def sample(self, n: int, seed: int) -> Iterator[LoadRequest]:
        rng = random.Random(f"{seed}/lengths")
        for i in range(n):
            length = _log_uniform(rng, PROMPT_TOKENS)
            prompt = tuple(rng.randrange(3, self._vocab_size) for _ in range(length))
            yield LoadRequest(
                id=f"c{i}",
                kind="calibrate",
                prompt=prompt,
                max_tokens=_log_uniform(rng, OUTPUT_TOKENS),
            )


def measure_windows(
    bench: StepBench, model: str, quantization: str | None, window_s: float = WINDOW_S
) -> Iterator[LoadWindow]:
    """One window per share of the capacity."""
    prefill_s = bench.prefill(_MEAN_PROMPT).seconds
    decode_s = bench.decode(_SHARED_BATCH, _MEAN_PROMPT).seconds
    low, high = OUTPUT_TOKENS
    mean_output = (high - low) / math.log(high / low)
    capacity = 1 / (prefill_s + mean_output * decode_s / _SHARED_BATCH)
    for seed, share in enumerate(LOAD_SHARES):
        run = asyncio.run(_run_window(bench, share * capacity, seed, window_s))
        yield LoadWindow(
            model=model,
            quantization=quantization,
            share=share,
            steps=tuple(busy_steps(run.steps)),
            waits_s=tuple(first_token_waits_s(run.requests, run.steps)),
        )


async def _run_window(bench: StepBench, rate: float, seed: int, window_s: float) -> RunTrace:
    rng = random.Random(f"{seed}/arrivals")
    count = max(4, round(rate * window_s))
    arrivals = RecordedArrivals(
        at_s=tuple(sorted(rng.uniform(0.0, window_s) for _ in range(count))),
        label=f"poisson:{rate!r}",
        rate=rate,
    )
    options = LoadOptions(num_requests=count, grace_s=min(GRACE_S, window_s), seed=seed)
    bench.engine.drain_steps()
    workload = _MixedWorkload(bench.engine.resolved.spec.vocab_size)
    return await run_load(EngineTarget(bench.engine), workload, arrivals, options)


def busy_steps(steps: Sequence[StepStat]) -> Iterator[LoadedStep]:
    """Each step with its seconds: until the next step if a sequence continues, else its own."""
    for step, after in pairwise(steps):
        if not step.shapes:
            continue
        ends = {new + cached for new, cached in step.shapes}
        continues = any(cached in ends for _, cached in after.shapes)
        yield LoadedStep(
            at_s=step.at_s,
            seconds=after.at_s - step.at_s if continues else step.plan_s + step.run_s,
            shapes=step.shapes,
            num_sampled=step.num_sampled,
        )


def first_token_waits_s(
    requests: Sequence[RequestTrace], steps: Sequence[StepStat]
) -> Iterator[float]:
    """Time to first token without the step, of requests that were alone in their only step."""
    single = {
        step.at_s: step.plan_s + step.run_s
        for step in steps
        if len(step.shapes) == 1 and has_prompt(step.shapes)
    }
    for request in requests:
        started_s = request.started_s
        if started_s is None or not request.token_s:
            continue
        near = [at_s for at_s in single if abs(at_s - started_s) <= SAME_START_S]
        if near:
            wait_s = request.token_s[0] - request.scheduled_s - single[near[0]]
            if wait_s >= 0:
                yield wait_s


def median_wait_s(windows: Sequence[LoadWindow]) -> float | None:
    """The median over all windows; None without any."""
    waits = [wait_s for window in windows for wait_s in window.waits_s]
    return median(waits) if waits else None


def _log_uniform(rng: random.Random, between: tuple[int, int]) -> int:
    low, high = between
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))
