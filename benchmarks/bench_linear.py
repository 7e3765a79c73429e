"""The linears against this machine's own limits, measured in the same run, variant by variant.

    python benchmarks/bench_linear.py [--threads N] [--rows 1,4,16,512] [--kinds int4,int8]
                                      [--isas auto] [--rounds 5] [--json FILE]

For each kind of weight, ISA variant and number of rows: time of one product (median of rounds, in
each of which all kinds take their turn; few rows rotate through more weights than any cache
holds), bytes of weights, GB/s against the measured
read bandwidth, GOPS against the measured peak of the best exact sequence of instructions for that
kind ("int4": bytes; "int8": bytes with VNNI, else words; "bf16", "fp32": fused multiply-adds).
Behind a kind may stand how exactly activations meet it ("int4 int16", "int8 float32"); GOPS are
then of all digits. fbgemm and torch's fp32 are there for comparison. `bound` is the larger of bytes
/ bandwidth and operations / peak: what a perfect kernel would take.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as `ridgeline` sets it

import torch
from msgspec.structs import replace
from torch import Tensor

import ridgeline._native as _native
from ridgeline.engine.kernels.native_linear import (
    ISA_VARIABLE,
    NativeLinear,
    Packed,
    pack_lines,
)
from ridgeline.engine.quant.int8.fbgemm import FbgemmGemm
from ridgeline.engine.quant.packed import random_packed
from ridgeline.modelspec.format import BF16, DIGITS, FP32, INT4, INT8, Format, dense
from ridgeline.modelspec.model import LinearSpec

Product = Callable[[Tensor], Tensor]
FORMATS: dict[str, Format] = {
    "int4": INT4,
    "int8": INT8,
    "bf16": BF16,
    "fp32": FP32,
    "torch fp32": dense("float32"),
    "fbgemm": INT8,
}
PEAK = {
    "int4": "int4",
    "int8": "int16",
    "bf16": "bf16",
    "fp32": "float32",
    "torch fp32": "float32",
    "fbgemm": "int8",
}
for _kind in ("int4", "int8"):
    for _activations in ("int16", "float32"):
        _name = f"{_kind} {_activations}"
        FORMATS[_name] = replace(FORMATS[_kind], digits=DIGITS[_activations])
        PEAK[_name] = PEAK[_kind]
TORCH = ("torch fp32", "fbgemm")
COLD_BYTES = 160e6  # weights that few rows rotate through: several times the largest cache


def make(kind: str, num_out: int, num_in: int) -> Product:
    """One random linear of `kind`."""
    if kind == "torch fp32":
        weight_OI = torch.randn(num_out, num_in)
        return lambda x_TI: torch.nn.functional.linear(x_TI, weight_OI)
    if kind == "fbgemm":
        q_OI = torch.randint(-60, 61, (num_out, num_in), dtype=torch.int8)
        return FbgemmGemm.pack(q_OI, torch.ones(num_out))
    if kind == "bf16":
        lines = pack_lines("bf16", torch.randn(num_out, num_in).bfloat16(), 0)
        return NativeLinear(Packed("bf16", num_out, num_in, 0, lines))
    if kind == "fp32":
        lines = pack_lines("fp32", torch.randn(num_out, num_in), 0)
        return NativeLinear(Packed("fp32", num_out, num_in, 0, lines))
    format = FORMATS[kind]
    spec = LinearSpec(num_out=num_out, num_in=num_in, format=format.stored)
    packed = random_packed(spec, torch.Generator().manual_seed(0))
    assert packed is not None
    linear = NativeLinear(packed)
    linear.digits = format.digits
    return linear


class Contender(NamedTuple):
    """One kind of linear on one ISA, often enough that no cache holds all."""

    kind: str
    isa: str
    products: list[Product]


def seconds(contenders: list[Contender], x_TI: Tensor, rounds: int) -> list[float]:
    """Median time of one product of each contender; all take their turn in every round."""
    spent: list[list[float]] = [[] for _ in contenders]
    for turn in range(rounds + 1):
        for found, (_, isa, products) in zip(spent, contenders, strict=True):
            os.environ[ISA_VARIABLE] = isa
            some = products if len(x_TI) <= 32 else products[:2]
            begun = time.perf_counter()
            for product in some:
                product(x_TI)
            if turn:  # the first warms up
                found.append((time.perf_counter() - begun) / len(some))
    return [statistics.median(found) for found in spent]


def limits(num_threads: int, kinds: list[str]) -> tuple[float, dict[str, float]]:
    """Read bandwidth, and the arithmetic peak of each kind, of this machine now."""
    bandwidth = statistics.median(r for r, _ in _native.read_rates(256 << 20, num_threads, 5, 0.1))
    peaks = {}
    for kind in kinds:
        rates = _native.multiply_rates(PEAK[kind], num_threads, 5, 0.05)
        peaks[kind] = statistics.median(rate for rate, _ in rates)
    return bandwidth, peaks


def contender(kind: str, isa: str, shape: tuple[int, int]) -> Contender:
    os.environ[ISA_VARIABLE] = isa
    count = max(2, int(COLD_BYTES / FORMATS[kind].nbytes(*shape)))
    return Contender(kind, isa, [make(kind, *shape) for _ in range(count)])


def measure(
    contenders: list[Contender], shape: tuple[int, int], num_rows: int, rounds: int
) -> Iterator[dict[str, object]]:
    """One row of results per contender."""
    num_out, num_in = shape
    times = seconds(contenders, torch.randn(num_rows, num_in), rounds)
    for (kind, isa, _), spent in zip(contenders, times, strict=True):
        num_bytes = FORMATS[kind].nbytes(num_out, num_in)
        yield {
            "kind": kind,
            "isa": "torch" if kind in TORCH else _native.linear_isa(isa),
            "rows": num_rows,
            "us": spent * 1e6,
            "bytes": num_bytes,
            "gb_s": num_bytes / spent * 1e-9,
            "gops": 2e-9 * num_rows * num_out * num_in * FORMATS[kind].digits / spent,
        }


def with_bounds(
    found: dict[str, object], bandwidth: float, peaks: dict[str, float]
) -> dict[str, object]:
    """The result against the larger of its two bounds."""
    by_memory = float(found["bytes"]) / bandwidth  # type: ignore[arg-type]
    share_of_peak = float(found["gops"]) * 1e9 / peaks[str(found["kind"])]  # type: ignore[arg-type]
    spent = float(found["us"]) * 1e-6  # type: ignore[arg-type]
    return found | {
        "of_bandwidth": by_memory / spent,
        "of_peak": share_of_peak,
        "of_bound": max(by_memory / spent, share_of_peak),
    }


def show(found: dict[str, object]) -> str:
    return (
        f"{found['kind']:12} {found['isa']:11} {found['rows']:5} rows {found['us']:10.0f} us "
        f"{found['gb_s']:6.1f} GB/s {found['of_bandwidth']:5.0%}   "
        f"{found['gops']:6.0f} GOPS {found['of_peak']:5.0%}   of bound {found['of_bound']:5.0%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", default="1,2,4,8,16,64,256,512,2048")
    parser.add_argument("--kinds", default=",".join(FORMATS))
    parser.add_argument("--isas", default="auto", help="comma-separated; all: every one here")
    parser.add_argument("--shape", default="8192x2048", help="outputs x inputs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    kinds, rows = args.kinds.split(","), [int(each) for each in args.rows.split(",")]
    num_out, num_in = (int(each) for each in args.shape.split("x"))
    isas = _native.linear_isas() if args.isas == "all" else args.isas
    bandwidth, peaks = limits(args.threads, kinds)
    print(f"{args.threads} thread(s), {num_out} outputs x {num_in} inputs")
    print(f"reads: {bandwidth / 1e9:.1f} GB/s")
    print("peaks, GOPS:", {kind: round(peak / 1e9) for kind, peak in peaks.items()})
    results = []
    with torch.inference_mode():
        contenders = [
            contender(kind, isa, (num_out, num_in))
            for kind in kinds
            for isa in (["auto"] if kind in TORCH else isas.split(","))
        ]
        for num_rows in rows:
            for found in measure(contenders, (num_out, num_in), num_rows, args.rounds):
                results.append(with_bounds(found, bandwidth, peaks))
                print(show(results[-1]), flush=True)
    if args.json:
        conditions = {"threads": args.threads, "read_gb_s": bandwidth / 1e9, "peaks": peaks}
        args.json.write_text(json.dumps({**conditions, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
