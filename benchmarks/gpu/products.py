"""Products of one layer's shapes on this GPU, by every kernel that can compute them.

    python benchmarks/gpu/products.py [--model llama-3.1-8b] [--rows 1,16,32,128,2048] [--json FILE]

Each kernel runs from a CUDA graph over rotating copies of the weight that exceed the L2 cache, so
that launch gaps and cache hits are out of the numbers. A line gives the time, the share of the
measured read bandwidth that the weight's bytes make of it, and TFLOP/s.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.engine.kernels.scaled_products import multiply, quantise_rows, quantise_weight
from ridgeline.engine.quant.int4.quantise import quantise
from ridgeline.engine.quant.int4.unpacked import UnpackedInt4
from ridgeline.engine.quant.sparse24 import Sparse24Linear

SHAPES = {
    "llama-3.1-8b": {
        "qkv": (6144, 4096),
        "o": (4096, 4096),
        "gate_up": (28672, 4096),
        "down": (4096, 14336),
    },
    "llama-1b": {
        "qkv": (3072, 2048),
        "o": (2048, 2048),
        "gate_up": (16384, 2048),
        "down": (2048, 8192),
    },
}
BUFFER_BYTES = 512 << 20  # of weights in rotation, many times the L2 cache
Product = Callable[[Tensor], object]


def read_bandwidth() -> float:
    """Bytes per second of a copy within the card's memory, read and written."""
    source = torch.randn(1 << 30, device="cuda").bfloat16()
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(lambda: target.copy_(source), 20)


def seconds_of(work: Callable[[], object], times: int) -> float:
    """Median seconds of repeated work, by the device's events."""
    work()
    taken = []
    for _ in range(times):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) / 1000)
    return statistics.median(taken)


def graph_seconds(products: list[Product], x_TI: Tensor) -> float:
    """Seconds of one product, from a graph that runs each of `products` once."""
    for product in products[:2]:
        product(x_TI)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for product in products:
            product(x_TI)
    return seconds_of(graph.replay, 10) / len(products)


def kernels(weight_OI: Tensor, num_rows: int) -> Iterator[tuple[str, float, Product]]:
    """Name, bytes per weight and product of every kernel for this weight."""
    dtype = torch.bfloat16
    yield "bf16 cublas", 2, lambda x: F.linear(x, weight_OI)
    triton = _triton_linear()
    if triton is not None and num_rows <= 64 and hasattr(triton, "w16a16"):
        yield "bf16 triton", 2, lambda x: triton.w16a16(x, weight_OI)
    for kind in ("fp8", "int8"):
        q_OI, scale_O = quantise_weight(weight_OI, kind)  # type: ignore[arg-type]

        def whole(x: Tensor, kind: Any = kind, q: Tensor = q_OI, s: Tensor = scale_O) -> Tensor:
            p_TI, scale_T1 = quantise_rows(x, kind)
            return multiply(p_TI, scale_T1, q, s, None, dtype)

        p_TI, scale_T1 = quantise_rows(torch.randn(num_rows, weight_OI.shape[1]).cuda(), kind)  # type: ignore[arg-type]
        yield f"{kind} with rounding", 1, whole
        yield (
            f"{kind} product",
            1,
            lambda _, p=p_TI, t=scale_T1, q=q_OI, s=scale_O: multiply(p, t, q, s, None, dtype),
        )
        if kind == "fp8":
            one = torch.ones((), device="cuda")
            yield (
                "fp8 cublas, one scale",
                1,
                lambda _, p=p_TI, q=q_OI, one=one: torch._scaled_mm(
                    p, q.t(), scale_a=one, scale_b=one, out_dtype=dtype
                ),
            )
        if triton is not None and num_rows <= 64 and hasattr(triton, "w8a8"):
            yield (
                f"{kind} triton",
                1,
                lambda _, p=p_TI, t=scale_T1, q=q_OI, s=scale_O: triton.w8a8(
                    p, t, q, s, out_dtype=dtype
                ),
            )
    int4 = UnpackedInt4(quantise(weight_OI, 128, zeros=False), 128, None, dtype)
    yield "int4 widened", 0.53, int4
    if triton is not None and num_rows <= 64 and hasattr(triton, "w4a16"):
        yield (
            "int4 triton",
            0.53,
            lambda x: triton.w4a16(x, int4.packed_OJ, int4.scale_OG, None, group_size=128),
        )
    yield from _tinygemm(weight_OI)
    yield from _sparse24(weight_OI)


def _sparse24(weight_OI: Tensor) -> Iterator[tuple[str, float, Product]]:
    """2:4 sparse weights in BF16, by torch's semi-structured products."""
    kept = torch.zeros_like(weight_OI).view(len(weight_OI), -1, 4)
    mask = kept.scatter_(-1, weight_OI.abs().view_as(kept).topk(2, -1).indices, 1.0)
    linear = Sparse24Linear((weight_OI * mask.view_as(weight_OI)).contiguous(), None)
    yield "bf16 2:4 sparse", 1.125, linear


def _tinygemm(weight_OI: Tensor) -> Iterator[tuple[str, float, Product]]:
    """torch's own 4-bit product, for comparison."""
    num_out, num_in = weight_OI.shape
    packed = torch.randint(0, 256, (num_out, num_in // 2), device="cuda", dtype=torch.uint8)
    tiles = torch.ops.aten._convert_weight_to_int4pack(packed, 8)
    scales = torch.full((num_in // 128, num_out, 2), 0.01, device="cuda", dtype=torch.bfloat16)
    yield (
        "int4 tinygemm",
        0.53,
        lambda x: torch.ops.aten._weight_int4pack_mm(x, tiles, 128, scales),
    )


def _triton_linear() -> Any:
    try:
        return import_module("ridgeline.engine.kernels.triton.linear")
    except ImportError:
        return None


def measure(shape: tuple[int, int], num_rows: int, bytes_s: float) -> Iterator[dict[str, object]]:
    """One line per kernel."""
    num_out, num_in = shape
    copies = max(2, min(24, BUFFER_BYTES // (2 * num_out * num_in)))
    if num_rows > 256:
        copies = 2
    weights = [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(copies)
    ]
    x_TI = torch.randn(num_rows, num_in, device="cuda", dtype=torch.bfloat16)
    variants = [list(kernels(weight, num_rows)) for weight in weights]
    for index, (name, weight_bytes, _) in enumerate(variants[0]):
        line: dict[str, object] = {"kernel": name, "rows": num_rows, "shape": list(shape)}
        try:
            time_s = graph_seconds([own[index][2] for own in variants], x_TI)
        except Exception as error:
            yield line | {"error": str(error).splitlines()[0][:160]}
            torch.cuda.synchronize()
            continue
        yield line | {
            "us": round(1e6 * time_s, 2),
            "of_bandwidth": round(weight_bytes * num_out * num_in / time_s / bytes_s, 3),
            "tflop_s": round(2 * num_rows * num_out * num_in / time_s / 1e12, 1),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="llama-3.1-8b", choices=SHAPES)
    parser.add_argument("--rows", default="1,16,32,128,2048")
    parser.add_argument("--shapes", default="", help="names of shapes (default: all)")
    parser.add_argument("--json", type=Path, default=None)
    asked = parser.parse_args()
    began_s, lines = time.perf_counter(), list[dict[str, object]]()
    with torch.inference_mode():
        bytes_s = read_bandwidth()
        print(f"{torch.cuda.get_device_name()}: copy {bytes_s / 1e12:.3f} TB/s", flush=True)
        for name, shape in SHAPES[asked.model].items():
            if asked.shapes and name not in asked.shapes.split(","):
                continue
            for rows in map(int, asked.rows.split(",")):
                for line in measure(shape, rows, bytes_s):
                    lines.append({"name": name, **line})
                    figures = line.get("error") or (
                        f"{line['us']:>9} us {line['of_bandwidth']:>6} of bandwidth "
                        f"{line['tflop_s']:>7} TFLOP/s"
                    )
                    print(f"{name:8} {rows:>5} {line['kernel']!s:24} {figures}", flush=True)
                if asked.json is not None:
                    record = {"gpu": torch.cuda.get_device_name(), "copy_bytes_s": bytes_s}
                    asked.json.write_text(json.dumps(record | {"lines": lines}, indent=1))
    print(f"{time.perf_counter() - began_s:.0f} s", flush=True)


if __name__ == "__main__":
    main()
