"""Names of processes that hold leases, so that the death of one can be detected.

A process id may have been reused: the boot id and the process's start time tell.
"""

from __future__ import annotations

import os
from pathlib import Path

_PROC = Path("/proc")


def this_process() -> str:
    """The name of this process as an owner of leases."""
    return _name(os.getpid()) or f"unknown:{os.getpid()}"


def is_gone(owner: str) -> bool:
    """Whether the owner was a process of this machine and has ended.

    The end of a process elsewhere only shows when its leases expire.
    """
    boot, _, rest = owner.partition(":")
    process_id = rest.partition(":")[0]
    if not process_id.isdecimal() or boot == "unknown":
        return False
    is_same_machine = boot.partition("/")[0] == _machine()
    return is_same_machine and _name(int(process_id)) != owner


def _name(process_id: int) -> str | None:
    """MACHINE/BOOT:ID:START of a live process."""
    try:
        stat = (_PROC / str(process_id) / "stat").read_text(encoding="utf-8", errors="replace")
        boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the command name before it may contain anything
    return f"{_machine()}/{boot}:{process_id}:{fields[19]}"


def _machine() -> str:
    return os.uname().nodename.replace(":", "_").replace("/", "_")
