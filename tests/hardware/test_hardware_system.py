"""Cores, memory, caches and instructions, read from made-up systems."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline.hardware import system
from ridgeline.hardware.machine import CpuCache

GIB = 1024**3
MEMINFO = "MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\n"


def make(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def test_no_cgroup_no_limit(tmp_path: Path) -> None:
    root = make(tmp_path, {"proc/meminfo": MEMINFO})
    assert system.cpu_quota(root) is None
    assert system.memory(root) == system.SystemMemory(total_bytes=16 * GIB, available_bytes=8 * GIB)


@pytest.mark.parametrize(
    ("own", "parent", "quota"),
    [
        ("max 100000", "max 100000", None),
        ("150000 100000", "max 100000", 1.5),
        ("max 100000", "50000 100000", 0.5),
        ("400000 100000", "200000 100000", 2.0),
    ],
)
def test_quota_of_cgroup_v2_and_its_ancestors(
    own: str, parent: str, quota: float | None, tmp_path: Path
) -> None:
    files = {
        "proc/self/cgroup": "0::/a/b",
        "sys/fs/cgroup/a/b/cpu.max": own,
        "sys/fs/cgroup/a/cpu.max": parent,
    }
    assert system.cpu_quota(make(tmp_path, files)) == quota


def test_a_container_sees_only_the_root_of_its_own_cgroup(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/host/path/gone", "sys/fs/cgroup/cpu.max": "250000 100000"}
    assert system.cpu_quota(make(tmp_path, files)) == 2.5


@pytest.mark.parametrize(("quota_us", "quota"), [("-1", None), ("300000", 3.0)])
def test_quota_of_cgroup_v1(quota_us: str, quota: float | None, tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:memory:/box\n4:cpu,cpuacct:/box",
        "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": quota_us,
        "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "100000",
    }
    assert system.cpu_quota(make(tmp_path, files)) == quota


def test_memory_limit_of_cgroup_v2_leaves_out_what_can_be_reclaimed(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/",
        "sys/fs/cgroup/memory.max": str(4 * GIB),
        "sys/fs/cgroup/memory.current": str(3 * GIB),
        "sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {2 * GIB}",
    }
    found = system.memory(make(tmp_path, files))
    assert found == system.SystemMemory(total_bytes=4 * GIB, available_bytes=3 * GIB)


def test_memory_limit_of_cgroup_v1_and_its_number_for_none(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "5:memory:/box",
        "sys/fs/cgroup/memory/box/memory.limit_in_bytes": str(2 * GIB),
        "sys/fs/cgroup/memory/box/memory.usage_in_bytes": str(3 * GIB),
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
    }
    found = system.memory(make(tmp_path, files))
    assert found == system.SystemMemory(total_bytes=2 * GIB, available_bytes=0)


def test_hyperthreads_are_not_cores(tmp_path: Path) -> None:
    cpu = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    files = {cpu.format(n): text for n, text in enumerate(["0,2", "1,3", "0,2", "1,3"])}
    cores = system.cores(make(tmp_path, files), {0, 1, 2, 3})
    assert (cores.physical, cores.affinity, cores.usable) == (2, 4, 2.0)
    assert system.cores(tmp_path, {0, 2}).usable == 1.0
    make(tmp_path, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "150000 100000"})
    assert system.cores(tmp_path, {0, 1, 2, 3}).usable == 1.5


def test_caches_count_instances_that_can_be_used(tmp_path: Path) -> None:
    files = {}
    for cpu in range(4):
        for index, (level, kind, size, shared) in enumerate(
            [
                ("1", "Data", "32K", str(cpu)),
                ("1", "Instruction", "64K", str(cpu)),
                ("3", "Unified", "16M", "0-1" if cpu < 2 else "2-3"),
            ]
        ):
            base = f"sys/devices/system/cpu/cpu{cpu}/cache/index{index}"
            for key, value in (
                ("level", level),
                ("type", kind),
                ("size", size),
                ("shared_cpu_list", shared),
            ):
                files[f"{base}/{key}"] = value
    make(tmp_path, files)
    assert system.caches(tmp_path, {0, 1, 2}) == (
        CpuCache(level=1, size_bytes=32 * 1024, instances=3),
        CpuCache(level=3, size_bytes=16 * 1024**2, instances=2),
    )


def test_instructions_and_native_dtypes(tmp_path: Path) -> None:
    cpuinfo = "model name\t: Some CPU @ 2.5GHz\nflags\t\t: fpu avx2 avx512_vnni amx_bf16 f16c"
    root = make(tmp_path, {"proc/cpuinfo": cpuinfo})
    isa = system.isa_flags(root)
    assert system.cpu_model(root) == "Some CPU @ 2.5GHz"
    assert isa == ("avx2", "f16c", "avx512_vnni", "amx_bf16")
    assert system.native_dtypes(isa) == ("float32", "bfloat16", "int8")
    assert system.native_dtypes(("avx2", "f16c")) == ("float32",)  # f16c converts, no arithmetic
    arm = make(tmp_path / "arm", {"proc/cpuinfo": "processor: 0\nFeatures : fp asimd asimdhp bf16"})
    assert system.native_dtypes(system.isa_flags(arm)) == ("float32", "bfloat16", "float16")


def test_this_system_is_read_without_surprises() -> None:
    assert system.cpu_model()
    assert 0 < system.cores().usable <= system.cores().logical
    assert 0 < system.memory().available_bytes <= system.memory().total_bytes
