"""Where a run stands under the roofline, and where its time went.

Williams, Waterman & Patterson, "Roofline: an insightful visual performance model" (CACM 2009):
with I = FLOPs / bytes, no step can be faster than min(peak, I x bandwidth). The FLOPs and bytes of
a step are the *compulsory* ones, from the model's spec: weights once per step, the KV cache of
every sequence in it once. What the step took beyond max(bytes / bandwidth, FLOPs / peak) is
overhead: dispatch, Python, kernels away from their limit, and copies that the arithmetic does not
ask for. Calling it overhead is honest about what this model can know; a per-operator profile
splits it further.

The ceilings come from the probe of this machine, never from a data sheet, and the bandwidth is
that of the model's own working set: weights that fit in cache are not read from memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec

from ridgeline.records import StepStat

Phase = Literal["prefill", "decode", "mixed"]
PHASES: tuple[Phase, ...] = ("prefill", "decode", "mixed")


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    """What this machine can do for this model: read bandwidth (bytes/s), arithmetic (FLOP/s) by
    dtype.

    `dtype` is the one the model computes in. `source` says where the figures come from.
    """

    bandwidth_bytes_s: float
    compute_flop_s: dict[str, float]
    dtype: str
    source: str = ""

    @property
    def peak_flop_s(self) -> float:
        return self.compute_flop_s[self.dtype]

    @property
    def ridge(self) -> float:
        """FLOP per byte from which arithmetic, not bandwidth, is the limit."""
        return self.peak_flop_s / self.bandwidth_bytes_s

    def roof_flop_s(self, intensity: float) -> float:
        return min(self.peak_flop_s, intensity * self.bandwidth_bytes_s)


class StepCost(msgspec.Struct, frozen=True):
    """The compulsory work of one step."""

    flops: float
    nbytes: float


WorkOf = Callable[[StepStat], StepCost]


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One phase of one run. `intensity` is FLOP/byte; rates are per second of `time_s`."""

    name: str
    phase: Phase
    intensity: float
    achieved_flop_s: float
    achieved_bytes_s: float
    roof_flop_s: float
    time_s: float
    num_steps: int

    @property
    def share_of_roof(self) -> float:
        return self.achieved_flop_s / self.roof_flop_s


class Shares(msgspec.Struct, frozen=True, kw_only=True):
    """Where the wall time went; the five sum to one. `idle`: the engine had nothing to do."""

    bandwidth: float
    compute: float
    overhead: float
    planning: float
    idle: float
    mbu: float
    mfu: float


def phase_of(step: StepStat) -> Phase:
    """Decode: every run feeds one token behind a filled cache. Prefill: none does."""
    decoding = sum(1 for new, cached in step.shapes if new == 1 and cached > 0)
    if decoding == len(step.shapes):
        return "decode"
    return "mixed" if decoding else "prefill"


def place(
    name: str, steps: Iterable[StepStat], work_of: WorkOf, ceilings: Ceilings
) -> tuple[Point, ...]:
    """One point per phase that occurred, in the order prefill, decode, mixed."""
    by_phase: dict[Phase, list[StepStat]] = {phase: [] for phase in PHASES}
    for step in steps:
        if step.shapes and step.run_s > 0:
            by_phase[phase_of(step)].append(step)
    return tuple(
        _point(name, phase, chosen, work_of, ceilings)
        for phase, chosen in by_phase.items()
        if chosen
    )


def _point(
    name: str, phase: Phase, steps: Sequence[StepStat], work_of: WorkOf, ceilings: Ceilings
) -> Point:
    costs = [work_of(step) for step in steps]
    flops, nbytes = sum(cost.flops for cost in costs), sum(cost.nbytes for cost in costs)
    time_s = sum(step.run_s for step in steps)
    intensity = flops / nbytes
    return Point(
        name=name,
        phase=phase,
        intensity=intensity,
        achieved_flop_s=flops / time_s,
        achieved_bytes_s=nbytes / time_s,
        roof_flop_s=ceilings.roof_flop_s(intensity),
        time_s=time_s,
        num_steps=len(steps),
    )


def attribute(
    steps: Iterable[StepStat], wall_s: float, work_of: WorkOf, ceilings: Ceilings
) -> Shares:
    """Split `wall_s` of a run: each step's own bound first, then what it took beyond it, then
    planning.

    A step faster than its bound (cache effects, a pessimistic probe) counts as wholly at its bound.
    """
    split = {"bandwidth": 0.0, "compute": 0.0, "overhead": 0.0, "planning": 0.0}
    nbytes = flops = 0.0
    for step in steps:
        cost = work_of(step)
        nbytes, flops = nbytes + cost.nbytes, flops + cost.flops
        on_bytes = cost.nbytes / ceilings.bandwidth_bytes_s
        on_flops = cost.flops / ceilings.peak_flop_s
        floor = min(step.run_s, max(on_bytes, on_flops))
        split["bandwidth" if on_bytes >= on_flops else "compute"] += floor
        split["overhead"] += step.run_s - floor
        split["planning"] += step.plan_s
    wall = max(wall_s, sum(split.values()), 1e-9)
    busy = max(split["bandwidth"] + split["compute"] + split["overhead"], 1e-9)
    return Shares(
        **{name: value / wall for name, value in split.items()},
        idle=1 - sum(split.values()) / wall,
        mbu=nbytes / busy / ceilings.bandwidth_bytes_s,
        mfu=flops / busy / ceilings.peak_flop_s,
    )
