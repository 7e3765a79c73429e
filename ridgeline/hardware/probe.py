"""`probe()`: this machine as one record, measured in seconds and remembered for a day.

The record is kept under the XDG cache directory. It is measured again when it is older than
`max_age_s`, when the fingerprint differs (another CPU, another quota, another version of
Ridgeline or torch), or when `refresh` asks for it. A record taken while other processes held the
cores is kept for ten minutes only.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

import ridgeline
from ridgeline.errors import DECODE_ERRORS
from ridgeline.hardware import measure, system
from ridgeline.hardware.machine import Machine
from ridgeline.paths import default_cache_dir

MAX_AGE_S = 24 * 3600.0
DISTURBED_MAX_AGE_S = 600.0
_FORMAT = 2  # of the cached record; since 2 the peak of whole numbers is that of tiles


def probe(
    *,
    max_age_s: float = MAX_AGE_S,
    refresh: bool = False,
    cache_dir: Path | None = None,
    clock: Callable[[], float] = time.time,
) -> Machine:
    """This machine, from the cache where that is fresh, else measured (under 10 s).

    `memory_available_bytes` is always of this moment. Raises CannotRun without the native module.
    """
    file = (cache_dir or default_cache_dir()) / "machine.json"
    known = None if refresh else _load(file)
    if known is not None and _fresh(known, max_age_s, clock()):
        available = system.memory().available_bytes
        return msgspec.structs.replace(known, memory_available_bytes=available)
    machine = measure_machine(clock)
    _store(file, machine)
    return machine


def cached_machine(
    *,
    max_age_s: float = MAX_AGE_S,
    cache_dir: Path | None = None,
    clock: Callable[[], float] = time.time,
) -> Machine | None:
    """This machine as it was measured before; None where `probe` would have to measure."""
    found = _load((cache_dir or default_cache_dir()) / "machine.json")
    return found if found is not None and _fresh(found, max_age_s, clock()) else None


def measure_machine(clock: Callable[[], float] = time.time) -> Machine:
    """Measure now. Memory and arithmetic come first, before torch's threads exist."""
    began = time.perf_counter()
    found, isa, cores = system.memory(), system.isa_flags(), system.cores()
    caches = system.caches()
    threads = max(1, int(cores.usable))
    size = measure.memory_buffer_bytes(caches, found.available_bytes)
    by_threads = {n: measure.read_bandwidth(size, n) for n in measure.thread_counts(threads)}
    small = [s for s in measure.CACHE_SIZES if s < size]
    by_size = {s: measure.read_bandwidth(s, threads) for s in small}
    by_size[size] = by_threads[threads]
    peaks = measure.multiply_peaks(threads)
    return Machine(
        cpu_model=system.cpu_model(),
        architecture=platform.machine(),
        isa=isa,
        physical_cores=cores.physical,
        logical_cores=cores.logical,
        usable_cores=cores.usable,
        memory_bytes=found.total_bytes,
        memory_available_bytes=found.available_bytes,
        caches=caches,
        read_bandwidth_bytes_s={n: rate.per_s for n, rate in by_threads.items()},
        cache_bandwidth_bytes_s={s: rate.per_s for s, rate in by_size.items()},
        multiply_flops={kind: rate.per_s for kind, rate in peaks.items()},
        gemm_flops=measure.gemm_flops(threads),
        native_dtypes=system.native_dtypes(isa),
        gpus=measure.gpus(),
        cpu_share=min(rate.cpu_share for rate in (*by_threads.values(), *peaks.values())),
        probed_unix_s=clock(),
        took_s=time.perf_counter() - began,
        fingerprint=fingerprint(),
    )


def fingerprint() -> str:
    """Changes when a cached record would no longer be about this machine or this software."""
    cores, facts = system.cores(), system.memory()
    gpus = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    parts = (
        _FORMAT,
        ridgeline.__version__,
        _torch_version(),
        platform.machine(),
        system.cpu_model(),
        system.isa_flags(),
        cores,
        facts.total_bytes,
        gpus,
        os.environ.get("CUDA_VISIBLE_DEVICES"),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _torch_version() -> str:
    """Without importing torch."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return "none"


def _fresh(machine: Machine, max_age_s: float, now_s: float) -> bool:
    limit = min(max_age_s, DISTURBED_MAX_AGE_S) if machine.disturbed else max_age_s
    return 0 <= now_s - machine.probed_unix_s <= limit and machine.fingerprint == fingerprint()


def _load(file: Path) -> Machine | None:
    """The cached record; None where there is none, or none that this version can read."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Machine)
    except (OSError, *DECODE_ERRORS):
        return None


def _store(file: Path, machine: Machine) -> None:
    """Write whole or not at all. A cache that cannot be written costs time, not correctness."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=file.name)
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(msgspec.json.encode(machine))
            Path(name).replace(file)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise
