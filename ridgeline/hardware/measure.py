"""Measure this machine in a few seconds: native probes for memory and arithmetic, torch for GEMM.

Memory: every thread streams its part of a buffer with the widest loads of the CPU. A figure is the
best of several medians: a median discards one disturbed repetition, the best median a disturbed
second. The CPU share shows whether other processes used the cores during the measurement.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import msgspec

from ridgeline.errors import CannotRun
from ridgeline.hardware.machine import CpuCache, Gpu

MIB = 1024**2
CACHE_SIZES = (1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
ENOUGH = 0.97
_TRIED_S = 1e-4
_GROUPS, _REPETITIONS, _MIN_S = 3, 3, 0.008
_GEMM_ROWS, _GEMM_SIZE, _GEMM_S = 256, 2048, 0.35


class MeasuredRate(msgspec.Struct, frozen=True):
    """Best of medians per second, and the CPU share of the best group."""

    per_s: float
    cpu_share: float


def native() -> Any:
    """The native module. Raises CannotRun if it is missing."""
    try:
        from ridgeline import _native
    except ImportError as error:
        raise CannotRun(
            "Ridgeline's native module cannot be loaded",
            value=str(error),
            fix="install Ridgeline again with a C++17 compiler (make install)",
        ) from None
    return _native


def best_of_medians(sample: Callable[[], list[tuple[float, float]]]) -> MeasuredRate:
    """`sample` gives (rate, CPU share) per repetition; take the group with the best median rate.

    Raises CannotRun if the system gives no more threads.
    """
    try:
        groups = [sample() for _ in range(_GROUPS)]
    except RuntimeError as error:
        raise CannotRun(
            "this machine cannot be measured",
            value=str(error),
            fix="raise the limits of processes and memory (ulimit -u, ulimit -v), or end others",
        ) from None
    best = max(groups, key=lambda group: median(rate for rate, _ in group))
    return MeasuredRate(median(rate for rate, _ in best), median(share for _, share in best))


def read_bandwidth(total_bytes: int, num_threads: int) -> MeasuredRate:
    """Bytes per second of streaming reads, all threads together."""
    module = native()
    return best_of_medians(
        lambda: module.read_rates(total_bytes, num_threads, _REPETITIONS, _MIN_S)
    )


def multiply_peaks(num_threads: int) -> dict[str, MeasuredRate]:
    """Operations per second in registers, by dtype: the arithmetic peak of the cores."""
    module = native()
    return {kind: _multiply_peak(module, kind, num_threads) for kind in module.multiply_kinds()}


def multiply_peak(kind: str, num_threads: int) -> MeasuredRate:
    """Operations per second in registers, of one kind."""
    return _multiply_peak(native(), kind, num_threads)


def kinds_of(asked: Sequence[str]) -> list[str]:
    """Those of the kinds that this CPU has instructions for."""
    return [kind for kind in asked if _can_multiply(kind)]


def _can_multiply(kind: str) -> bool:
    try:
        native().multiply_rates(kind, 1, 1, _TRIED_S)
    except ValueError:
        return False
    return True


def _multiply_peak(module: Any, kind: str, num_threads: int) -> MeasuredRate:
    return best_of_medians(lambda: module.multiply_rates(kind, num_threads, _REPETITIONS, _MIN_S))


def memory_buffer_bytes(caches: tuple[CpuCache, ...], available_bytes: int) -> int:
    """Far larger than the caches, but a small part of the free memory."""
    last_level = max((cache.total_bytes for cache in caches), default=0)
    wanted = max(256 * MIB, min(4 * last_level, 1024 * MIB))
    return max(16 * MIB, min(wanted, available_bytes // 8))


def thread_counts(num_threads: int) -> list[int]:
    """1, 2, 4, … and all."""
    counts = [1]
    while counts[-1] * 2 < num_threads:
        counts.append(counts[-1] * 2)
    return counts if num_threads == 1 else [*counts, num_threads]


def enough_threads(rates: Mapping[int, float]) -> int:
    """The fewest threads that reach the best of `rates` (by threads) within 3 %."""
    best = max(rates.values())
    return min(count for count, rate in rates.items() if rate >= ENOUGH * best)


def gemm_flops(num_threads: int) -> dict[str, float]:
    """Operations per second of torch's matrix products on the CPU, by dtype; absent: no path."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        return {
            dtype: rate
            for dtype, product in _products(torch).items()
            if (rate := _gemm_rate(product)) is not None
        }
    finally:
        torch.set_num_threads(before)


def _products(torch: Any) -> dict[str, Callable[[], object]]:
    """One product [rows, size] x [size, size] for each dtype."""
    x = torch.rand(_GEMM_ROWS, _GEMM_SIZE)
    w = torch.rand(_GEMM_SIZE, _GEMM_SIZE)
    xb, wb = x.bfloat16(), w.bfloat16()
    return {
        "float32": lambda: torch.nn.functional.linear(x, w),
        "bfloat16": lambda: torch.nn.functional.linear(xb, wb),
        "int8": _int8_product(torch),
    }


def _int8_product(torch: Any) -> Callable[[], object]:
    """oneDNN's int8 linear, unsigned activations: torch's fast path. (`torch._int_mm` takes
    seconds.)

    The values are small, because without VNNI the kernel adds pairs in 16 bits and saturates.
    """
    x = torch.randint(0, 64, (_GEMM_ROWS, _GEMM_SIZE), dtype=torch.uint8)
    w = torch.randint(-64, 64, (_GEMM_SIZE, _GEMM_SIZE), dtype=torch.int8)
    scales = torch.ones(_GEMM_SIZE)
    zeros = torch.zeros(_GEMM_SIZE, dtype=torch.int64)
    onednn = torch.ops.onednn
    try:
        packed = onednn.qlinear_prepack(w, list(x.shape))
    except (RuntimeError, NotImplementedError, AttributeError):
        return _no_path
    return lambda: onednn.qlinear_pointwise(
        x, 1.0, 0, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )


def _no_path() -> object:
    raise RuntimeError("torch has no path for this product")


def _gemm_rate(product: Callable[[], object]) -> float | None:
    """Best rate within the time given; None where torch cannot do it."""
    try:
        product()
    except (RuntimeError, NotImplementedError):
        return None
    best, deadline = float("inf"), time.perf_counter() + _GEMM_S
    while time.perf_counter() < deadline:
        start = time.perf_counter()
        product()
        best = min(best, time.perf_counter() - start)
    return 2 * _GEMM_ROWS * _GEMM_SIZE**2 / best


def gpus() -> tuple[Gpu, ...]:
    """Every CUDA device that torch sees, measured for a moment."""
    import torch

    if not torch.cuda.is_available():
        return ()
    return tuple(_gpu(torch, index) for index in range(torch.cuda.device_count()))


def _gpu(torch: Any, index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    read_bytes_s, gemm = None, {}
    with torch.cuda.device(index), contextlib.suppress(RuntimeError):  # full: someone uses it
        read_bytes_s = _gpu_read(torch, min(2**30, properties.total_memory // 8))
        gemm = {name: _gpu_gemm(torch, getattr(torch, name)) for name in _GPU_DTYPES}
    return Gpu(
        name=properties.name,
        memory_bytes=properties.total_memory,
        capability=f"{properties.major}.{properties.minor}",
        read_bandwidth_bytes_s=read_bytes_s,
        gemm_flops=gemm,
    )


class GpuRates(NamedTuple):
    """Bytes per second of a copy of `copy_bytes`, read and written, and FLOP/s by dtype."""

    copy_bytes: int
    bytes_s: float
    flops_s: dict[str, float]


def gpu_rates(device: str) -> GpuRates:
    """Rates of a GPU, measured now within half of its free memory, which is free again afterwards;
    a dtype without a product on it is absent.

    Raises CannotRun if too little memory is free.
    """
    import torch

    with torch.cuda.device(device):
        torch.cuda.empty_cache()
        free_bytes = int(torch.cuda.mem_get_info(device)[0])
        copy_bytes, size = gpu_probe_sizes(free_bytes)
        try:
            bytes_s = _gpu_copy(torch, copy_bytes)
            flops_s = {name: _gpu_gemm(torch, getattr(torch, name), size) for name in _GPU_DTYPES}
            for name, product in _gpu_byte_products(torch, size).items():
                with contextlib.suppress(RuntimeError):
                    flops_s[name] = 2 * size**3 / _gpu_seconds(torch, product)
        except torch.OutOfMemoryError:
            raise _full_gpu(free_bytes) from None
        finally:
            torch.cuda.empty_cache()
    return GpuRates(copy_bytes, bytes_s, flops_s)


def gpu_probe_sizes(free_bytes: int) -> tuple[int, int]:
    """Bytes of a copied buffer, and the size of square matrices, for a GPU with this free memory.

    Two buffers, or four float32 matrices, take half of it. Raises CannotRun if the buffers would be
    so small that caches hold them.
    """
    copy_bytes = min(_COPY_BYTES, free_bytes // 4 // MIB * MIB)
    if copy_bytes < _MIN_COPY_BYTES:
        raise _full_gpu(free_bytes)
    size = _GPU_GEMM_SIZE
    while 4 * 4 * size**2 > free_bytes // 2:
        size //= 2
    return copy_bytes, size


def _full_gpu(free_bytes: int) -> CannotRun:
    return CannotRun(
        "too little memory is free on the GPU to measure it",
        value=f"{free_bytes // MIB} MiB",
        limit=f"at least {4 * _MIN_COPY_BYTES // MIB} MiB",
        fix="end other processes that use the GPU (nvidia-smi lists them)",
    )


def _gpu_byte_products(torch: Any, size: int) -> dict[str, Callable[[], object]]:
    a = torch.randn(size, size, device="cuda")
    codes, floats = (a * 40).clamp(-127, 127).to(torch.int8), a.to(torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")
    return {
        "int8": lambda: torch._int_mm(codes, codes.t()),
        "float8_e4m3": lambda: torch._scaled_mm(
            floats, floats.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16
        ),
    }


_GPU_DTYPES = ("float32", "bfloat16", "float16")
_COPY_BYTES, _MIN_COPY_BYTES, _GPU_GEMM_SIZE = 1 << 30, 1 << 27, 8192


def _gpu_copy(torch: Any, num_bytes: int) -> float:
    source = torch.randn(num_bytes // 2, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return float(2 * num_bytes / _gpu_seconds(torch, lambda: target.copy_(source)))


def _gpu_read(torch: Any, num_bytes: int) -> float:
    words = torch.zeros(num_bytes // 4, device="cuda")
    return float(words.numel() * 4 / _gpu_seconds(torch, lambda: words.sum()))


def _gpu_gemm(torch: Any, dtype: Any, size: int = 4096) -> float:
    a = torch.randn(size, size, device="cuda").to(dtype)
    return float(2 * size**3 / _gpu_seconds(torch, lambda: a @ a))


def _gpu_seconds(torch: Any, work: Callable[[], object], times: int = 10) -> float:
    """Best of several runs, by the device's own events."""
    work()
    best = float("inf")
    for _ in range(times):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1000)
    return best
