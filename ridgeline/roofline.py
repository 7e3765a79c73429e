"""The roofline model: the least time that a computation can take on a machine.

    bound = max(FLOPs / peak FLOP/s, bytes / bandwidth)

Williams, Waterman & Patterson, "Roofline: an insightful visual performance model for multicore
architectures", CACM 2009. FLOPs and bytes are the compulsory ones: every weight read once per step,
the keys and values of every sequence read once. A computation with fewer FLOPs per byte than the
machine's ridge is bound by bandwidth, any other by compute.

MFU and MBU (model FLOPs and model bandwidth utilisation) are FLOPs and bytes over time × peak.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec

from ridgeline.records import StepStat

Limit = Literal["bandwidth", "compute"]
Phase = Literal["prefill", "decode", "mixed"]
PHASES: tuple[Phase, ...] = ("prefill", "decode", "mixed")


class HasWork(Protocol):
    """Anything with a number of FLOPs and of bytes that must move."""

    @property
    def flops(self) -> float: ...

    @property
    def bytes(self) -> float: ...


class Work(NamedTuple):
    """FLOPs, and bytes that must move to and from memory."""

    flops: float
    bytes: float


PriceStep = Callable[[Sequence[tuple[int, int]], int], HasWork]
"""(shapes, num_sampled) → the work of one step. A shape is (new tokens, cached tokens) of a run."""


class Peaks(msgspec.Struct, frozen=True, kw_only=True):
    """The highest rates of one device: dense FLOP/s in `dtype`, bytes/s read from memory.

    `flops_s_by_dtype` holds the peaks of other dtypes, for charts. `source` says how the numbers
    were obtained (a probe of this machine, a data sheet).
    """

    flops_s: float
    bytes_s: float
    dtype: str = ""
    source: str = ""
    flops_s_by_dtype: dict[str, float] = {}

    @property
    def ridge(self) -> float:
        """FLOPs per byte above which compute, not bandwidth, is the limit."""
        return self.flops_s / self.bytes_s

    @property
    def all_flops_s(self) -> dict[str, float]:
        """FLOP/s by dtype, including the one computed in."""
        return {**self.flops_s_by_dtype, self.dtype: self.flops_s}

    def scaled(self, factor: float, source: str) -> Peaks:
        """`factor` times these rates, in every dtype."""
        return msgspec.structs.replace(
            self,
            flops_s=factor * self.flops_s,
            bytes_s=factor * self.bytes_s,
            flops_s_by_dtype={name: factor * f for name, f in self.flops_s_by_dtype.items()},
            source=source,
        )

    def attainable_flops_s(self, intensity: float) -> float:
        """The roof above `intensity` (FLOPs per byte)."""
        return min(self.flops_s, intensity * self.bytes_s)


class Bound(NamedTuple):
    """Least seconds of a computation: for its bytes, and for its FLOPs, which overlap."""

    bandwidth_s: float
    compute_s: float

    @property
    def seconds(self) -> float:
        return max(self.bandwidth_s, self.compute_s)

    @property
    def limit(self) -> Limit:
        """The side of the roofline that takes longer; bandwidth on the ridge itself."""
        return "bandwidth" if self.bandwidth_s >= self.compute_s else "compute"

    def utilisation(self, seconds: float) -> float:
        """Share of the bound reached by a computation that took `seconds`; 0 for no time."""
        return self.seconds / seconds if seconds > 0 else 0.0

    def mfu(self, seconds: float) -> float:
        """FLOPs over time × peak FLOP/s; 0 for no time."""
        return self.compute_s / seconds if seconds > 0 else 0.0

    def mbu(self, seconds: float) -> float:
        """Bytes over time × bandwidth; 0 for no time."""
        return self.bandwidth_s / seconds if seconds > 0 else 0.0


def bound(work: HasWork, peaks: Peaks) -> Bound:
    """Least time of `work` on a device with these peaks."""
    return Bound(work.bytes / peaks.bytes_s, work.flops / peaks.flops_s)


class RooflinePoint(msgspec.Struct, frozen=True, kw_only=True):
    """One phase of one run. `intensity` is FLOPs per byte; rates are per second of `time_s`."""

    name: str
    phase: Phase
    intensity: float
    achieved_flops_s: float
    achieved_bytes_s: float
    roof_flops_s: float
    time_s: float
    num_steps: int

    @property
    def share_of_roof(self) -> float:
        return self.achieved_flops_s / self.roof_flops_s


def phase_of(step: StepStat) -> Phase:
    """ "decode" if every run feeds one token after cached ones, "prefill" if none does."""
    decoding = sum(1 for new, cached in step.shapes if new == 1 and cached > 0)
    if decoding == len(step.shapes):
        return "decode"
    return "mixed" if decoding else "prefill"
