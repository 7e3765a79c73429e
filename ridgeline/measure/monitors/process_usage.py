"""The processes of a server on this machine: whose port it is, and what they use (psutil).

A server is a tree: vLLM's front end, its engine and its workers are processes of their own. CPU
time is theirs together; memory is the sum of their resident sets, in which pages that they share
count once for each.

What others take of the cores is seen from two sides (Linux): the time that the tree's threads were
ready and waited for a core (`run_delay` of /proc/PID/task/TID/schedstat), and the time that the
host of a virtual machine gave to its other guests (`steal` of /proc/stat).
"""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from itertools import pairwise
from pathlib import Path

import msgspec
import psutil  # type: ignore[import-untyped, unused-ignore]


class ProcessReading(msgspec.Struct, frozen=True):
    """A tree of processes at one instant: their CPU seconds so far and what they hold; the seconds
    that their threads waited for a core and that the machine's host took from it, None: not told.
    """

    at_s: float
    cpu_s: float
    rss_bytes: float
    num_processes: int
    waited_s: float | None = None
    stolen_s: float | None = None


class ProcessUse(msgspec.Struct, frozen=True, kw_only=True):
    """Over a run. `cpu_cores`: CPU seconds per second, so that 2.0 is two cores. `taken_share`: of
    the CPU time that the tree asked for, what it waited for or the host took; None: not told here.
    """

    cpu_cores: float
    rss_bytes: float
    rss_peak_bytes: float
    num_processes: int
    taken_share: float | None = None


def is_here(host: str) -> bool:
    """Whether an address is this machine's own."""
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return any(ipaddress.ip_address(str(each).partition("%")[0]).is_loopback for each in found)


def listener(port: int) -> int | None:
    """The process that listens on a port here; None where it cannot be seen."""
    try:
        found = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:
        return None
    heard = (each for each in found if each.status == psutil.CONN_LISTEN)
    return next((each.pid for each in heard if each.pid and each.laddr.port == port), None)


def read_tree(pid: int, at_s: float) -> ProcessReading | None:
    """A process and all that it started; None once it is gone."""
    try:
        root = psutil.Process(pid)
        tree = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return None
    rows = [row for each in tree if (row := _usage(each)) is not None]
    if not rows:
        return None
    cpu_s, rss_bytes = sum(cpu for cpu, _ in rows), sum(rss for _, rss in rows)
    waits = [waited for each in tree if (waited := _waited_s(each.pid)) is not None]
    stolen_s = getattr(psutil.cpu_times(), "steal", None)
    return ProcessReading(
        at_s, cpu_s, rss_bytes, len(rows), sum(waits) if waits else None, stolen_s
    )


def _waited_s(pid: int) -> float | None:
    """Seconds that a process's threads were ready to run and did not; None where nobody says."""
    try:
        told = [each.read_text().split() for each in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    except OSError:  # not Linux, or a thread that has just ended
        return None
    return sum(int(row[1]) for row in told) / 1e9 if told else None


def _usage(process: psutil.Process) -> tuple[float, float] | None:
    """CPU seconds and resident bytes; None where it has ended, or belongs to somebody else."""
    try:
        with process.oneshot():
            used = process.cpu_times()
            return used.user + used.system, float(process.memory_info().rss)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None


def use_of(readings: list[ProcessReading]) -> ProcessUse | None:
    """None where fewer than two readings were taken. CPU of a process that ended is not counted."""
    if len(readings) < 2 or readings[-1].at_s <= readings[0].at_s:
        return None
    cpu_s = _grown([each.cpu_s for each in readings])
    lost = [
        _grown([each for each in told if each is not None])
        for told in ([r.waited_s for r in readings], [r.stolen_s for r in readings])
        if told.count(None) < len(told) - 1
    ]
    asked_s = cpu_s + sum(lost)
    return ProcessUse(
        cpu_cores=cpu_s / (readings[-1].at_s - readings[0].at_s),
        taken_share=sum(lost) / asked_s if lost and asked_s > 0 else None,
        rss_bytes=sum(each.rss_bytes for each in readings) / len(readings),
        rss_peak_bytes=max(each.rss_bytes for each in readings),
        num_processes=max(each.num_processes for each in readings),
    )


class Witness:
    """How much of the CPU time that this process and its children ask for others have, from now on.

    It tells whether a measurement met somebody by the kernel's account and the host's, and not by
    how long it took.
    """

    def __init__(self) -> None:
        self._before = read_tree(os.getpid(), time.monotonic())

    def taken(self) -> float | None:
        """The share until now; None where nobody tells."""
        rows = [self._before, read_tree(os.getpid(), time.monotonic())]
        used = use_of([each for each in rows if each is not None])
        return None if used is None else used.taken_share


def _grown(values: list[float]) -> float:
    """By how much in all; what falls is a thread or a process that ended."""
    return sum(max(0.0, b - a) for a, b in pairwise(values))
