"""Thread counts of a step: one for steps of many rows, one for steps of few.

What. A step of few rows (decode) is bound by memory, which is often saturated before every core
reads from it. A step of many rows (prefill) is bound by arithmetic and profits from all cores.
`thread_plan = "auto"` measures both on this machine when the engine opens, once per process, which
takes seconds: the fewest threads that read, and that multiply, within 3 % of the best.

Invariant. No count that was measured or derived exceeds the cores granted by the CPU affinity and
the cgroup quota. With native layers and attention, tokens do not depend on either count.

When it loses. When the count changes between steps, OpenMP starts threads again (tens of
microseconds), so traffic that alternates prompts and decodes gains only if the freed cores are put
to use elsewhere. With one core there is nothing to choose.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch

from ridgeline.config.settings import Settings
from ridgeline.hardware import measure, system

FEW_ROWS = 16
"""Steps of up to this many rows are bound by reading the weights (benchmarks/bench_linear.py)."""


class ThreadRates(NamedTuple):
    """Bytes read and operations done per second by all threads together, by thread count."""

    read: Mapping[int, float]
    multiply: Mapping[int, float]


class MeasureRates(Protocol):
    """Measures with 1, 2, 4, … up to `max_threads` threads."""

    def __call__(self, max_threads: int) -> ThreadRates: ...


class ThreadPlan(NamedTuple):
    """Threads for steps of many rows and of few, each with its derivation."""

    num_threads: int
    num_threads_decode: int
    why: str
    why_decode: str


def plan_threads(
    settings: Settings, cores: system.Cores, measure_rates: MeasureRates
) -> ThreadPlan:
    """The thread counts for these settings; measures only if the settings say so."""
    usable = max(1, int(cores.usable))
    max_threads = settings.num_threads or usable
    if settings.num_threads is None:
        why = f"{cores.usable:g} cores usable (affinity and cgroup quota)"
    elif settings.num_threads > usable:
        why = f"as requested; more than the {cores.usable:g} usable cores"
    else:
        why = "as requested"
    many, few = max_threads, settings.num_threads_decode or max_threads
    why_decode = "as num_threads" if settings.num_threads_decode is None else "as requested"
    if settings.thread_plan == "auto":
        rates = measure_rates(min(max_threads, usable))
        if settings.num_threads is None:
            many = measure.enough_threads(rates.multiply)
            why = f"measured: arithmetic by threads, GFLOP/s: {_format(rates.multiply)}"
        if settings.num_threads_decode is None:
            few = measure.enough_threads(rates.read)
            why_decode = f"measured: reads by threads, GB/s: {_format(rates.read)}"
    return ThreadPlan(many, few, why, why_decode)


def _format(rates: Mapping[int, float]) -> str:
    return ", ".join(f"{count}: {rate / 1e9:.1f}" for count, rate in rates.items())


@functools.cache
def measure_rates(max_threads: int) -> ThreadRates:
    """Both rates of this machine, measured once per process."""
    num_bytes = measure.memory_buffer_bytes(system.caches(), system.memory().available_bytes)
    counts = measure.thread_counts(max_threads)
    return ThreadRates(
        {n: measure.read_bandwidth(num_bytes, n).per_s for n in counts},
        {n: measure.multiply_peak("float32", n).per_s for n in counts},
    )


class StepThreads:
    """Sets torch's thread count, which native code uses as well, before each step."""

    def __init__(self, num_threads: int, num_threads_decode: int) -> None:
        self._many, self._few = num_threads, num_threads_decode

    def begin(self, num_rows: int) -> None:
        """Set the count for a step of `num_rows` rows. Call it on the computing thread."""
        count = self._few if num_rows <= FEW_ROWS else self._many
        # Read from torch instead of remembered: another engine of this process may have changed it.
        if count != torch.get_num_threads():
            torch.set_num_threads(count)
