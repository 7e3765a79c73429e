"""Bandwidth and arithmetic peaks of this machine, measured now.

The record of a probe (`ridgeline.hardware.machine`) may be a day old, and the load on a shared host
changes within minutes: a profile measures its own ceilings immediately before and after its steps,
in two seconds each.
"""

from __future__ import annotations

import msgspec

from ridgeline.hardware import measure, system
from ridgeline.hardware.machine import FULL_SHARE, rate_at
from ridgeline.roofline import Peaks

KINDS = ("int4", "int16", "float32", "bf16", "bf16_kv")
"""Kinds of multiply-add: 4-bit weights, 8-bit weights (as words, or by a dot product of bytes where
the CPU has one), floats, bfloat16 weights × floats (AMX tiles have instructions for them), and
bfloat16 keys and values, for which some vector units have instructions too."""


class MeasuredCeilings(msgspec.Struct, frozen=True, kw_only=True):
    """Rates with all threads.

    `bytes_s`: read bandwidth by working-set size in bytes. `flops_s`: multiply-adds in registers, 2
    FLOPs each, by kind; kinds without an instruction on this CPU are absent. `cpu_share`: CPU time
    over wall time of the measuring threads; below 0.9 the figures are too low, because another
    process used the cores.
    """

    bytes_s: dict[int, float]
    flops_s: dict[str, float]
    cpu_share: float

    def bandwidth(self, working_set_bytes: float) -> float:
        """Bytes/s of a working set of this size, interpolated between the measured sizes."""
        return rate_at(self.bytes_s, working_set_bytes)

    def peaks(self, kind: str, working_set_bytes: float) -> Peaks:
        """Peaks for this kind of multiply-add, or for the fastest kind if it was not measured."""
        chosen = kind if kind in self.flops_s else max(self.flops_s, key=self.flops_s.__getitem__)
        return Peaks(
            flops_s=self.flops_s[chosen],
            bytes_s=self.bandwidth(working_set_bytes),
            dtype=chosen,
            source="this run" + (", disturbed: too low" if self.disturbed else ""),
            flops_s_by_dtype=dict(self.flops_s),
        )

    @property
    def disturbed(self) -> bool:
        return self.cpu_share < FULL_SHARE

    def best_of(self, other: MeasuredCeilings) -> MeasuredCeilings:
        """The higher of two measurements of one machine, figure by figure."""
        return MeasuredCeilings(
            bytes_s={s: max(r, other.bytes_s.get(s, r)) for s, r in self.bytes_s.items()},
            flops_s={k: max(r, other.flops_s.get(k, r)) for k, r in self.flops_s.items()},
            cpu_share=max(self.cpu_share, other.cpu_share),
        )


def measure_ceilings(num_threads: int) -> MeasuredCeilings:
    """Measure with `num_threads` threads, in about two seconds.

    Raises CannotRun without the native module.
    """
    beyond = measure.memory_buffer_bytes(system.caches(), system.memory().available_bytes)
    sizes = {*measure.CACHE_SIZES, beyond}  # a cache of 480 MB holds most of the others
    reads = {size: measure.read_bandwidth(size, num_threads) for size in sorted(sizes)}
    rates = {kind: measure.multiply_peak(kind, num_threads) for kind in measure.kinds_of(KINDS)}
    return MeasuredCeilings(
        bytes_s={size: rate.per_s for size, rate in reads.items()},
        flops_s={kind: rate.per_s for kind, rate in rates.items()},
        cpu_share=min(rate.cpu_share for rate in (*reads.values(), *rates.values())),
    )


def measure_gpu_ceilings(device: str) -> MeasuredCeilings:
    """The same of a GPU, in a second: a copy within its memory, and its matrix products.

    4-bit weights are multiplied in bfloat16, 8-bit ones as bytes.
    """
    rates = measure.gpu_rates(device)
    flops_s = dict(rates.flops_s)
    if "int8" in flops_s:
        flops_s["int16"] = flops_s.pop("int8")
    if "bfloat16" in flops_s:
        flops_s["int4"] = flops_s["bf16"] = flops_s["bfloat16"]
    return MeasuredCeilings(
        bytes_s={rates.copy_bytes: rates.bytes_s}, flops_s=flops_s, cpu_share=1.0
    )


def ceilings_of(device: str, num_threads: int) -> MeasuredCeilings:
    """The ceilings of the device that an engine runs on."""
    if device.startswith("cuda"):
        return measure_gpu_ceilings(device)
    return measure_ceilings(num_threads)
