"""The record of one machine: what it is, and what it was measured to do."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

FULL_SHARE = 0.9
"""Threads that got less than this share of their cores were disturbed while measuring."""


def rate_at(rates: Mapping[int, float], size: float) -> float:
    """Between two measured sizes, on a logarithmic scale; the nearest one's outside of them."""
    sizes = sorted(rates)
    if size >= sizes[-1]:
        return rates[sizes[-1]]
    if size <= sizes[0]:
        return rates[sizes[0]]
    above = next(i for i, each in enumerate(sizes) if each > size)
    low, high = sizes[above - 1], sizes[above]
    share = math.log(size / low) / math.log(high / low)
    return rates[low] + share * (rates[high] - rates[low])


class CpuCache(msgspec.Struct, frozen=True, kw_only=True):
    """One level of cache: the size of an instance, and how many this process can use."""

    level: int
    size_bytes: int
    instances: int

    @property
    def total_bytes(self) -> int:
        return self.size_bytes * self.instances


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU as torch reports it, with quick measurements (None, {}: it was full or busy)."""

    name: str
    memory_bytes: int
    capability: str
    read_bandwidth_bytes_s: float | None
    gemm_flops: dict[str, float]


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """This machine.

    `usable_cores`: cores that quota and affinity allow, e.g. 1.5. `read_bandwidth_bytes_s`:
    streaming reads of a buffer far larger than the caches, by number of threads.
    `cache_bandwidth_bytes_s`: the same with all threads, by working set: a small model lives in
    cache. `multiply_flops`: multiply-adds in registers, the arithmetic peak, all usable cores.
    `gemm_flops`: what torch's own matrix product reaches, by dtype (absent: torch has no path
    here). `native_dtypes`: dtypes that the CPU has instructions for.
    `cpu_share`: CPU time over wall time of the measuring threads; below 0.9 something else was
    running, and the figures are too low.
    """

    cpu_model: str
    architecture: str
    isa: tuple[str, ...]
    physical_cores: int
    logical_cores: int
    usable_cores: float
    memory_bytes: int
    memory_available_bytes: int
    caches: tuple[CpuCache, ...]
    read_bandwidth_bytes_s: dict[int, float]
    cache_bandwidth_bytes_s: dict[int, float]
    multiply_flops: dict[str, float]
    gemm_flops: dict[str, float]
    native_dtypes: tuple[str, ...]
    gpus: tuple[Gpu, ...]
    cpu_share: float
    probed_unix_s: float
    took_s: float
    fingerprint: str

    @property
    def num_threads(self) -> int:
        """Threads worth starting: whole usable cores, at least one."""
        return max(1, math.floor(self.usable_cores))

    @property
    def disturbed(self) -> bool:
        """True where something else used the cores while measuring."""
        return self.cpu_share < FULL_SHARE

    @property
    def best_bandwidth_bytes_s(self) -> float:
        """Read bandwidth of memory at the best number of threads."""
        return max(self.read_bandwidth_bytes_s.values())

    def bandwidth(self, working_set_bytes: float) -> float:
        """Read bandwidth for data of this size that is read over and over, all threads.

        Between two measured sizes it is interpolated on a logarithmic scale of size.
        """
        sizes = self.cache_bandwidth_bytes_s
        if not sizes or working_set_bytes >= max(sizes):
            return self.best_bandwidth_bytes_s
        return rate_at(sizes, working_set_bytes)

    def peak_flops(self, dtype: str) -> float | None:
        """The highest rate seen in `dtype`, by whichever measurement; None where there is none."""
        found = [rates[dtype] for rates in (self.multiply_flops, self.gemm_flops) if dtype in rates]
        return max(found) if found else None
