"""Who holds a lease: a process of this machine, named so that its death can be seen.

A process id alone may belong to somebody else by now; the boot and the instant of its start tell.
"""

from __future__ import annotations

import os
from pathlib import Path

_PROC = Path("/proc")


def this_process() -> str:
    """The name of this process as an owner of leases."""
    return _name(os.getpid()) or f"unknown:{os.getpid()}"


def is_gone(owner: str) -> bool:
    """True where the owner was a process of this machine and lives no more.

    Anybody else's death shows only when the lease runs out.
    """
    boot, _, rest = owner.partition(":")
    number = rest.partition(":")[0]
    if not number.isdecimal() or boot == "unknown":
        return False
    same_machine = boot.partition("/")[0] == _machine()
    return same_machine and _name(int(number)) != owner


def _name(process_id: int) -> str | None:
    """MACHINE/BOOT:ID:START of a live process."""
    try:
        stat = (_PROC / str(process_id) / "stat").read_text(encoding="utf-8", errors="replace")
        boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may hold anything
    return f"{_machine()}/{boot}:{process_id}:{fields[19]}"


def _machine() -> str:
    return os.uname().nodename.replace(":", "_").replace("/", "_")
