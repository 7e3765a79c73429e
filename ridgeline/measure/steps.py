"""What the engine's step records say: how full, how often reused, and how near to the machine's
limits.

The arithmetic of a step (FLOPs, bytes) and the ceilings of the machine come in from outside, as a
callable and two numbers, so that this file knows neither models nor hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec

from ridgeline.records import RunTrace, StepStat

Phase = Literal["prefill", "mixed", "decode", "overall"]
Work = Callable[[Sequence[tuple[int, int]], int], tuple[float, float]]
"""(shapes, num_sampled) → (FLOPs, bytes) that one step cannot do without."""


class Peaks(msgspec.Struct, frozen=True, kw_only=True):
    """What the machine can do at the dtype in use: dense FLOP/s, and bytes/s read from memory."""

    flop_s: float
    bytes_s: float

    def bound_s(self, flops: float, nbytes: float) -> float:
        """The roofline: no step takes less."""
        return max(flops / self.flop_s, nbytes / self.bytes_s)


class Utilisation(msgspec.Struct, frozen=True, kw_only=True):
    """One phase of one run. `busy_s` is the time in the phase's runs, `wall_s` the length of the
    run.

    MFU and MBU are FLOPs and bytes over time x peak: `*_busy` over busy time (how good the
    kernels are), `*_wall` over the wall (how well the machine was used). `bound_s` is the least
    time for this work.
    """

    phase: Phase
    num_steps: int
    flops: float
    nbytes: float
    busy_s: float
    wall_s: float
    bound_s: float
    mfu_busy: float
    mbu_busy: float
    mfu_wall: float
    mbu_wall: float


def phase_of(step: StepStat) -> Phase:
    """decode: every run feeds one token behind a filled cache; prefill: none does; else mixed."""
    decoding = sum(1 for new, cached in step.shapes if new == 1 and cached > 0)
    if decoding == len(step.shapes):
        return "decode"
    return "mixed" if decoding else "prefill"


def utilisation(run: RunTrace, work: Work, peaks: Peaks) -> dict[Phase, Utilisation]:
    """By phase (those that occurred), and overall."""
    steps = [step for step in run.steps if step.shapes]
    phases: tuple[Phase, ...] = ("prefill", "mixed", "decode")
    groups: dict[Phase, list[StepStat]] = {
        phase: [step for step in steps if phase_of(step) == phase] for phase in phases
    }
    groups["overall"] = steps
    return {
        phase: _utilisation(phase, chosen, run.duration_s, work, peaks)
        for phase, chosen in groups.items()
        if chosen
    }


def _utilisation(
    phase: Phase, steps: Sequence[StepStat], wall_s: float, work: Work, peaks: Peaks
) -> Utilisation:
    costs = [work(step.shapes, step.num_sampled) for step in steps]
    flops, nbytes = sum(cost[0] for cost in costs), sum(cost[1] for cost in costs)
    busy_s = sum(step.run_s for step in steps)
    return Utilisation(
        phase=phase,
        num_steps=len(steps),
        flops=flops,
        nbytes=nbytes,
        busy_s=busy_s,
        wall_s=wall_s,
        bound_s=sum(peaks.bound_s(*cost) for cost in costs),
        mfu_busy=_ratio(flops, busy_s * peaks.flop_s),
        mbu_busy=_ratio(nbytes, busy_s * peaks.bytes_s),
        mfu_wall=_ratio(flops, wall_s * peaks.flop_s),
        mbu_wall=_ratio(nbytes, wall_s * peaks.bytes_s),
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


class Occupancy(msgspec.Struct, frozen=True, kw_only=True):
    """How full the engine was while it worked. Shares are 0..1.

    Batch fill is runs / max_num_seqs of a step, averaged three ways that answer three questions:
    `batch_fill` weighs by the step's time (how full were the seats while the device was busy),
    `batch_fill_tokens` by its tokens (how full was the batch that the mean token travelled in),
    `batch_fill_steps` weighs all steps alike. KV occupancy is used / all blocks, weighed by time.
    `busy_share` and `plan_share` are run and planning time over the wall.
    """

    num_steps: int
    batch_fill: float
    batch_fill_tokens: float
    batch_fill_steps: float
    mean_runs: float
    mean_tokens: float
    mean_waiting: float
    kv_occupancy: float
    kv_occupancy_max: float
    num_preemptions: int
    cache_hit_rate: float | None
    busy_share: float
    plan_share: float


def occupancy(run: RunTrace) -> Occupancy | None:
    """None where the run has no step records (a server over HTTP)."""
    steps = [step for step in run.steps if step.shapes]
    if not steps:
        return None
    times = [step.run_s for step in steps]
    fill = [len(step.shapes) / step.max_num_seqs for step in steps]
    kv = [step.used_blocks / step.num_blocks for step in steps]
    ones = [1.0] * len(steps)
    return Occupancy(
        num_steps=len(steps),
        batch_fill=_mean(fill, times),
        batch_fill_tokens=_mean(fill, [float(step.num_tokens) for step in steps]),
        batch_fill_steps=_mean(fill, ones),
        mean_runs=_mean([float(len(step.shapes)) for step in steps], ones),
        mean_tokens=_mean([float(step.num_tokens) for step in steps], ones),
        mean_waiting=_mean([float(step.num_waiting) for step in steps], times),
        kv_occupancy=_mean(kv, times),
        kv_occupancy_max=max(kv),
        num_preemptions=sum(step.num_preempted for step in run.steps),
        cache_hit_rate=cache_hit_rate(run.steps),
        busy_share=_ratio(sum(times), run.duration_s),
        plan_share=_ratio(sum(step.plan_s for step in run.steps), run.duration_s),
    )


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    total = sum(weights)
    if total <= 0:
        return sum(values) / len(values)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / total


def cache_hit_rate(steps: Iterable[StepStat]) -> float | None:
    """Prompt tokens found in the prefix cache over those looked up; None where none was looked
    up.
    """
    hits = queried = 0
    for step in steps:
        hits, queried = hits + step.hit_tokens, queried + step.queried_tokens
    return hits / queried if queried else None


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """The roofline beside each figure of the table: what this machine could not have beaten."""

    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None
    output_tok_s: float | None


def bounds(run: RunTrace, work: Work, peaks: Peaks) -> Bounds:
    """Bounds of the run as it was batched; None where the run does not tell.

    ttft: the prompt of the mean request (what the cache did not hold) alone on the machine.
    tpot: the mean bound of a step that a decoding token travelled in. e2e: the two together.
    output_tok_s: the run's output over the sum of the bounds of its steps.
    """
    steps = [step for step in run.steps if step.shapes]
    done = [request for request in run.requests if request.output_tokens]
    if not steps or not done:
        return Bounds(ttft_s=None, tpot_s=None, e2e_s=None, output_tok_s=None)
    bound_s = [peaks.bound_s(*work(step.shapes, step.num_sampled)) for step in steps]
    ttft_s = _prefill_bound_s(run, work, peaks)
    tpot_s = _decode_bound_s(steps, bound_s)
    output = sum(request.output_tokens for request in done)
    mean_after = output / len(done) - 1
    return Bounds(
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        e2e_s=ttft_s + mean_after * tpot_s if ttft_s is not None and tpot_s is not None else None,
        output_tok_s=output / sum(bound_s) if sum(bound_s) > 0 else None,
    )


def _prefill_bound_s(run: RunTrace, work: Work, peaks: Peaks) -> float | None:
    told = [request for request in run.requests if request.prompt_tokens]
    if not told:
        return None
    prompt = round(sum(request.prompt_tokens for request in told) / len(told))
    cached = round(sum(request.cached_tokens for request in told) / len(told))
    return peaks.bound_s(*work(((max(1, prompt - cached), cached),), 1))


def _decode_bound_s(steps: Sequence[StepStat], bound_s: Sequence[float]) -> float | None:
    riders = [sum(1 for new, cached in step.shapes if new == 1 and cached) for step in steps]
    return _mean(list(bound_s), [float(count) for count in riders]) if any(riders) else None
