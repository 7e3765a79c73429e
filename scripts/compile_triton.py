"""Compile every Triton kernel for a GPU that need not be there, and print what it became.

    python scripts/compile_triton.py [--capability 90] [--json FILE] [NAME …]

Shows type errors, registers spilled to memory and missing tensor-core instructions, which the
interpreter cannot, and fails where a kernel needs more shared memory than a block of the card may
have. Needs triton, and its own ptxas; no driver.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime.jit import JITFunction

from ridgeline.engine.kernels.triton import FP8_CAPABILITY, linear, norm, tiles
from ridgeline.engine.kernels.triton.attention import paged_decode, paged_prefill
from ridgeline.engine.kernels.triton.experts import multiply_experts
from ridgeline.engine.kernels.triton.latent import latent_decode
from ridgeline.engine.kernels.triton.rope_store import rope_store, store_kv
from ridgeline.engine.kernels.triton.sampling import first_largest
from ridgeline.engine.kernels.triton.widen import widen_int4

BF16, FLOAT32 = torch.bfloat16, torch.float32
INT8, FP8, BYTES = torch.int8, torch.float8_e4m3fn, torch.uint8
HEADS, KV_HEADS, BLOCK = 32, 8, 16
INTS = torch.zeros(64, dtype=torch.int32)
TABLES = torch.zeros(16, 256, dtype=torch.int32)
KIB = 1024
SHARED_BYTES = {80: 163 * KIB, 86: 99 * KIB, 89: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB}
SHARED_BYTES |= {103: 227 * KIB, 120: 99 * KIB}
"""Shared memory that a block may have, by compute capability (CUDA C++ Programming Guide, table of
technical specifications)."""


def zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=BYTES if dtype == FP8 else dtype).view(dtype)


def cache(dtype: torch.dtype, head_dim: int, scaled: bool = False) -> torch.Tensor:
    return zeros(32, 2, KV_HEADS, BLOCK, head_dim + 4 * scaled, dtype=dtype)


def decode(kv: torch.Tensor, dtype: torch.dtype = BF16, head_dim: int = 128) -> None:
    q, lens = zeros(16, HEADS, head_dim, dtype=dtype), INTS[:16]
    paged_decode(q, kv, TABLES, lens, scale=0.1, max_context=4096)


def prefill(
    kv: torch.Tensor,
    dtype: torch.dtype = BF16,
    head_dim: int = 128,
    queries: int = 2048,
    window: int | None = None,
) -> None:
    q, lengths = zeros(2048, HEADS, head_dim, dtype=dtype), (TABLES, INTS[:17], INTS[:16])
    paged_prefill(q, kv, *lengths, scale=0.1, max_queries=queries, window=window)


def rope(kv: torch.Tensor, head_dim: int = 128) -> None:
    qkv = zeros(16, HEADS + 2 * KV_HEADS, head_dim)
    table = zeros(16, head_dim, dtype=FLOAT32)
    rope_store(qkv, table, table, kv, INTS[:16], num_heads=HEADS, num_kv_heads=KV_HEADS)
    store_kv(zeros(16, 2, KV_HEADS, head_dim), kv, INTS[:16])


def norms(kind: norm.Kind | None = None, width: int = 4096) -> None:
    x, gain, gate_up = zeros(16, width), zeros(width), zeros(16, 2 * width)
    if kind is None:
        norm.add_rms_norm(x, x, gain, 1e-5)
        norm.silu_mul(gate_up)
        norm.scaled_rows(x.int(), zeros(16, 1, dtype=FLOAT32), gain.float(), gain, BF16)
    else:
        norm.add_rms_norm_q(x, x, gain, 1e-5, kind)
        norm.quantise_rows(x, kind)
        norm.silu_mul_q(gate_up, kind)


def int4(rows: int, dtype: torch.dtype = BF16, group: int = 128, zero: bool = False) -> None:
    packed, scale_OG = zeros(4096, 2048, dtype=BYTES), zeros(4096, 4096 // group, dtype=FLOAT32)
    zero_OG = scale_OG.to(BYTES) if zero else None
    x = zeros(rows, 4096, dtype=dtype)
    linear.w4a16(x, packed, scale_OG, zero_OG, group_size=group)


def nvfp4(rows: int, dtype: torch.dtype = BF16) -> None:
    x, one = zeros(rows, 4096, dtype=dtype), zeros(1, dtype=FLOAT32)
    linear.w4a16_nvfp4(x, zeros(4096, 2048, dtype=BYTES), zeros(4096, 256, dtype=FP8), one)


def eight_bits(rows: int, dtype: torch.dtype) -> None:
    scale_T1, scale_O = zeros(rows, 1, dtype=FLOAT32), zeros(4096, dtype=FLOAT32)
    x, weight = zeros(rows, 4096, dtype=dtype), zeros(4096, 4096, dtype=dtype)
    linear.w8a8(x, scale_T1, weight, scale_O, out_dtype=BF16)
    linear.w8a16(zeros(rows, 4096), weight, scale_O)


def widen() -> None:
    packed, scale_OG = zeros(4096, 2048, dtype=BYTES), zeros(4096, 32, dtype=FLOAT32)
    for zero_OG in (None, scale_OG.to(BYTES)):
        widen_int4(packed, scale_OG, zero_OG, group_size=128, num_in=4096, dtype=BF16)


def experts(rows: int, dtype: torch.dtype = BF16, weights: torch.dtype | None = None) -> None:
    x, w_EOI = zeros(rows, 2048, dtype=dtype), zeros(128, 1536, 2048, dtype=weights or dtype)
    order, starts = torch.zeros(8 * rows, dtype=torch.int32), torch.zeros(129, dtype=torch.int32)
    scales = None if weights is None else zeros(128, 1536, dtype=FLOAT32)
    multiply_experts(x, w_EOI, order, starts, num_chosen=8, scale_EO=scales)


def latent(heads: int, dtype: torch.dtype = BF16, kv: torch.dtype = BF16, block: int = 64) -> None:
    """DeepSeek's latent rows: a rank of 512 and 64 rotated numbers."""
    q, rows = zeros(16, heads, 576, dtype=dtype), zeros(32, 1, 1, block, 576, dtype=kv)
    latent_decode(q, rows, TABLES, INTS[:16], rank=512, scale=0.1, max_context=4096)


def make_cases() -> dict[str, Callable[[], None]]:
    cases: dict[str, Callable[[], None]] = {
        "rope": partial(rope, cache(BF16, 128)),
        "rope-int8": partial(rope, cache(INT8, 128, True)),
        "rope-fp8": partial(rope, cache(FP8, 64, True), 64),
        "norms": norms,
        "norms-int8": partial(norms, "int8"),
        "norms-fp8": partial(norms, "fp8"),
        "norms-wide": partial(norms, "int8", 16384),
        "sampling": lambda: void(first_largest(zeros(16, 128256))),
        "widen": widen,
        "w16a16": lambda: void(linear.w16a16(zeros(8, 4096), zeros(4096, 4096))),
        "w4a16": partial(int4, 16),
        "w4a16-32": partial(int4, 16, group=32, zero=True),
        "w4a16-64-rows": partial(int4, 64, zero=True),
        "w4a16-float32": partial(int4, 64, FLOAT32),
        "nvfp4": partial(nvfp4, 16),
        "nvfp4-64-rows": partial(nvfp4, 64),
        "nvfp4-float32": partial(nvfp4, 64, FLOAT32),
        "w8": partial(eight_bits, 16, INT8),
        "w8-fp8": partial(eight_bits, 64, FP8),
        "experts": partial(experts, 32),
        "experts-prefill": partial(experts, 512),
        "experts-float32": partial(experts, 512, FLOAT32),
        "experts-fp8": partial(experts, 32, BF16, FP8),
        "latent-16": partial(latent, 16),
        "latent-128": partial(latent, 128),
        "latent-float32": partial(latent, 128, FLOAT32, FLOAT32),
        "latent-fp8": partial(latent, 128, BF16, FP8),
        "prefill-window": lambda: prefill(cache(BF16, 128), window=1024),
        "prefill-few": lambda: prefill(cache(BF16, 128), queries=4),
    }
    for size in (64, 128, 256, 512):
        cases[f"decode-{size}"] = partial(decode, cache(BF16, size), BF16, size)
        cases[f"prefill-{size}"] = partial(prefill, cache(BF16, size), BF16, size)
    for size in (128, 256):
        cases[f"decode-float32-{size}"] = partial(decode, cache(FLOAT32, size), FLOAT32, size)
        cases[f"prefill-float32-{size}"] = partial(prefill, cache(FLOAT32, size), FLOAT32, size)
    for size in (64, 128, 256):
        for name, dtype in (("int8", INT8), ("fp8", FP8)):
            cases[f"decode-{name}-{size}"] = partial(decode, cache(dtype, size, True), BF16, size)
            cases[f"prefill-{name}-{size}"] = partial(prefill, cache(dtype, size, True), BF16, size)
    return cases


def void(_: object) -> None:
    """A case has no result."""


class NoDevice(DriverBase):  # type: ignore[misc]
    """A driver that names a GPU and has none."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cpu

    def get_benchmarker(self) -> Any:
        raise NotImplementedError

    def map_python_to_cpp_type(self, name: str) -> str:
        return name

    @staticmethod
    def is_active() -> bool:
        return True


def describe(kernel: Any, capability: int) -> str:
    """Registers, spills, and the instructions that matter."""
    ptx = kernel.asm["ptx"]
    ptxas = get_ptxas(capability).path
    arch = f"sm_{capability}a" if capability >= 90 else f"sm_{capability}"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [ptxas, "-v", f"--gpu-name={arch}", source, "-o", Path(folder) / "out"]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    numbers = re.search(r"Used (\d+) registers", log), re.search(r"(\d+) bytes spill stores", log)
    registers, spills = (match.group(1) if match else "?" for match in numbers)
    counts = {
        "tcgen05": ptx.count("tcgen05.mma"),
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma": ptx.count("mma.sync"),
        "st.shared": ptx.count("st.shared"),
        "cp.async": ptx.count("cp.async.c"),
        "ld.v4": len(re.findall(r"ld\.global[^ ]*v4", ptx)),
    }
    shown = " ".join(f"{name} {count}" for name, count in counts.items() if count)
    return f"{registers} registers, {spills} B spilled, {shown}"


def why_left_out(name: str, capability: int) -> str:
    """Why a card does not run a case; empty if it does."""
    needs_fp8 = "fp8" in name and "nvfp4" not in name
    if needs_fp8 and divmod(capability, 10) < FP8_CAPABILITY:
        return "the card has no FP8, and the engine launches no such kernel there"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", type=int, default=90, choices=sorted(SHARED_BYTES))
    parser.add_argument("--json", type=Path, help="write each kernel's shared memory to this file")
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases (default: all)")
    arguments = parser.parse_args()
    capability, cases = arguments.capability, make_cases()
    if unknown := set(arguments.names) - set(cases):
        parser.error(f"unknown {', '.join(sorted(unknown))}; there are {', '.join(cases)}")
    room = SHARED_BYTES[capability]
    triton.runtime.driver.set_active(NoDevice(capability))
    tiles.ABSENT = tiles.H100._replace(shared_bytes=room)
    linear.ALWAYS_ASM = True
    run, found = JITFunction.run, list[dict[str, Any]]()

    def compile_only(self: Any, *args: object, grid: object, warmup: bool, **kwargs: object) -> Any:
        begun = time.perf_counter()
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        seconds, shared = time.perf_counter() - begun, kernel.metadata.shared
        line = {"case": name, "kernel": self.fn.__name__, "shared_bytes": shared}
        if line in found:
            return kernel
        found.append(line)
        text = f"{shared / KIB:.0f} KiB shared{'' if shared <= room else ' TOO MUCH'}"
        if not arguments.json:
            text += f", {describe(kernel, capability)}"
        print(f"  {self.fn.__name__} ({seconds:.1f} s): {text}", flush=True)
        return kernel

    JITFunction.run = compile_only
    for name in arguments.names or cases:
        why_not = why_left_out(name, capability)
        print(f"{name}: {why_not}" if why_not else name, flush=True)
        if not why_not:
            cases[name]()
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    if too_large := [line["case"] for line in found if line["shared_bytes"] > room]:
        sys.exit(f"a block has {room / KIB:.0f} KiB; more is needed by {', '.join(too_large)}")


if __name__ == "__main__":
    main()
