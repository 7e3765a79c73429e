"""CPU and memory of a server's processes on this machine (psutil).

A server is a tree of processes: vLLM's front end, its engine and its workers. CPU time is summed
over them; memory is the sum of their resident sets, in which shared pages count several times.

Contention for the cores shows in two figures (Linux): the time during which threads of the tree
were runnable and waited for a core (`run_delay` of /proc/PID/task/TID/schedstat), and the time that
the host of a virtual machine gave to other guests (`steal` of /proc/stat).
"""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from itertools import pairwise
from pathlib import Path

import msgspec
import psutil


class ProcessReading(msgspec.Struct, frozen=True):
    """A tree of processes at one time.

    `cpu_s`: CPU seconds so far. `waited_s`: seconds for which threads waited for a core.
    `stolen_s`: seconds taken by the host of the machine. None: not reported.
    """

    at_s: float
    cpu_s: float
    rss_bytes: float
    num_processes: int
    waited_s: float | None = None
    stolen_s: float | None = None


class ProcessUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Usage over a run. `cpu_cores`: CPU seconds per second, so that 2.0 is two cores.

    `taken_share`: share of the demanded CPU time that was waited for or stolen; None: unknown.
    """

    cpu_cores: float
    rss_bytes: float
    rss_peak_bytes: float
    num_processes: int
    taken_share: float | None = None


def is_local(host: str) -> bool:
    """Whether an address belongs to this machine."""
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return any(
        ipaddress.ip_address(str(address).partition("%")[0]).is_loopback for address in addresses
    )


def listening_process(port: int) -> int | None:
    """The pid of the process that listens on a local port; None if it is not visible."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:
        return None
    listening = (c for c in connections if c.status == psutil.CONN_LISTEN)
    return next((c.pid for c in listening if c.pid and c.laddr.port == port), None)


def read_tree(pid: int, at_s: float) -> ProcessReading | None:
    """A process and its descendants; None if it no longer exists."""
    try:
        root = psutil.Process(pid)
        tree = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return None
    rows = [row for process in tree if (row := _usage(process)) is not None]
    if not rows:
        return None
    cpu_s, rss_bytes = sum(cpu for cpu, _ in rows), sum(rss for _, rss in rows)
    waits = [waited for process in tree if (waited := _waited_s(process.pid)) is not None]
    stolen_s = getattr(psutil.cpu_times(), "steal", None)
    return ProcessReading(
        at_s, cpu_s, rss_bytes, len(rows), sum(waits) if waits else None, stolen_s
    )


def _waited_s(pid: int) -> float | None:
    """Seconds for which the threads of a process were runnable but not running; None if unknown."""
    try:
        files = Path(f"/proc/{pid}/task").glob("*/schedstat")
        rows = [file.read_text().split() for file in files]
    except OSError:  # not Linux, or a thread that has just ended
        return None
    return sum(int(row[1]) for row in rows) / 1e9 if rows else None


def _usage(process: psutil.Process) -> tuple[float, float] | None:
    """CPU seconds and resident bytes; None if the process has ended or may not be read."""
    try:
        with process.oneshot():
            used = process.cpu_times()
            return used.user + used.system, float(process.memory_info().rss)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None


def process_usage(readings: list[ProcessReading]) -> ProcessUsage | None:
    """Usage between the first and the last reading; None for fewer than two.

    The CPU time of processes that have ended is not counted.
    """
    if len(readings) < 2 or readings[-1].at_s <= readings[0].at_s:
        return None
    cpu_s = _grown([reading.cpu_s for reading in readings])
    lost = [
        _grown([seconds for seconds in series if seconds is not None])
        for series in ([r.waited_s for r in readings], [r.stolen_s for r in readings])
        if series.count(None) < len(series) - 1
    ]
    demand_s = cpu_s + sum(lost)
    return ProcessUsage(
        cpu_cores=cpu_s / (readings[-1].at_s - readings[0].at_s),
        taken_share=sum(lost) / demand_s if lost and demand_s > 0 else None,
        rss_bytes=sum(reading.rss_bytes for reading in readings) / len(readings),
        rss_peak_bytes=max(reading.rss_bytes for reading in readings),
        num_processes=max(reading.num_processes for reading in readings),
    )


class CpuContention:
    """CPU time that this process and its children demanded but did not get, since construction.

    Detects disturbed measurements by the accounting of the kernel and the host, not by duration.
    """

    def __init__(self) -> None:
        self._before = read_tree(os.getpid(), time.monotonic())

    def taken_share(self) -> float | None:
        """Share of the demanded CPU time that was waited for or stolen; None if unknown."""
        readings = [self._before, read_tree(os.getpid(), time.monotonic())]
        used = process_usage([reading for reading in readings if reading is not None])
        return None if used is None else used.taken_share


def _grown(values: list[float]) -> float:
    """Sum of all increases; a decrease is a thread or process that ended."""
    return sum(max(0.0, b - a) for a, b in pairwise(values))
