"""2:4 weights in INT8 against dense INT8 and INT4: one product, weights from memory, interleaved.

    python benchmarks/bench_sparse24.py [--shapes 8192x4096 4096x4096] [--rows 1 2 4 8 16 64 512]
        [--threads 1] [--rounds 60] [--result OUT.json]

Each round multiplies by every format in turn, and by several copies of the weight in turn, so that
none is in the last-level cache when it comes up again. Ratios are of the fastest rounds: on a
shared machine these show the kernel, and the medians (in parentheses) what others left of it.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch

from ridgeline.engine.kernels.native_linear import NativeLinear, isa
from ridgeline.engine.quant.packed import random_packed
from ridgeline.hardware.system import cpu_model
from ridgeline.modelspec.format import INT4, INT8, SPARSE24_INT8
from ridgeline.modelspec.model import LinearSpec

FORMATS = {"int8": INT8, "2:4 int8": SPARSE24_INT8, "int4": INT4}
COLUMNS = ["shape", "rows", "int8, ms", "2:4 int8, ms", "int4, ms", "2:4 against int8",
           "int4 against int8"]  # fmt: skip
MEMORY = 600 << 20
"""Bytes of all copies together: beyond the last-level cache of the machines at hand."""


def weights_of(num_out: int, num_in: int) -> dict[str, list[NativeLinear]]:
    """Copies of a random weight in each format, in equal numbers."""
    made: dict[str, list[NativeLinear]] = {}
    copies = max(2, -(-MEMORY // (2 * num_out * num_in)))
    for name, format in FORMATS.items():
        spec = LinearSpec(num_out=num_out, num_in=num_in, format=format)
        for copy in range(copies):
            packed = random_packed(spec, torch.Generator().manual_seed(copy))
            assert packed is not None
            made.setdefault(name, []).append(NativeLinear(packed))
    return made


def measure(shape: tuple[int, int], rows: list[int], rounds: int) -> list[list[str]]:
    """The table's rows of one shape."""
    weights, found = weights_of(*shape), []
    copies = len(weights["int8"])
    for num_rows in rows:
        x_TI = torch.randn(num_rows, shape[1])
        seconds: dict[str, list[float]] = {name: [] for name in FORMATS}
        for turn in range(rounds if num_rows < 64 else max(6, rounds // 6)):
            for name in FORMATS:
                began_s = time.perf_counter()
                weights[name][turn % copies](x_TI)
                seconds[name].append(time.perf_counter() - began_s)
        fastest = {name: min(own) for name, own in seconds.items()}
        middle = {name: statistics.median(own) for name, own in seconds.items()}
        cells = [f"{1000 * fastest[name]:.3f} ({1000 * middle[name]:.3f})" for name in FORMATS]
        cells += [f"{fastest['int8'] / fastest[name]:.2f}" for name in ("2:4 int8", "int4")]
        found.append([f"{shape[0]}x{shape[1]}", str(num_rows), *cells])
        print(*found[-1], sep=" | ", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["8192x4096", "4096x4096"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 64, 512])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--note", default="")
    parser.add_argument("--result", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(*COLUMNS, sep=" | ")
    rows: list[list[str]] = []
    for shape in args.shapes:
        num_out, num_in = map(int, shape.split("x"))
        rows += measure((num_out, num_in), args.rows, args.rounds)
    if args.result:
        document = {
            "date": time.strftime("%Y-%m-%d"),
            "command": f"python benchmarks/bench_sparse24.py --threads {args.threads}"
            f" --rounds {args.rounds}",
            "note": f"{cpu_model()}, {platform.machine()}, kernels of {isa()}; random weights, each"
            f" round by every format in turn; fastest (median) of the rounds. {args.note}".strip(),
            "columns": COLUMNS,
            "rows": rows,
        }
        args.result.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
