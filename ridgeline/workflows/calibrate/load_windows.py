"""What `ridgeline calibrate` sees under arrivals: every step, by an event loop that reads.

Steps that are timed one kind at a time know nothing of a client that takes turns with the engine,
of a queue, or of the machine from one second to the next. A few seconds of open-loop Poisson
arrivals, prompts and answers of many lengths, at three shares of the capacity, do.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median

import msgspec

from ridgeline.measure.client.engine_target import InProcessTarget
from ridgeline.measure.client.load_client import LoadOptions, run_load
from ridgeline.measure.workload.arrivals import Instants
from ridgeline.measure.workload.base import LoadRequest
from ridgeline.plan.calibration.interference import Busy, is_fresh
from ridgeline.records import RequestTrace, RunTrace, StepStat
from ridgeline.workflows.calibrate.step_bench import Rig

SHARES = (0.3, 0.55, 0.75)  # of the capacity
WINDOW_S, GRACE_S = 10.0, 3.0
PROMPTS, ANSWERS = (16, 448), (8, 96)  # tokens; log-uniform
SAME_S = 1e-3  # between the instants that a step and its request's start are noted at
_MIDDLE = 128  # tokens of a prompt that costs about the mean
_TOGETHER = 8  # sequences that share a decode step, to tell the capacity


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """One window. `waits_s`: of each request that found the engine idle, from asking to the first
    token, besides the step."""

    model: str
    quantization: str | None
    share: float
    steps: tuple[Busy, ...]
    waits_s: tuple[float, ...]


class _Mixed:
    """Requests of many lengths."""

    name = "calibrate"

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def sample(self, n: int, seed: int) -> Iterator[LoadRequest]:
        rng = random.Random(f"{seed}/lengths")
        for i in range(n):
            length = _drawn(rng, PROMPTS)
            prompt = tuple(rng.randrange(3, self._vocab_size) for _ in range(length))
            yield LoadRequest(
                id=f"c{i}", kind="calibrate", prompt=prompt, max_tokens=_drawn(rng, ANSWERS)
            )


def windows(bench: Rig, model: str, quantization: str | None) -> Iterator[Loaded]:
    """One per share of the capacity."""
    alone_s = bench.first(_MIDDLE).seconds
    together_s = bench.decode(_TOGETHER, _MIDDLE).seconds
    answer = (ANSWERS[1] - ANSWERS[0]) / math.log(ANSWERS[1] / ANSWERS[0])
    capacity = 1 / (alone_s + answer * together_s / _TOGETHER)
    for seed, share in enumerate(SHARES):
        run = asyncio.run(_run(bench, share * capacity, seed))
        yield Loaded(
            model=model,
            quantization=quantization,
            share=share,
            steps=tuple(busy_of(run.steps)),
            waits_s=tuple(waits_of(run.requests, run.steps)),
        )


async def _run(bench: Rig, rate: float, seed: int) -> RunTrace:
    rng = random.Random(f"{seed}/arrivals")
    count = max(4, round(rate * WINDOW_S))
    dues = Instants(
        at_s=tuple(sorted(rng.uniform(0.0, WINDOW_S) for _ in range(count))),
        label=f"poisson:{rate!r}",
        rate=rate,
    )
    options = LoadOptions(num_requests=count, grace_s=GRACE_S, seed=seed)
    bench.engine.drain_steps()
    workload = _Mixed(bench.engine.resolved.spec.vocab_size)
    return await run_load(InProcessTarget(bench.engine), workload, dues, options)


def busy_of(steps: Sequence[StepStat]) -> Iterator[Busy]:
    """Each step with its seconds: until the next one where any sequence goes on, else its own."""
    for step, after in pairwise(steps):
        if not step.shapes:
            continue
        ends = {new + done for new, done in step.shapes}
        goes_on = any(done in ends for _, done in after.shapes)
        yield Busy(
            at_s=step.at_s,
            seconds=after.at_s - step.at_s if goes_on else step.plan_s + step.run_s,
            shapes=step.shapes,
            num_sampled=step.num_sampled,
        )


def waits_of(requests: Sequence[RequestTrace], steps: Sequence[StepStat]) -> Iterator[float]:
    """Of requests whose only step is alone: first token less asking less that step."""
    alone = {
        step.at_s: step.plan_s + step.run_s
        for step in steps
        if len(step.shapes) == 1 and is_fresh(step.shapes)
    }
    for request in requests:
        started_s = request.started_s
        if started_s is None or not request.token_s:
            continue
        near = [at_s for at_s in alone if abs(at_s - started_s) <= SAME_S]
        if near:
            wait_s = request.token_s[0] - request.scheduled_s - alone[near[0]]
            if wait_s >= 0:
                yield wait_s


def middle_wait_s(found: Sequence[Loaded]) -> float | None:
    """The middle of all windows' waits."""
    waits = [wait_s for each in found for wait_s in each.waits_s]
    return median(waits) if waits else None


def _drawn(rng: random.Random, between: tuple[int, int]) -> int:
    low, high = between
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))
