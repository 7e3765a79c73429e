"""How many threads a step takes: one number for steps of many rows, one for steps of few.

What: a step of few rows (decode) waits for memory, and memory is often at its limit before every
core reads from it; a step of many rows (prefill) is arithmetic and wants them all. The thread plan
gives each kind its own number. `thread_plan = "auto"` measures both on this machine, in a part of a
second, when the engine opens: the fewest threads that read, and that multiply, within 3 % of the
best.

Invariant: no count that was measured or taken by default exceeds the cores that affinity and the
cgroup's quota grant. Tokens do not depend on either number where layers and attention are native.

When it loses: a count that changes from step to step makes OpenMP start threads anew (tens of
microseconds), so traffic that alternates prompts and decodes gains only where the cores saved are
put to use by others. With one core there is nothing to choose.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch

from ridgeline.config.settings import Settings
from ridgeline.hardware import measure, system

FEW_ROWS = 16
"""Up to so many rows a step is bound by the bytes of the weights (benchmarks/bench_linear.py)."""


class ThreadRates(NamedTuple):
    """By number of threads: bytes read and operations done per second, all threads together."""

    read: Mapping[int, float]
    multiply: Mapping[int, float]


class MeasureRates(Protocol):
    """Measures with 1, 2, 4, … up to `most` threads."""

    def __call__(self, most: int) -> ThreadRates: ...


class ThreadPlan(NamedTuple):
    """Threads of steps of many rows and of few, and where each number comes from."""

    num_threads: int
    num_threads_decode: int
    why: str
    why_decode: str


def plan_threads(settings: Settings, cores: system.Cores, rates_of: MeasureRates) -> ThreadPlan:
    """The plan of these settings on these cores; measures only where it is asked to."""
    usable = max(1, int(cores.usable))
    most = settings.num_threads or usable
    why = _why_most(settings, cores.usable, usable)
    many, few = most, settings.num_threads_decode or most
    why_decode = "as num_threads" if settings.num_threads_decode is None else "as requested"
    if settings.thread_plan == "auto":
        rates = rates_of(min(most, usable))
        if settings.num_threads is None:
            many = measure.enough_threads(rates.multiply)
            why = f"measured: arithmetic by threads, GFLOP/s: {_told(rates.multiply)}"
        if settings.num_threads_decode is None:
            few = measure.enough_threads(rates.read)
            why_decode = f"measured: reads by threads, GB/s: {_told(rates.read)}"
    return ThreadPlan(many, few, why, why_decode)


def _why_most(settings: Settings, granted: float, usable: int) -> str:
    if settings.num_threads is None:
        return f"{granted:g} cores usable (affinity and cgroup quota)"
    over = settings.num_threads > usable
    return f"as requested; more than the {granted:g} usable cores" if over else "as requested"


def _told(rates: Mapping[int, float]) -> str:
    return ", ".join(f"{count}: {rate / 1e9:.1f}" for count, rate in rates.items())


def measure_rates(most: int) -> ThreadRates:
    """Both rates of this machine now."""
    num_bytes = measure.memory_buffer_bytes(system.caches(), system.memory().available_bytes)
    counts = measure.thread_counts(most)
    return ThreadRates(
        {n: measure.read_bandwidth(num_bytes, n).per_s for n in counts},
        {n: measure.multiply_peak("float32", n).per_s for n in counts},
    )


class StepThreads:
    """Sets torch's number of threads, which native code asks for too, before a step."""

    def __init__(self, num_threads: int, num_threads_decode: int) -> None:
        self._many, self._few = num_threads, num_threads_decode

    def begin(self, num_rows: int) -> None:
        """For a step of `num_rows` rows; on the thread that computes."""
        count = self._few if num_rows <= FEW_ROWS else self._many
        # Asked of torch, not remembered: another engine of this process may have set its own.
        if count != torch.get_num_threads():
            torch.set_num_threads(count)
