"""Usable cores, memory, caches and instruction sets, as Linux reports them.

Inside a container the plain counts are too high: the quota and memory limit of the cgroup and of
all its ancestors apply. Everything is read below a `root` folder, so that tests can provide one.
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from ridgeline.hardware.machine import CpuCache

ROOT = Path("/")
_ISA_OF_INTEREST = (
    "sse4_2",
    "avx",
    "avx2",
    "fma",
    "f16c",
    "avx_vnni",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512dq",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_int8",
    "amx_bf16",
    "amx_fp16",
    "asimd",
    "asimdhp",
    "asimddp",
    "i8mm",
    "bf16",
    "sve",
    "sve2",
)
_NATIVE = {
    "bfloat16": {"avx512_bf16", "amx_bf16", "bf16"},
    "float16": {"avx512_fp16", "amx_fp16", "asimdhp"},
    "int8": {"avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm"},
}


_MEMORY_FILES = (
    ("", "memory.max", "memory.current"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)


class Cores(msgspec.Struct, frozen=True, kw_only=True):
    """Cores of the machine, and those that this process may use."""

    logical: int
    physical: int
    affinity: int
    quota: float | None

    @property
    def usable(self) -> float:
        """Physical cores allowed by the affinity, limited by the cgroup's quota."""
        granted = float(min(self.affinity, self.physical))
        return granted if self.quota is None else min(granted, self.quota)


class SystemMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Total and available bytes, within the cgroup's limit."""

    total_bytes: int
    available_bytes: int


def read_text(path: Path) -> str | None:
    """The text of a pseudo-file, or None if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def cpu_model(root: Path = ROOT) -> str:
    """The processor's name."""
    fields = _cpuinfo(root)
    return fields.get("model name") or platform.processor() or platform.machine()


def isa_flags(root: Path = ROOT) -> tuple[str, ...]:
    """Instruction sets that matter for inference, as Linux names them."""
    fields = _cpuinfo(root)
    return tuple(flag for flag in _ISA_OF_INTEREST if flag in _flags(fields))


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Every feature of this machine's processor, as Linux names them."""
    return _flags(_cpuinfo(ROOT))


def _flags(fields: Mapping[str, str]) -> frozenset[str]:
    return frozenset((fields.get("flags") or fields.get("Features") or "").split())


def native_dtypes(isa: tuple[str, ...]) -> tuple[str, ...]:
    """Dtypes whose products the CPU computes natively."""
    return ("float32", *(dtype for dtype, flags in _NATIVE.items() if flags & set(isa)))


def _cpuinfo(root: Path) -> dict[str, str]:
    fields: dict[str, str] = {}
    for line in (read_text(root / "proc/cpuinfo") or "").splitlines():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip(), value.strip())
    return fields


def cores(root: Path = ROOT, allowed: set[int] | None = None) -> Cores:
    """Count cores.

    `allowed`: the CPUs of this process's affinity (None: as the system reports it).
    """
    if allowed is None:
        allowed = os.sched_getaffinity(0)
    siblings = {_siblings(root, cpu) for cpu in allowed}
    return Cores(
        logical=os.cpu_count() or len(allowed),
        physical=len(siblings),
        affinity=len(allowed),
        quota=cpu_quota(root),
    )


def _siblings(root: Path, cpu: int) -> str:
    """The CPUs that share a physical core, as one key."""
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    return read_text(topology / "thread_siblings_list") or str(cpu)


def cpu_quota(root: Path = ROOT) -> float | None:
    """Cores that the cgroup (v1 or v2) allows, the minimum over its ancestors; None: no limit."""
    quotas = [_quota_v2(folder) for folder in _cgroup_folders(root, "")]
    quotas += [_quota_v1(folder) for folder in _cgroup_folders(root, "cpu")]
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota_v2(folder: Path) -> float | None:
    parts = (read_text(folder / "cpu.max") or "").split()
    if len(parts) != 2 or parts[0] == "max":
        return None
    return int(parts[0]) / int(parts[1])


def _quota_v1(folder: Path) -> float | None:
    quota = int(read_text(folder / "cpu.cfs_quota_us") or -1)
    period = int(read_text(folder / "cpu.cfs_period_us") or 0)
    return quota / period if quota > 0 and period > 0 else None


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """This process's cgroup and its ancestors. `controller` "" means the unified (v2) hierarchy."""
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        _, names, path = line.split(":", 2)
        if controller not in names.split(","):
            continue
        for mount in _mounts(root, controller, names):
            relative = Path(path.lstrip("/"))
            for folder in (relative, *relative.parents):
                if (mount / folder).is_dir():
                    yield mount / folder


def _mounts(root: Path, controller: str, names: str) -> list[Path]:
    base = root / "sys/fs/cgroup"
    return [base, base / "unified"] if controller == "" else [base / controller, base / names]


def memory(root: Path = ROOT) -> SystemMemory:
    """Memory of the machine, or of the cgroup if that is less."""
    fields = _meminfo(root)
    total, available = fields.get("MemTotal", 0), fields.get("MemAvailable", 0)
    for limit, used in _memory_limits(root):
        total, available = min(total, limit), min(available, max(limit - used, 0))
    return SystemMemory(total_bytes=total, available_bytes=available)


def _meminfo(root: Path) -> dict[str, int]:
    fields = {}
    for line in (read_text(root / "proc/meminfo") or "").splitlines():
        key, _, value = line.partition(":")
        number = value.split()
        if number and number[0].isdigit():
            fields[key] = int(number[0]) * 1024
    return fields


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, bytes in use that cannot be reclaimed) of every cgroup that sets a limit."""
    for controller, limit_file, usage_file in _MEMORY_FILES:
        for folder in _cgroup_folders(root, controller):
            limit = read_text(folder / limit_file) or "max"
            if limit.isdigit():
                usage = int(read_text(folder / usage_file) or 0)
                yield int(limit), max(usage - _inactive_file(folder), 0)


def _inactive_file(folder: Path) -> int:
    """Bytes of page cache that the kernel can reclaim, although they count as used."""
    for line in (read_text(folder / "memory.stat") or "").splitlines():
        key, _, value = line.partition(" ")
        if key in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def caches(root: Path = ROOT, allowed: set[int] | None = None) -> tuple[CpuCache, ...]:
    """Data and unified caches that this process's CPUs can use, smallest first."""
    if allowed is None:
        allowed = os.sched_getaffinity(0)
    found: dict[int, dict[str, int]] = {}
    for cpu in sorted(allowed):
        for index in sorted((root / f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index*")):
            if read_text(index / "type") in ("Data", "Unified"):
                shared = read_text(index / "shared_cpu_list") or str(cpu)
                level = int(read_text(index / "level") or 0)
                found.setdefault(level, {})[shared] = _size(read_text(index / "size") or "0")
    return tuple(
        CpuCache(level=level, size_bytes=max(sizes.values()), instances=len(sizes))
        for level, sizes in sorted(found.items())
    )


def _size(text: str) -> int:
    """ "32768K" in bytes."""
    units = {"K": 1024, "M": 1024**2, "G": 1024**3}
    return int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text)
