"""How much of the machine other work took while something was measured (psutil; Linux).

Figures of a run are only comparable if the measured processes had the cores. The system's CPU time
minus that of the measured processes is what other processes took, and `steal` is what the host of
a virtual machine gave to other guests, both on the CPUs that this process may use. Whether it was
missing shows in the time for which threads of the measured processes were ready and waited.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil

from ridgeline.measure.monitors.process_usage import read_tree
from ridgeline.records import MachineLoad

MIN_DURATION_S = 0.2  # CPU time is counted in hundredths of a second


class SystemReading(msgspec.Struct, frozen=True):
    """CPU seconds since boot, over the CPUs of this process; `own_s`: of measured processes."""

    at_s: float
    busy_s: float
    stolen_s: float
    io_wait_s: float
    own_s: float
    waited_s: float | None
    num_cpus: int
    clock_share: float | None = None


class LoadMeter:
    """Measures the load by others from construction on.

    `pids`: roots of the measured processes besides this one and its children.
    """

    def __init__(self, pids: Sequence[int] = ()) -> None:
        self._pids = tuple(pids)
        self._before = read_system(self._pids)

    def read(self) -> MachineLoad | None:
        """The load since construction; None if it is unknown or the time was too short."""
        return machine_load(self._before, read_system(self._pids))


def machine_load(before: SystemReading | None, after: SystemReading | None) -> MachineLoad | None:
    """The load between two readings."""
    if before is None or after is None or after.at_s - before.at_s < MIN_DURATION_S:
        return None
    capacity_s = (after.at_s - before.at_s) * after.num_cpus
    own_s = max(0.0, after.own_s - before.own_s)
    others_s = after.busy_s - before.busy_s - own_s
    waited_share = None
    if before.waited_s is not None and after.waited_s is not None:
        waited_s = max(0.0, after.waited_s - before.waited_s)
        waited_share = _share(waited_s, max(own_s + waited_s, 1e-9))
    return MachineLoad(
        waited_share=waited_share,
        others_share=_share(others_s, capacity_s),
        stolen_share=_share(after.stolen_s - before.stolen_s, capacity_s),
        io_wait_share=_share(after.io_wait_s - before.io_wait_s, capacity_s),
        clock_share=after.clock_share,
    )


def _share(part_s: float, capacity_s: float) -> float:
    return min(1.0, max(0.0, part_s / capacity_s))


def read_system(pids: Sequence[int]) -> SystemReading | None:
    """What the system reports now; None if it does not."""
    trees = [read_tree(pid, 0.0) for pid in dict.fromkeys((os.getpid(), *pids))]
    measured = [tree for tree in trees if tree is not None]
    waits = [tree.waited_s for tree in measured if tree.waited_s is not None]
    try:
        cpus = sorted(os.sched_getaffinity(0))
        rows = psutil.cpu_times(percpu=True)
        times = [rows[cpu] for cpu in cpus if cpu < len(rows)]
    except (AttributeError, OSError):
        return None
    if not times:
        return None
    return SystemReading(
        at_s=time.monotonic(),
        busy_s=sum(t.user + t.system + getattr(t, "irq", 0.0) for t in times)
        + sum(t.nice + getattr(t, "softirq", 0.0) for t in times),
        stolen_s=sum(getattr(t, "steal", 0.0) for t in times),
        io_wait_s=sum(getattr(t, "iowait", 0.0) for t in times),
        own_s=sum(tree.cpu_s for tree in measured),
        waited_s=sum(waits) if waits else None,
        num_cpus=len(times),
        clock_share=_clock_share(cpus),
    )


def _clock_share(cpus: Sequence[int]) -> float | None:
    """The current clock as a share of the maximum, mean over the CPUs; None if unreadable."""
    shares = []
    for cpu in cpus:
        folder = Path(f"/sys/devices/system/cpu/cpu{cpu}/cpufreq")
        try:
            now = float((folder / "scaling_cur_freq").read_text())
            shares.append(now / float((folder / "cpuinfo_max_freq").read_text()))
        except (OSError, ValueError, ZeroDivisionError):
            return None
    return sum(shares) / len(shares) if shares else None
