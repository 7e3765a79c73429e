"""Checks of this machine: whether Ridgeline can run, and whether it runs as fast as it could."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from ridgeline.errors import CannotRun
from ridgeline.hardware import system
from ridgeline.hardware.machine import FULL_SHARE, Machine
from ridgeline.hardware.measure import enough_threads, native
from ridgeline.hardware.probe import probe
from ridgeline.paths import default_cache_dir

_GB = 1e9
_LOW_MEMORY_BYTES = 4 * _GB
_LOW_DISK_BYTES = 2 * _GB
_LOW_BANDWIDTH_BYTES_S = 2 * _GB
_OLDEST_PYTHON = (3, 11)
_OLDEST_TORCH = (2, 9)


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one check. `remedy`: what to do if it failed, else "".

    `required`: Ridgeline cannot run if it fails.
    """

    ok: bool
    title: str
    detail: str
    remedy: str = ""
    required: bool = False


_ISA_VARIABLE = "RIDGELINE_NATIVE_ISA"


class CheckedSystem(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the system that the checks read.

    `machine` is None if it could not be probed; `native_error` or `torch_error` says why.
    `native_isas`: the variants of the linear kernels that this CPU runs, best first.
    """

    python: tuple[int, int, int]
    torch_version: str | None
    torch_error: str
    machine: Machine | None
    native_error: str
    native_isas: str = ""
    cores: system.Cores
    free_disk_bytes: int
    disk_path: str
    environment: Mapping[str, str]
    load_average: float


def diagnose(*, refresh: bool = False, cache_dir: Path | None = None) -> list[Check]:
    """Run every check. The machine is probed if there is no recent record, or with `refresh`."""
    return run_checks(inspect_system(refresh=refresh, cache_dir=cache_dir))


def inspect_system(*, refresh: bool = False, cache_dir: Path | None = None) -> CheckedSystem:
    """The present state of the system."""
    machine, native_error, torch_error = _probe(refresh, cache_dir)
    folder = _existing(cache_dir or default_cache_dir())
    return CheckedSystem(
        python=(sys.version_info.major, sys.version_info.minor, sys.version_info.micro),
        torch_version=_version("torch"),
        torch_error=torch_error,
        machine=machine,
        native_error=native_error,
        native_isas="" if native_error else native().linear_isas(),
        cores=system.cores(),
        free_disk_bytes=shutil.disk_usage(folder).free,
        disk_path=str(folder),
        environment=dict(os.environ),
        load_average=os.getloadavg()[0],
    )


def run_checks(system_state: CheckedSystem) -> list[Check]:
    """Run every check; those of the probed machine only if there is one."""
    checks = [check(system_state) for check in _SYSTEM_CHECKS]
    if system_state.machine is not None:
        checks += [check(system_state.machine, system_state) for check in _MACHINE_CHECKS]
    return checks


def _probe(refresh: bool, cache_dir: Path | None) -> tuple[Machine | None, str, str]:
    """(machine, why the native module does not load, why torch does not load)."""
    try:
        native()
    except CannotRun as error:
        return None, str(error.value), ""
    try:
        return probe(refresh=refresh, cache_dir=cache_dir), "", ""
    except (ImportError, OSError) as error:
        return None, "", str(error).splitlines()[0]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _existing(folder: Path) -> Path:
    """The folder, or its nearest ancestor that exists."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def _python(system_state: CheckedSystem) -> Check:
    good = system_state.python[:2] >= _OLDEST_PYTHON
    return Check(
        ok=good,
        title="Python",
        detail=".".join(map(str, system_state.python)),
        remedy="" if good else "install Python 3.11 or newer, then run make install",
        required=True,
    )


def _torch(system_state: CheckedSystem) -> Check:
    text = system_state.torch_version
    if text is None or system_state.torch_error:
        remedy = "run make install, or: pip install torch==2.13.0"
        detail = system_state.torch_error or "missing"
        return Check(ok=False, title="PyTorch", detail=detail, remedy=remedy, required=True)
    numbers = tuple(int(part) for part in text.split("+")[0].split(".")[:2])
    good = numbers >= _OLDEST_TORCH
    remedy = "" if good else "pip install 'torch>=2.9'"
    return Check(ok=good, title="PyTorch", detail=text, remedy=remedy, required=True)


def _native_module(system_state: CheckedSystem) -> Check:
    runs, forced = (
        system_state.native_isas.split(","),
        system_state.environment.get(_ISA_VARIABLE, "auto"),
    )
    if not system_state.native_error and forced not in ("auto", *runs):
        return Check(
            ok=False,
            title="native module",
            detail=f"{_ISA_VARIABLE}={forced}, which this CPU or build does not support",
            remedy=f"unset the variable, or set it to one of {', '.join(runs)}",
            required=True,
        )
    good = not system_state.native_error
    chosen = runs[0] if forced == "auto" else f"{forced} (set by {_ISA_VARIABLE})"
    return Check(
        ok=good,
        title="native module",
        detail=f"loaded; linear kernels: {chosen}" if good else system_state.native_error,
        remedy="" if good else "run make install; it needs a C++17 compiler",
        required=True,
    )


def _cores(system_state: CheckedSystem) -> Check:
    cores = system_state.cores
    detail = f"{cores.usable:g} usable of {cores.physical} physical, {cores.logical} logical"
    if cores.quota is not None and cores.quota < min(cores.affinity, cores.physical):
        return Check(
            ok=False,
            title="cores",
            detail=f"{detail}; the container's quota is {cores.quota:g}",
            remedy=f"raise docker --cpus or Kubernetes limits.cpu to {cores.physical}",
        )
    if cores.affinity < cores.logical:
        remedy = "start Ridgeline without taskset, numactl or a cpuset to use all cores"
        return Check(
            ok=False, title="cores", detail=f"{detail}; limited by the CPU affinity", remedy=remedy
        )
    return Check(ok=True, title="cores", detail=detail)


def _threads(system_state: CheckedSystem) -> Check:
    text = system_state.environment.get("OMP_NUM_THREADS", "")
    usable = max(1, int(system_state.cores.usable))
    if not text.isdigit() or int(text) == usable:
        return Check(
            ok=True,
            title="OpenMP threads",
            detail=text or f"OMP_NUM_THREADS is not set: {usable} threads",
        )
    effect = "leave cores idle" if int(text) < usable else "compete for the cores"
    return Check(
        ok=False,
        title="OpenMP threads",
        detail=f"OMP_NUM_THREADS={text} threads {effect}; {usable} usable",
        remedy=f"unset OMP_NUM_THREADS, or set it to {usable}",
    )


def _disk(system_state: CheckedSystem) -> Check:
    good = system_state.free_disk_bytes >= _LOW_DISK_BYTES
    return Check(
        ok=good,
        title="disk",
        detail=f"{system_state.free_disk_bytes / _GB:.1f} GB free at {system_state.disk_path}",
        remedy="" if good else "free some space, or set XDG_CACHE_HOME to another disk",
    )


def _isa(machine: Machine, system_state: CheckedSystem) -> Check:
    wide = [flag for flag in machine.isa if flag.startswith(("avx", "amx", "asimd", "sve", "i8mm"))]
    good = bool({"avx2", "asimd"} & set(machine.isa))
    return Check(
        ok=good,
        title="instructions",
        detail=f"{machine.cpu_model}: {' '.join(wide) or 'no vector instructions'}",
        remedy=""
        if good
        else "none: the portable kernels run, several times slower than with AVX2",
    )


def _dtypes(machine: Machine, system_state: CheckedSystem) -> Check:
    slow = [dtype for dtype in ("bfloat16", "int8") if dtype not in machine.native_dtypes]
    detail = f"native arithmetic in {', '.join(machine.native_dtypes)}"
    if slow:
        detail += f"; no instructions for {' or '.join(slow)}"
    return Check(ok=True, title="data types", detail=detail)


def _memory(machine: Machine, system_state: CheckedSystem) -> Check:
    free = machine.memory_available_bytes
    good = free >= _LOW_MEMORY_BYTES
    detail = f"{free / _GB:.1f} GB of {machine.memory_bytes / _GB:.1f} GB available"
    remedy = "" if good else "stop other programs, or raise the container's memory limit"
    return Check(ok=good, title="memory", detail=detail, remedy=remedy)


def _quiet(machine: Machine, system_state: CheckedSystem) -> Check:
    detail = f"the probe got {machine.cpu_share:.0%} of its cores"
    if not machine.disturbed:
        return Check(ok=True, title="other load", detail=detail)
    return Check(
        ok=False,
        title="other load",
        detail=f"{detail} (needs {FULL_SHARE:.0%}); load average {system_state.load_average:.1f}",
        remedy="stop other programs, then run ridgeline doctor --refresh",
    )


def _bandwidth(machine: Machine, system_state: CheckedSystem) -> Check:
    best = machine.best_bandwidth_bytes_s
    by_threads = ", ".join(
        f"{n}: {rate / _GB:.1f}" for n, rate in sorted(machine.read_bandwidth_bytes_s.items())
    )
    good = best >= _LOW_BANDWIDTH_BYTES_S
    remedy = (
        ""
        if good
        else "check whether the host is throttled or overcommitted, then run ridgeline doctor "
        "--refresh"
    )
    detail = f"{best / _GB:.1f} GB/s read (by number of threads: {by_threads})"
    return Check(ok=good, title="memory bandwidth", detail=detail, remedy=remedy)


def _thread_plan(machine: Machine, system_state: CheckedSystem) -> Check:
    few = enough_threads(machine.read_bandwidth_bytes_s)
    detail = f"{few} of {machine.num_threads} threads reach the memory bandwidth"
    if few < machine.num_threads:
        detail += f"; --num-threads-decode {few} (or --thread-plan auto) frees the other cores"
    return Check(ok=True, title="decode threads", detail=detail)


def _arithmetic(machine: Machine, system_state: CheckedSystem) -> Check:
    peaks = ", ".join(f"{d} {rate / 1e9:.0f}" for d, rate in machine.multiply_flops.items())
    gemm = ", ".join(f"{d} {rate / 1e9:.0f}" for d, rate in machine.gemm_flops.items())
    detail = f"peak {peaks} GFLOP/s; torch matrix products reach {gemm}"
    return Check(ok=True, title="arithmetic", detail=detail)


def _gpus(machine: Machine, system_state: CheckedSystem) -> Check:
    if machine.gpus:
        words = [f"{gpu.name}, {gpu.memory_bytes / _GB:.0f} GB" for gpu in machine.gpus]
        return Check(ok=True, title="GPU", detail="; ".join(words))
    hidden = any(Path("/dev").glob("nvidia[0-9]*"))
    return Check(
        ok=not hidden,
        title="GPU",
        detail="present, but not visible to torch" if hidden else "none; Ridgeline runs on the CPU",
        remedy="install a CUDA build of torch that matches the driver" if hidden else "",
    )


_SYSTEM_CHECKS: tuple[Callable[[CheckedSystem], Check], ...] = (
    _python,
    _torch,
    _native_module,
    _cores,
    _threads,
    _disk,
)
_MACHINE_CHECKS: tuple[Callable[[Machine, CheckedSystem], Check], ...] = (
    _isa,
    _dtypes,
    _memory,
    _quiet,
    _bandwidth,
    _thread_plan,
    _arithmetic,
    _gpus,
)
