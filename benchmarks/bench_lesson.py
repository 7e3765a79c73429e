"""The four techniques of writing a kernel, added one by one to the same operator.

    python benchmarks/bench_lesson.py [--rows 1,64] [--inputs 2048] [--outputs 5632] [--threads N]
        [--isa auto] [--rounds 5] [--json FILE]

The operator is the gated half of a feed-forward in float32, h = silu(x G^T) * (x U^T), in native
code (native/lesson_kernel.inc): plain loops; vectorised; on several threads; tiled; fused. Levels
take turns in every round; medians. Each is checked against PyTorch first. The bounds are weights
over the read rate and multiply-adds over the fp32 peak, both measured in this run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as `ridgeline` sets it

import torch
import torch.nn.functional as F
from torch import Tensor

import ridgeline._native as _native

LEVELS = ("plain", "vectorised", "parallel", "tiled", "fused")


def run(level: str, x_MK: Tensor, g_NK: Tensor, u_NK: Tensor, threads: int, isa: str) -> Tensor:
    """h_MN of one level."""
    num_rows, num_in = x_MK.shape
    h_MN = torch.empty(num_rows, len(g_NK))
    where = (each.data_ptr() for each in (x_MK, g_NK, u_NK, h_MN))
    _native.lesson(level, *where, num_rows, num_in, len(g_NK), threads, isa)
    return h_MN


def measure(num_rows: int, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds of each level, in turns, beside the bounds."""
    num_in, num_out, threads = asked.inputs, asked.outputs, asked.threads
    x_MK = torch.randn(num_rows, num_in)
    g_NK, u_NK = (torch.randn(num_out, num_in) * num_in**-0.5 for _ in range(2))
    expected = F.silu(F.linear(x_MK, g_NK)) * F.linear(x_MK, u_NK)
    spent: dict[str, list[float]] = {level: [] for level in (*LEVELS, "torch")}
    for level in LEVELS:
        found = run(level, x_MK, g_NK, u_NK, threads, asked.isa)
        assert (found - expected).norm() < 1e-4 * expected.norm(), level
    for _ in range(asked.rounds):
        for level in spent:
            begun = time.perf_counter()
            if level == "torch":
                F.silu(F.linear(x_MK, g_NK)).mul_(F.linear(x_MK, u_NK))
            else:
                run(level, x_MK, g_NK, u_NK, threads, asked.isa)
            spent[level].append(time.perf_counter() - begun)
    macs, num_bytes = 2.0 * num_rows * num_in * num_out, 8.0 * num_in * num_out
    read = statistics.median(r for r, _ in _native.read_rates(256 << 20, threads, 5, 0.1))
    rates = _native.multiply_rates("float32", threads, 5, 0.05)
    peak = statistics.median(rate for rate, _ in rates)
    bound = max(num_bytes / read, 2 * macs / peak)
    return [
        {
            "rows": num_rows,
            "level": level,
            "ms": statistics.median(times) * 1e3,
            "gflops": 2e-9 * macs / statistics.median(times),
            "of_bound": bound / statistics.median(times),
        }
        for level, times in spent.items()
    ]


def show(rows: list[dict[str, Any]]) -> None:
    before = rows[0]["ms"]
    for row in rows:
        print(
            f"  {row['level']:<11} {row['ms']:9.3f} ms {row['gflops']:7.1f} GFLOP/s"
            f" {row['of_bound']:5.0%} of bound   {rows[0]['ms'] / row['ms']:6.1f} x plain"
            f" {before / row['ms']:6.2f} x the line above"
        )
        before = row["ms"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", default="1,64")
    parser.add_argument("--inputs", type=int, default=2048)
    parser.add_argument("--outputs", type=int, default=5632)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=None)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    found = []
    for num_rows in map(int, asked.rows.split(",")):
        rows = measure(num_rows, asked)
        print(
            f"{num_rows} rows, {asked.inputs} inputs, 2 x {asked.outputs} outputs, "
            f"{asked.threads} threads"
        )
        show(rows)
        found += rows
    print(json.dumps(found))
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
