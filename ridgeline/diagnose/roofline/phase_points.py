"""Roofline points of a run, and the shares of bandwidth, compute and overhead in its wall time.

Overhead is the time of a step beyond its bound: dispatch, Python, kernels below their limit, and
unnecessary copies. A per-operator profile (`ridgeline.diagnose.roofline.operators`) splits it
further.

The bandwidth should be measured with the working set of the model, because weights that fit in a
cache are not read from memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from ridgeline.records import StepStat
from ridgeline.roofline import (
    PHASES,
    Peaks,
    Phase,
    PriceStep,
    RooflinePoint,
    Work,
    bound,
    phase_of,
)


class TimeShares(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of the wall time, which sum to 1 (except `mbu` and `mfu`).

    `idle`: no step was running.
    """

    bandwidth: float
    compute: float
    overhead: float
    planning: float
    idle: float
    mbu: float
    mfu: float


def roofline_points(
    name: str, steps: Iterable[StepStat], price: PriceStep, peaks: Peaks
) -> tuple[RooflinePoint, ...]:
    """One point per phase that occurred, in the order of `PHASES`."""
    by_phase: dict[Phase, list[StepStat]] = {phase: [] for phase in PHASES}
    for step in steps:
        if step.shapes and step.run_s > 0:
            by_phase[phase_of(step)].append(step)
    return tuple(
        _point(name, phase, chosen, price, peaks) for phase, chosen in by_phase.items() if chosen
    )


def _point(
    name: str, phase: Phase, steps: Sequence[StepStat], price: PriceStep, peaks: Peaks
) -> RooflinePoint:
    costs = [price(step.shapes, step.num_sampled) for step in steps]
    flops, nbytes = sum(cost.flops for cost in costs), sum(cost.bytes for cost in costs)
    time_s = sum(step.run_s for step in steps)
    intensity = flops / nbytes
    return RooflinePoint(
        name=name,
        phase=phase,
        intensity=intensity,
        achieved_flops_s=flops / time_s,
        achieved_bytes_s=nbytes / time_s,
        roof_flops_s=peaks.attainable_flops_s(intensity),
        time_s=time_s,
        num_steps=len(steps),
    )


def time_shares(
    steps: Iterable[StepStat], wall_s: float, price: PriceStep, peaks: Peaks
) -> TimeShares:
    """Divide `wall_s` seconds into the bounds of the steps, overhead, planning and idle time.

    A step faster than its bound (cache effects, a pessimistic probe) counts as being at its bound.
    """
    split = {"bandwidth": 0.0, "compute": 0.0, "overhead": 0.0, "planning": 0.0}
    nbytes = flops = 0.0
    for step in steps:
        cost = price(step.shapes, step.num_sampled)
        nbytes, flops = nbytes + cost.bytes, flops + cost.flops
        least = bound(cost, peaks)
        at_bound_s = min(step.run_s, least.seconds)
        split[least.limit] += at_bound_s
        split["overhead"] += step.run_s - at_bound_s
        split["planning"] += step.plan_s
    wall = max(wall_s, sum(split.values()), 1e-9)
    busy = max(split["bandwidth"] + split["compute"] + split["overhead"], 1e-9)
    total = bound(Work(flops, nbytes), peaks)
    return TimeShares(
        **{name: seconds / wall for name, seconds in split.items()},
        idle=1 - sum(split.values()) / wall,
        mbu=total.mbu(busy),
        mfu=total.mfu(busy),
    )
