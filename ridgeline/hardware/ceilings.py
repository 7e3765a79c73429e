"""What this machine can do at this moment: the ceilings that a profile is held against.

The probe's record (`machine.py`) may be a day old, and a shared host changes within minutes: a
profile measures its own ceilings right before and right behind its steps, in two seconds each.
"""

from __future__ import annotations

import msgspec

from ridgeline.hardware import measure, system
from ridgeline.hardware.machine import FULL_SHARE, rate_at

RATES = ("int4", "int16", "float32", "bf16", "bf16_kv")
"""Kinds of multiply-add: of weights of four bits, of eight (as words, or by a dot product of bytes
where the CPU has one), of floats, of weights in bfloat16 by floats, which tiles have instructions
for, and of keys and values in bfloat16, which some vectors have too."""


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """`bytes_s`: reads per second of data of so many bytes, over and over, all threads. `flop_s`:
    multiply-adds in registers, two operations each, by kind; one that is absent has no instruction
    here. `cpu_share`: below 0.9 something else held the cores, and the figures are too low.
    """

    bytes_s: dict[int, float]
    flop_s: dict[str, float]
    cpu_share: float

    def bandwidth(self, working_set_bytes: float) -> float:
        return rate_at(self.bytes_s, working_set_bytes)

    @property
    def disturbed(self) -> bool:
        return self.cpu_share < FULL_SHARE

    def best_of(self, other: Rates) -> Rates:
        """The higher of two measurements of one machine, figure by figure."""
        return Rates(
            bytes_s={s: max(r, other.bytes_s.get(s, r)) for s, r in self.bytes_s.items()},
            flop_s={k: max(r, other.flop_s.get(k, r)) for k, r in self.flop_s.items()},
            cpu_share=max(self.cpu_share, other.cpu_share),
        )


def measure_rates(num_threads: int) -> Rates:
    """Now, with so many threads; about two seconds. CannotRun without the native module."""
    beyond = measure.memory_buffer_bytes(system.caches(), system.memory().available_bytes)
    sizes = {*measure.CACHE_SIZES, beyond}  # a cache of 480 MB holds most of the others
    reads = {size: measure.read_bandwidth(size, num_threads) for size in sorted(sizes)}
    peaks = {kind: measure.multiply_peak(kind, num_threads) for kind in measure.kinds_of(RATES)}
    return Rates(
        bytes_s={size: found.per_s for size, found in reads.items()},
        flop_s={kind: found.per_s for kind, found in peaks.items()},
        cpu_share=min(found.cpu_share for found in (*reads.values(), *peaks.values())),
    )
