"""The processes of a server on this machine: whose port it is, and what they use. Linux's /proc.

A server is a tree: vLLM's front end, its engine and its workers are processes of their own. CPU
time is theirs together; memory is the sum of their resident sets, in which pages that they share
count once for each.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import msgspec

PROC = Path("/proc")
_LISTENING = "0A"
_TICK_S = 1 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


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


def listener(port: int, proc: Path = PROC) -> int | None:
    """The process that listens on a port here; None where it cannot be seen."""
    sockets = {f"socket:[{inode}]" for inode in _listening(port, proc)}
    if not sockets:
        return None
    for folder in proc.glob("[0-9]*"):
        if any(_link(each) in sockets for each in _entries(folder / "fd")):
            return int(folder.name)
    return None


def read_tree(pid: int, at_s: float, proc: Path = PROC) -> ProcessReading | None:
    """A process and all that it started; None once it is gone."""
    rows = [row for each in _tree(pid, proc) if (row := _usage(each, proc)) is not None]
    if not rows:
        return None
    return ProcessReading(at_s, sum(cpu for cpu, _ in rows), sum(rss for _, rss in rows), len(rows))


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


def _listening(port: int, proc: Path) -> Iterator[str]:
    for name in ("tcp", "tcp6"):
        for line in _text(proc / "net" / name).split("\n")[1:]:
            words = line.split()
            heard = len(words) > 9 and words[3] == _LISTENING
            if heard and int(words[1].rpartition(":")[2], 16) == port:
                yield words[9]


def _tree(pid: int, proc: Path) -> Iterator[int]:
    yield pid
    for task in _entries(proc / str(pid) / "task"):
        for child in _text(task / "children").split():
            yield from _tree(int(child), proc)


def _usage(pid: int, proc: Path) -> tuple[float, float] | None:
    """CPU seconds and resident bytes. The name in `stat` may hold anything but a last bracket."""
    stat = _text(proc / str(pid) / "stat").rpartition(")")[2].split()
    held = _text(proc / str(pid) / "statm").split()
    if len(stat) < 13 or len(held) < 2:
        return None
    return (int(stat[11]) + int(stat[12])) * _TICK_S, int(held[1]) * _PAGE_BYTES


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
