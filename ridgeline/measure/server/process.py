"""The processes of a server on this machine: whose port it is, and what they use (psutil).

A server is a tree: vLLM's front end, its engine and its workers are processes of their own. CPU
time is theirs together; memory is the sum of their resident sets, in which pages that they share
count once for each.
"""

from __future__ import annotations

import ipaddress
import socket
from itertools import pairwise

import msgspec
import psutil  # type: ignore[import-untyped, unused-ignore]


class ProcessReading(msgspec.Struct, frozen=True):
    """A tree of processes at one instant: their CPU seconds so far and what they hold."""

    at_s: float
    cpu_s: float
    rss_bytes: float
    num_processes: int


class ProcessUse(msgspec.Struct, frozen=True, kw_only=True):
    """Over a run. `cpu_cores`: CPU seconds per second, so that 2.0 is two cores."""

    cpu_cores: float
    rss_bytes: float
    rss_peak_bytes: float
    num_processes: int


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
    return ProcessReading(at_s, sum(cpu for cpu, _ in rows), sum(rss for _, rss in rows), len(rows))


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
    grown = (max(0.0, b.cpu_s - a.cpu_s) for a, b in pairwise(readings))
    return ProcessUse(
        cpu_cores=sum(grown) / (readings[-1].at_s - readings[0].at_s),
        rss_bytes=sum(each.rss_bytes for each in readings) / len(readings),
        rss_peak_bytes=max(each.rss_bytes for each in readings),
        num_processes=max(each.num_processes for each in readings),
    )
