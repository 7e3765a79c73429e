"""Compile every Triton kernel for a GPU that need not be there, and print what it became.

    python scripts/compile_triton.py [--capability 90] [NAME …]

Shows type errors, launches that cannot fit, registers spilled to memory and missing tensor-core
instructions, which the interpreter cannot. Needs triton, and its own ptxas; no driver.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.jit import JITFunction

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
HEADS, KV_HEADS, BLOCK = 32, 8, 16
INTS = torch.zeros(64, dtype=torch.int32)
TABLES = torch.zeros(16, 256, dtype=torch.int32)


def zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8 if dtype == FP8 else dtype).to(dtype)


def cache(dtype: torch.dtype, head_dim: int, scaled: bool = False) -> torch.Tensor:
    return zeros(32, 2, KV_HEADS, BLOCK, head_dim + 4 * scaled, dtype=dtype)


def decode(dtype: torch.dtype = BF16, head_dim: int = 128, scaled: bool = False) -> None:
    from ridgeline.engine.kernels.triton.attention import paged_decode

    q, lens = zeros(16, HEADS, head_dim), INTS[:16]
    paged_decode(q, cache(dtype, head_dim, scaled), TABLES, lens, scale=0.1, max_context=4096)


def prefill(dtype: torch.dtype = BF16, head_dim: int = 128, window: int | None = None) -> None:
    from ridgeline.engine.kernels.triton.attention import paged_prefill

    q, kv = zeros(2048, HEADS, head_dim), cache(dtype, head_dim)
    lengths = (TABLES, INTS[:17], INTS[:16])
    paged_prefill(q, kv, *lengths, scale=0.1, max_queries=2048, window=window)


def rope(dtype: torch.dtype = BF16, scaled: bool = False) -> None:
    from ridgeline.engine.kernels.triton.rope_store import rope_store

    qkv, table = zeros(16, HEADS + 2 * KV_HEADS, 128), zeros(16, 128, dtype=torch.float32)
    kv = cache(dtype, 128, scaled)
    rope_store(qkv, table, table, kv, INTS[:16], num_heads=HEADS, num_kv_heads=KV_HEADS)


def norms() -> None:
    from ridgeline.engine.kernels.triton import norm

    x, gain = zeros(16, 4096), zeros(4096)
    norm.add_rms_norm(x, x, gain, 1e-5)
    norm.add_rms_norm_q(x, x, gain, 1e-5, "fp8")
    norm.quantise_rows(x, "int8")
    norm.silu_mul(zeros(16, 28672))
    norm.silu_mul_q(zeros(16, 28672), "fp8")


def linear(kind: str, rows: int = 16, group: int = 128, num_out: int = 4096) -> None:
    from ridgeline.engine.kernels.triton import linear

    linear.ALWAYS_ASM = True
    x, scale_O = zeros(rows, 4096), zeros(num_out, dtype=torch.float32)
    if kind == "int4":
        packed, scales = zeros(num_out, 2048, dtype=torch.uint8), zeros(num_out, 4096 // group)
        linear.w4a16(x, packed, scales, None, group_size=group)
    elif kind == "bf16":
        linear.w16a16(x, zeros(num_out, 4096))
    elif kind.startswith("w8a8"):
        dtype = torch.int8 if kind == "w8a8" else FP8
        codes, scale_T1 = zeros(rows, 4096, dtype=dtype), zeros(rows, 1, dtype=torch.float32)
        weight = zeros(num_out, 4096, dtype=dtype)
        linear.w8a8(codes, scale_T1, weight, scale_O, out_dtype=BF16)
    else:
        dtype = torch.int8 if kind == "int8" else FP8
        linear.w8a16(x, zeros(num_out, 4096, dtype=dtype), scale_O)


def experts(rows: int, dtype: torch.dtype = BF16) -> None:
    from ridgeline.engine.kernels.triton.experts import multiply_experts

    x, weights = zeros(rows, 2048), zeros(128, 1536, 2048, dtype=dtype)
    order, starts = torch.zeros(8 * rows, dtype=torch.int32), torch.zeros(129, dtype=torch.int32)
    scales = None if dtype == BF16 else zeros(128, 1536, dtype=torch.float32)
    multiply_experts(x, weights, order, starts, num_chosen=8, scale_EO=scales)


def latent(num_heads: int, dtype: torch.dtype = BF16) -> None:
    from ridgeline.engine.kernels.triton.latent import latent_decode

    q, kv = zeros(16, num_heads, 576), zeros(32, 1, 1, 64, 576, dtype=dtype)
    latent_decode(q, kv, TABLES, INTS[:16], rank=512, scale=0.1, max_context=4096)


CASES: dict[str, Callable[[], None]] = {
    "decode": decode,
    "decode-fp8": lambda: decode(FP8),
    "decode-int8": lambda: decode(torch.int8, scaled=True),
    "decode-64": lambda: decode(head_dim=64),
    "decode-256": lambda: decode(head_dim=256),
    "prefill": prefill,
    "prefill-fp8": lambda: prefill(FP8),
    "prefill-256": lambda: prefill(head_dim=256),
    "prefill-window": lambda: prefill(window=1024),
    "rope": rope,
    "rope-int8": lambda: rope(torch.int8, scaled=True),
    "norms": norms,
    "w4a16": lambda: linear("int4"),
    "w4a16-32": lambda: linear("int4", group=32),
    "w4a16-64-rows": lambda: linear("int4", 64),
    "w4a16-wide": lambda: linear("int4", num_out=65536),
    "w8a16": lambda: linear("int8"),
    "w8a16-fp8": lambda: linear("fp8"),
    "w8a8": lambda: linear("w8a8"),
    "w8a8-fp8": lambda: linear("w8a8-fp8"),
    "experts": lambda: experts(32),
    "experts-prefill": lambda: experts(2048),
    "experts-fp8": lambda: experts(32, FP8),
    "latent-16": lambda: latent(16),
    "latent-128": lambda: latent(128),
    "latent-fp8": lambda: latent(16, FP8),
    "w16a16": lambda: linear("bf16"),
}


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
    """Shared memory, registers, spills, and the instructions that matter."""
    ptx = kernel.asm["ptx"]
    ptxas = next(Path(triton.__file__).parent.glob("backends/nvidia/bin/ptxas"))
    arch = f"sm_{capability}a" if capability >= 90 else f"sm_{capability}"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [ptxas, "-v", f"--gpu-name={arch}", source, "-o", Path(folder) / "out"]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    numbers = re.search(r"Used (\d+) registers", log), re.search(r"(\d+) bytes spill stores", log)
    registers, spills = (match.group(1) if match else "?" for match in numbers)
    counts = {
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma": ptx.count("mma.sync"),
        "st.shared": ptx.count("st.shared"),
        "cp.async": ptx.count("cp.async.c"),
        "ld.v4": len(re.findall(r"ld\.global[^ ]*v4", ptx)),
    }
    shown = " ".join(f"{name} {count}" for name, count in counts.items() if count)
    shared = f"{kernel.metadata.shared / 1024:.0f} KiB shared"
    return f"{shared}, {registers} registers, {spills} B spilled, {shown}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument("names", nargs="*", metavar="NAME")
    arguments = parser.parse_args()
    triton.runtime.driver.set_active(NoDevice(arguments.capability))
    run = JITFunction.run

    def compile_only(self: Any, *args: object, grid: object, warmup: bool, **kwargs: object) -> Any:
        begun = time.perf_counter()
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        seconds = time.perf_counter() - begun
        text = describe(kernel, arguments.capability)
        print(f"  {self.fn.__name__} ({seconds:.1f} s): {text}", flush=True)
        return kernel

    JITFunction.run = compile_only
    for name in arguments.names or CASES:
        print(name, flush=True)
        CASES[name]()


if __name__ == "__main__":
    main()
