"""Utilisation and occupancy of an engine, from its step records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from ridgeline.records import RunTrace, StepStat
from ridgeline.roofline import PHASES, Peaks, Phase, PriceStep, Work, bound, phase_of

PhaseOrAll = Phase | Literal["overall"]


class Utilisation(msgspec.Struct, frozen=True, kw_only=True):
    """One phase of a run: `busy_s` seconds in its steps, of `wall_s` seconds of the run.

    MFU and MBU are FLOPs and bytes over time × peak: `*_busy` over busy time (how efficient the
    kernels are), `*_wall` over the wall time (how well the machine was used). `bound_s` is the
    least time for this work.
    """

    phase: PhaseOrAll
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


def utilisation(run: RunTrace, price: PriceStep, peaks: Peaks) -> dict[PhaseOrAll, Utilisation]:
    """Utilisation by phase, for the phases that occurred, and overall."""
    steps = [step for step in run.steps if step.shapes]
    groups: dict[PhaseOrAll, list[StepStat]] = {
        phase: [step for step in steps if phase_of(step) == phase] for phase in PHASES
    }
    groups["overall"] = steps
    return {
        phase: _utilisation(phase, chosen, run.duration_s, price, peaks)
        for phase, chosen in groups.items()
        if chosen
    }


def _utilisation(
    phase: PhaseOrAll, steps: Sequence[StepStat], wall_s: float, price: PriceStep, peaks: Peaks
) -> Utilisation:
    costs = [price(step.shapes, step.num_sampled) for step in steps]
    flops, nbytes = sum(cost.flops for cost in costs), sum(cost.bytes for cost in costs)
    busy_s = sum(step.run_s for step in steps)
    total = bound(Work(flops, nbytes), peaks)
    return Utilisation(
        phase=phase,
        num_steps=len(steps),
        flops=flops,
        nbytes=nbytes,
        busy_s=busy_s,
        wall_s=wall_s,
        bound_s=sum(bound(cost, peaks).seconds for cost in costs),
        mfu_busy=total.mfu(busy_s),
        mbu_busy=total.mbu(busy_s),
        mfu_wall=total.mfu(wall_s),
        mbu_wall=total.mbu(wall_s),
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


class Occupancy(msgspec.Struct, frozen=True, kw_only=True):
    """How full the engine was during its steps. Shares are in [0, 1].

    Batch fill is runs / max_num_seqs of a step, averaged in three ways: `batch_fill` weights a step
    by its time (how full the slots were while the device was busy), `batch_fill_tokens` by its
    tokens (how full the batch of the mean token was), `batch_fill_steps` weights all steps equally.
    KV occupancy is used / all blocks, weighted by time. `busy_share` and `plan_share` are the time
    in steps and in planning over the wall time. `wasted_slots`: share of the slots' time in steps
    that was empty while requests waited. `wasted_steps`: share of the computed tokens that no
    answer holds: computed again after a preemption, rejected drafts, and those of requests that
    failed, were cancelled or timed out.
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
    wasted_slots: float
    wasted_steps: float


def occupancy(run: RunTrace) -> Occupancy | None:
    """Occupancy of a run; None if it has no step records (a server over HTTP)."""
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
        wasted_slots=wasted_slots(steps),
        wasted_steps=wasted_steps(run),
    )


def wasted_slots(steps: Sequence[StepStat]) -> float:
    """Share of the slots' time that was empty while requests waited; with speculation, a
    sequence with several runs in a step takes one slot."""
    empty_s = sum(
        max(0, step.max_num_seqs - step.num_running) * step.run_s
        for step in steps
        if step.num_waiting
    )
    return _ratio(empty_s, sum(step.max_num_seqs * step.run_s for step in steps))


def wasted_steps(run: RunTrace) -> float:
    """Share of the computed tokens that no answer holds.

    An answer needs its uncached prompt and all of its tokens but the last, which is never computed.
    """
    computed = sum(step.num_tokens for step in run.steps)
    needed = sum(
        request.prompt_tokens - request.cached_tokens + max(0, request.output_tokens - 1)
        for request in run.requests
        if request.error is None
    )
    return max(0.0, _ratio(computed - needed, computed))


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    total = sum(weights)
    if total <= 0:
        return sum(values) / len(values)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / total


def cache_hit_rate(steps: Iterable[StepStat]) -> float | None:
    """Prompt tokens found in the prefix cache over those looked up; None without look-ups."""
    hits = queried = 0
    for step in steps:
        hits, queried = hits + step.hit_tokens, queried + step.queried_tokens
    return hits / queried if queried else None


class LatencyBounds(msgspec.Struct, frozen=True, kw_only=True):
    """Least latencies and highest throughput that this machine allows."""

    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None
    output_tok_s: float | None


def latency_bounds(run: RunTrace, price: PriceStep, peaks: Peaks) -> LatencyBounds:
    """Bounds of the run with its actual batches; None where they are unknown.

    ttft_s: the uncached part of the mean prompt, alone on the machine. tpot_s: the bound of a step,
    averaged over decoded tokens. e2e_s: of both. output_tok_s: the output of the run over the sum
    of the bounds of its steps.
    """
    steps = [step for step in run.steps if step.shapes]
    done = [request for request in run.requests if request.output_tokens]
    if not steps or not done:
        return LatencyBounds(ttft_s=None, tpot_s=None, e2e_s=None, output_tok_s=None)
    bound_s = [bound(price(step.shapes, step.num_sampled), peaks).seconds for step in steps]
    ttft_s = _prefill_bound_s(run, price, peaks)
    tpot_s = _decode_bound_s(steps, bound_s)
    output = sum(request.output_tokens for request in done)
    mean_after = output / len(done) - 1
    return LatencyBounds(
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        e2e_s=ttft_s + mean_after * tpot_s if ttft_s is not None and tpot_s is not None else None,
        output_tok_s=output / sum(bound_s) if sum(bound_s) > 0 else None,
    )


def _prefill_bound_s(run: RunTrace, price: PriceStep, peaks: Peaks) -> float | None:
    known = [request for request in run.requests if request.prompt_tokens]
    if not known:
        return None
    prompt = round(sum(request.prompt_tokens for request in known) / len(known))
    cached = round(sum(request.cached_tokens for request in known) / len(known))
    return bound(price(((max(1, prompt - cached), cached),), 1), peaks).seconds


def _decode_bound_s(steps: Sequence[StepStat], bound_s: Sequence[float]) -> float | None:
    decoding = [sum(1 for new, cached in step.shapes if new == 1 and cached) for step in steps]
    return _mean(list(bound_s), [float(count) for count in decoding]) if any(decoding) else None
