"""Native kernels against their torch twins: interleaved in one run, medians of several, as ratios.

    python benchmarks/bench_kernels.py [--threads N] [--rounds 9]

Absolute figures of a shared machine drift by tens of percent; the ratio column is what to quote.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as `ridgeline` sets it

import torch
import torch.nn.functional as F

from ridgeline.engine.attention import build_attention
from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.kernels.native_int8 import NativeInt8
from ridgeline.engine.scheduler.plan import Run
from ridgeline.modelspec.checkpoints.load import load_spec

Timed = Callable[[], object]
LINEARS = ((768, 256), (2048, 2048), (8192, 2048))
ROWS = (1, 4, 16, 64, 256)


def seconds(call: Timed, least_s: float = 0.02) -> float:
    """Mean time of a call, over enough of them to fill `least_s`."""
    begun, count = time.perf_counter(), 0
    while (spent := time.perf_counter() - begun) < least_s or not count:
        call()
        count += 1
    return spent / count


def interleaved(ours: Timed, theirs: Timed, rounds: int) -> tuple[float, float, float]:
    """Medians of both, and the median of the rounds' own ratios theirs / ours."""
    ours(), theirs()
    pairs = [(seconds(ours), seconds(theirs)) for _ in range(rounds)]
    mine, other = (statistics.median(side) for side in zip(*pairs, strict=True))
    return mine, other, statistics.median(b / a for a, b in pairs)


def linear_case(num_out: int, num_in: int, num_rows: int, rounds: int) -> dict[str, object]:
    weight = torch.randint(-127, 128, (num_out, num_in), dtype=torch.int8)
    dense, x = weight.float(), torch.randn(num_rows, num_in)
    native = NativeInt8(weight, torch.ones(num_out), None)
    mine, other, ratio = interleaved(lambda: native(x), lambda: F.linear(x, dense), rounds)
    return {
        "what": f"int8 linear {num_out}x{num_in}, {num_rows} rows, against fp32",
        "us": mine * 1e6,
        "twin_us": other * 1e6,
        "ratio": ratio,
        "gops": 2e-9 * num_out * num_in * num_rows / mine,
    }


def attention_case(
    name: str, runs: list[tuple[int, int]], model: str, rounds: int
) -> dict[str, object]:
    """`runs`: (computed, new) per sequence, on one layer of a published shape."""
    spec = load_spec(model)
    attention = spec.layers[0].attention
    per = [-(-(done + new) // 16) for done, new in runs]
    cache = KvCache.allocate(spec, sum(per), 16, torch.float32, "cpu")
    for layer in cache.layers[:1]:
        layer.normal_()
    order = torch.randperm(sum(per)).tolist()
    plan = []
    for seq, ((done, new), count) in enumerate(zip(runs, per, strict=True)):
        table, order = tuple(order[:count]), order[count:]
        plan.append(Run(seq, done, (0,) * new, table, None))
    num_rows = sum(new for _, new in runs)
    q = torch.randn(num_rows, attention.num_heads, attention.head_dim)
    kv = torch.randn(num_rows, 2, attention.num_kv_heads, attention.head_dim)
    calls = []
    for backend in ("native", "torch"):
        attend = build_attention(backend, spec, cache).prepare(plan)
        calls.append(lambda attend=attend: attend(q, kv, 0))
    with torch.inference_mode():
        mine, other, ratio = interleaved(calls[0], calls[1], rounds)
    width = attention.num_kv_heads * attention.head_dim
    read = 8 * sum(done + new for done, new in runs) * width
    return {
        "what": f"attention, {name} ({model}), against torch",
        "us": mine * 1e6,
        "twin_us": other * 1e6,
        "ratio": ratio,
        "gb_s": read / mine * 1e-9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found = [linear_case(o, i, r, args.rounds) for o, i in LINEARS for r in ROWS]
    shapes = {
        "decode, 16 sequences of 500": [(500, 1)] * 16,
        "decode, 1 sequence of 8000": [(8000, 1)],
        "prefill of 512": [(0, 512)],
        "chunk of 64 after 1000, and 8 decodes": [(1000, 64), *[(300, 1)] * 8],
    }
    for model in ("demo", "dummy:llama-1b-32k"):
        for name, runs in shapes.items():
            found.append(attention_case(name, runs, model, args.rounds))
    print(f"{args.threads} thread(s), medians of {args.rounds} interleaved rounds")
    for row in found:
        more = f"{row['gops']:6.0f} GOPS" if "gops" in row else f"{row['gb_s']:6.1f} GB/s"
        print(f"{row['what']:72} {row['us']:9.0f} us {more}   {row['ratio']:5.2f}x")
    geometric = math.exp(statistics.fmean(math.log(float(row["ratio"])) for row in found))  # type: ignore[arg-type]
    print(json.dumps({"threads": args.threads, "geometric_mean": geometric, "rows": found}))


if __name__ == "__main__":
    main()
