"""Tile shapes of the Triton kernels on this GPU, one line each, the fastest marked.

    python benchmarks/gpu/sweep_tiles.py [--only int4,wide,decode] [--jobs 14] [--json FILE]

Variants are first compiled by several processes into Triton's cache, then timed by one, as in
bench_triton.py. The winners become the constants of `ridgeline.engine.kernels.triton`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from bench_triton import BF16, Case, copy_bandwidth, decode_case, linear_case, measure

from ridgeline.engine.kernels.triton.linear import SkinnyTile
from ridgeline.engine.kernels.triton.tiles import AttentionTile

SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
Variant = tuple[str, tuple[object, ...]]


def int4_variants() -> Iterator[Variant]:
    for outputs, stages, warps in ((64, 5, 4), (64, 3, 4), (128, 4, 4), (128, 4, 8)):
        for splits in (1, 2, 4, 8):
            yield "linear", ("int4", 16, outputs, stages, warps, splits)
    for outputs, splits in ((64, 2), (64, 4), (128, 2), (128, 4)):
        yield "linear", ("int4", 32, outputs, 4, 4, splits)


def wide_variants() -> Iterator[Variant]:
    for kind in ("fp8-fp8", "bf16"):
        for outputs, stages, warps in ((64, 4, 4), (128, 4, 4), (128, 3, 8)):
            for splits in (1, 2, 4):
                yield "linear", (kind, 32, outputs, stages, warps, splits)


def decode_variants() -> Iterator[Variant]:
    for keys, stages in ((64, 3), (32, 4), (64, 2), (128, 2)):
        for splits in (1, 2, 4, 16):
            yield "decode", (keys, stages, splits)


VARIANTS = {"int4": int4_variants, "wide": wide_variants, "decode": decode_variants}


def cases_of(variant: Variant, only_first: bool) -> Iterator[Case]:
    """The cases that run one compiled variant, over shapes."""
    kernel, numbers = variant
    if kernel == "linear":
        kind, rows, outputs, stages, warps, splits = numbers
        tile = SkinnyTile(rows, 128, splits, warps, stages, outputs)
        for num_out, num_in in SHAPES[:1] if only_first else SHAPES:
            programs = num_out // outputs * splits
            if only_first or 100 <= programs <= 1100:
                yield linear_case(kind, 1 if rows == 16 else rows, num_out, num_in, tile)
        return
    keys, stages, splits = numbers
    tile = AttentionTile(16, keys, 4, stages)
    for num_seqs, context in ((32, 512), (1, 2048), (32, 2048), (128, 512)):
        if only_first or 100 <= num_seqs * 8 * splits <= 2100:
            yield decode_case(BF16, num_seqs, context, tile, splits)
        if only_first:
            return


def compile_part(variants: list[Variant], job: int, jobs: int) -> None:
    for variant in variants[job::jobs]:
        for case in cases_of(variant, True):
            try:
                case.works[0]()
            except Exception as error:
                print(f"{variant}: {error}"[:200], flush=True)
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(VARIANTS))
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--job", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=60.0, help="stop timing after this time")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    variants = [variant for name in arguments.only.split(",") for variant in VARIANTS[name]()]
    if arguments.job is not None:
        compile_part(variants, arguments.job, arguments.jobs)
        return
    begun = time.monotonic()
    command = [sys.executable, __file__, "--only", arguments.only, "--jobs", str(arguments.jobs)]
    children = [
        subprocess.Popen([*command, "--job", str(job)], env=os.environ)
        for job in range(arguments.jobs)
    ]
    for child in children:
        child.wait()
    bandwidth = copy_bandwidth()
    print(f"compiled in {time.monotonic() - begun:.0f} s", flush=True)
    lines, best = [], defaultdict(lambda: (float("inf"), ""))
    for variant in variants:
        if time.monotonic() - begun > arguments.seconds:
            break
        for case in cases_of(variant, False):
            line = measure(case, bandwidth)
            lines.append({"shape": line.shape, "variant": variant[1], "us": line.microseconds})
            print(line.shape, variant[1], line.microseconds, line.of_bound, line.error, flush=True)
            if line.microseconds is not None:
                best[line.shape] = min(best[line.shape], (line.microseconds, str(variant[1])))
    for shape, (microseconds, name) in best.items():
        print("best", shape, name, microseconds)
    if arguments.json:
        arguments.json.write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()
