"""`diagnose()`: is this machine ready to run Ridgeline well? One check per line, each with its
remedy.

A check looks at one thing and says what to do about it. `required` ones decide whether Ridgeline
can run at all; the others only whether it runs as fast as it could.
"""

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
    """One finding. `remedy` is "" where all is well."""

    ok: bool
    title: str
    detail: str
    remedy: str = ""
    required: bool = False


_ISA_VARIABLE = "RIDGELINE_NATIVE_ISA"


class Surroundings(msgspec.Struct, frozen=True, kw_only=True):
    """What the checks look at, gathered once, so that tests can hand in any machine.

    `machine` is None where it could not be probed; `native_error` or `torch_error` says why.
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
    """Look at this machine (probing it where no fresh record is cached) and run every check."""
    return run_checks(gather_surroundings(refresh=refresh, cache_dir=cache_dir))


def gather_surroundings(*, refresh: bool = False, cache_dir: Path | None = None) -> Surroundings:
    """Gather what the checks need."""
    machine, native_error, torch_error = _probe(refresh, cache_dir)
    folder = _existing(cache_dir or default_cache_dir())
    return Surroundings(
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


def run_checks(around: Surroundings) -> list[Check]:
    """Every check, in the order of the table."""
    found = [check(around) for check in _ALWAYS]
    if around.machine is not None:
        found += [check(around.machine, around) for check in _OF_MACHINE]
    return found


def _probe(refresh: bool, cache_dir: Path | None) -> tuple[Machine | None, str, str]:
    """(machine, why the native module does not load, why torch does not)."""
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


def _python(around: Surroundings) -> Check:
    good = around.python[:2] >= _OLDEST_PYTHON
    return Check(
        ok=good,
        title="Python",
        detail=".".join(map(str, around.python)),
        remedy="" if good else "install Python 3.11 or newer and run make install again",
        required=True,
    )


def _torch(around: Surroundings) -> Check:
    text = around.torch_version
    if text is None or around.torch_error:
        remedy = "run make install, or: pip install torch==2.13.0"
        detail = around.torch_error or "missing"
        return Check(ok=False, title="PyTorch", detail=detail, remedy=remedy, required=True)
    numbers = tuple(int(part) for part in text.split("+")[0].split(".")[:2])
    good = numbers >= _OLDEST_TORCH
    remedy = "" if good else "pip install 'torch>=2.9'"
    return Check(ok=good, title="PyTorch", detail=text, remedy=remedy, required=True)


def _native_module(around: Surroundings) -> Check:
    runs, forced = around.native_isas.split(","), around.environment.get(_ISA_VARIABLE, "auto")
    if not around.native_error and forced not in ("auto", *runs):
        return Check(
            ok=False,
            title="native module",
            detail=f"{_ISA_VARIABLE}={forced}, which this CPU or build lacks",
            remedy=f"unset it, or set one of {', '.join(runs)}",
            required=True,
        )
    good = not around.native_error
    chosen = runs[0] if forced == "auto" else f"{forced}, by {_ISA_VARIABLE}"
    return Check(
        ok=good,
        title="native module",
        detail=f"loads; linears run as {chosen}" if good else around.native_error,
        remedy="" if good else "run make install again; it needs a C++17 compiler",
        required=True,
    )


def _cores(around: Surroundings) -> Check:
    cores = around.cores
    detail = f"{cores.usable:g} usable of {cores.physical} physical, {cores.logical} logical"
    if cores.quota is not None and cores.quota < min(cores.affinity, cores.physical):
        return Check(
            ok=False,
            title="cores",
            detail=f"{detail}; the container's quota is {cores.quota:g}",
            remedy=f"raise docker --cpus or Kubernetes limits.cpu to {cores.physical}",
        )
    if cores.affinity < cores.logical:
        remedy = "start Ridgeline without taskset, numactl or a cpuset to use every core"
        return Check(ok=False, title="cores", detail=f"{detail}; affinity", remedy=remedy)
    return Check(ok=True, title="cores", detail=detail)


def _threads(around: Surroundings) -> Check:
    text = around.environment.get("OMP_NUM_THREADS", "")
    usable = max(1, int(around.cores.usable))
    if not text.isdigit() or int(text) == usable:
        return Check(
            ok=True, title="OpenMP threads", detail=text or f"not set, so {usable} are used"
        )
    word = "leave cores idle" if int(text) < usable else "fight for the cores"
    return Check(
        ok=False,
        title="OpenMP threads",
        detail=f"OMP_NUM_THREADS={text} threads {word}: {usable} usable",
        remedy=f"unset OMP_NUM_THREADS, or set it to {usable}",
    )


def _disk(around: Surroundings) -> Check:
    good = around.free_disk_bytes >= _LOW_DISK_BYTES
    return Check(
        ok=good,
        title="disk",
        detail=f"{around.free_disk_bytes / _GB:.1f} GB free at {around.disk_path}",
        remedy="" if good else "free some space, or set XDG_CACHE_HOME to another disk",
    )


def _isa(machine: Machine, around: Surroundings) -> Check:
    wide = [flag for flag in machine.isa if flag.startswith(("avx", "amx", "asimd", "sve", "i8mm"))]
    good = bool({"avx2", "asimd"} & set(machine.isa))
    return Check(
        ok=good,
        title="instructions",
        detail=f"{machine.cpu_model}: {' '.join(wide) or 'no vector instructions known'}",
        remedy="" if good else "without AVX2 the portable kernels run, several times slower",
    )


def _dtypes(machine: Machine, around: Surroundings) -> Check:
    slow = [dtype for dtype in ("bfloat16", "int8") if dtype not in machine.native_dtypes]
    detail = f"arithmetic in {', '.join(machine.native_dtypes)}"
    if slow:
        detail += f"; none of its own for {' or '.join(slow)}"
    return Check(ok=True, title="dtypes", detail=detail)


def _memory(machine: Machine, around: Surroundings) -> Check:
    free = machine.memory_available_bytes
    good = free >= _LOW_MEMORY_BYTES
    detail = f"{free / _GB:.1f} GB available of {machine.memory_bytes / _GB:.1f}"
    remedy = "" if good else "stop other programs or raise the container's memory limit"
    return Check(ok=good, title="memory", detail=detail, remedy=remedy)


def _quiet(machine: Machine, around: Surroundings) -> Check:
    detail = f"the probe's threads had {machine.cpu_share:.0%} of their cores"
    if not machine.disturbed:
        return Check(ok=True, title="quiet while probed", detail=detail)
    return Check(
        ok=False,
        title="quiet while probed",
        detail=f"{detail}; quiet is {FULL_SHARE:.0%}; the load is {around.load_average:.1f} now",
        remedy="stop what else is running, then: ridgeline doctor --refresh",
    )


def _bandwidth(machine: Machine, around: Surroundings) -> Check:
    best = machine.best_bandwidth_bytes_s
    by_threads = ", ".join(
        f"{n}: {rate / _GB:.1f}" for n, rate in sorted(machine.read_bandwidth_bytes_s.items())
    )
    good = best >= _LOW_BANDWIDTH_BYTES_S
    remedy = "" if good else "look for a throttled or overcommitted host; then --refresh"
    detail = f"reads {best / _GB:.1f} GB/s (by threads {by_threads})"
    return Check(ok=good, title="memory bandwidth", detail=detail, remedy=remedy)


def _thread_plan(machine: Machine, around: Surroundings) -> Check:
    few = enough_threads(machine.read_bandwidth_bytes_s)
    detail = f"{few} of {machine.num_threads} threads read as fast as memory gives"
    if few < machine.num_threads:
        detail += f": --num-threads-decode {few} leaves cores to others (or --thread-plan auto)"
    return Check(ok=True, title="threads to decode", detail=detail)


def _arithmetic(machine: Machine, around: Surroundings) -> Check:
    peaks = ", ".join(f"{d} {rate / 1e9:.0f}" for d, rate in machine.multiply_flops.items())
    gemm = ", ".join(f"{d} {rate / 1e9:.0f}" for d, rate in machine.gemm_flops.items())
    detail = f"peak {peaks} GFLOP/s; torch products reach {gemm}"
    return Check(ok=True, title="arithmetic", detail=detail)


def _gpus(machine: Machine, around: Surroundings) -> Check:
    if machine.gpus:
        words = [f"{gpu.name}, {gpu.memory_bytes / _GB:.0f} GB" for gpu in machine.gpus]
        return Check(ok=True, title="GPU", detail="; ".join(words))
    hidden = any(Path("/dev").glob("nvidia[0-9]*"))
    return Check(
        ok=not hidden,
        title="GPU",
        detail="a device is present, but torch sees none" if hidden else "none; runs on the CPU",
        remedy="install a CUDA build of torch that fits the driver" if hidden else "",
    )


_ALWAYS: tuple[Callable[[Surroundings], Check], ...] = (
    _python,
    _torch,
    _native_module,
    _cores,
    _threads,
    _disk,
)
_OF_MACHINE: tuple[Callable[[Machine, Surroundings], Check], ...] = (
    _isa,
    _dtypes,
    _memory,
    _quiet,
    _bandwidth,
    _thread_plan,
    _arithmetic,
    _gpus,
)
