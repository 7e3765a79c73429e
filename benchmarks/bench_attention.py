"""Attention over a KV cache of each format: time, bytes, and percent of the bandwidth bound.

    python benchmarks/bench_attention.py [--threads N] [--rounds 5] [--model dummy:llama-1b-32k]
        [--kv int8 bfloat16 ...] [--only "decode 1 at 8192"] [--layers 4] [--in-order] [--cpu-time]

One layer of the shape, native and torch interleaved, medians. Layers alternate, so that a long
context comes from memory; with `--layers 1` a short one stays in the processor's caches, and the
time left is the arithmetic's. `--in-order` lays the blocks one behind the other. The bound of a
case is the larger of its bytes over the read rate and its multiplications over the format's, both
measured in every round: the medians over rounds of the best of three samples. `--cpu-time` counts
one thread's CPU time, for machines that do other work meanwhile; what shares a core with it still
slows it. (What a format costs in quality: `ridgeline eval MODEL MODEL --kv-cache-dtype …`.)
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as `ridgeline` sets it

import torch

from ridgeline import _native
from ridgeline.engine.attention import build_attention
from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.attention.int4.format import encode_groups
from ridgeline.engine.attention.kv_format import kv_format
from ridgeline.engine.attention.native import KV_FORMATS
from ridgeline.engine.scheduler.plan import Run
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.cost import kv_bytes_per_token
from ridgeline.modelspec.cost.kv_layout import kv_layout
from ridgeline.modelspec.model import ModelSpec
from ridgeline.modelspec.rewrite import with_dtype, with_kv_dtype

Runs = list[tuple[int, int]]
CASES: dict[str, Runs] = {
    **{f"decode 1 at {n}": [(n, 1)] for n in (128, 1024, 8192)},
    **{f"decode 16 at {n}": [(n, 1)] * 16 for n in (128, 1024)},
    "decode 8, one at 8192, seven at 200": [(8192, 1)] + [(200, 1)] * 7,
    "decode 8 at 1024 with a prompt of 64": [(1024, 1)] * 8 + [(0, 64)],
    "prefill 512": [(0, 512)],
    "prefill 2048": [(0, 2048)],
    "chunk 256 on 8192": [(8192, 256)],
}

RATES = {
    "float32": "float32",
    "float16": "float32",
    "bfloat16": "bf16_kv",
    "int8": "int16",
    "int4": "int16",
    "fp8": "float32",
}
"""How a format is multiplied, as `ridgeline.hardware.ceilings` names it."""


clock: Callable[[], float] = time.perf_counter


def seconds(call: Callable[[], object], least_s: float = 0.02) -> float:
    begun, count = clock(), 0
    while (spent := clock() - begun) < least_s or not count:
        call()
        count += 1
    return spent / count


def fill(cache: KvCache, kv_N2KBW: torch.Tensor, head_dim: int) -> None:
    """Random keys and values, in the cache's format."""
    if cache.recent:
        for block in range(len(kv_N2KBW)):
            like = torch.randn(*kv_N2KBW.shape[1:-1], head_dim)
            kv_N2KBW[block] = encode_groups(like.unsqueeze(0))[0]
        return
    rows_N2KBW = cache.format.encode(torch.randn(*kv_N2KBW.shape[:-1], head_dim))
    kv_N2KBW[:] = cache.format.to_tiles(rows_N2KBW)


def take(order: Iterator[int], count: int) -> tuple[int, ...]:
    return tuple(next(order) for _ in range(count))


def prepare(
    spec: ModelSpec, runs: Runs, in_order: bool
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Native and torch over the same cache: blocks in order, or scattered over it."""
    attention, layout = spec.layers[0].attention, kv_layout(spec)
    size = layout.block_tokens
    blocks = [-(-(done + new) // size) for done, new in runs]
    total = sum(blocks) * layout.num_groups
    sizes = (total, size, torch.float32, "cpu", kv_format(spec.kv_dtype))
    cache = KvCache.allocate(spec, *sizes, layout=layout)
    for layer in cache.layers:
        fill(cache, layer, attention.head_dim)
    order = iter(range(total) if in_order else torch.randperm(total).tolist())
    plan = [
        Run(
            seq,
            done,
            (0,) * new,
            take(order, count),
            None,
            windows=tuple(take(order, count) for _ in layout.windowed),
        )
        for seq, ((done, new), count) in enumerate(zip(runs, blocks, strict=True))
    ]
    rows = sum(new for _, new in runs)
    q_THD = torch.randn(rows, attention.num_heads, attention.head_dim)
    kv_T2KD = torch.randn(rows, 2, attention.num_kv_heads, attention.head_dim)
    native, twin = (
        build_attention(name, spec, cache).prepare(plan) for name in ("native", "torch")
    )

    def every_layer(attend: Callable[..., object]) -> Callable[[], object]:
        return lambda: [attend(q_THD, kv_T2KD, layer) for layer in range(len(spec.layers))]

    return every_layer(native), every_layer(twin)


def case(
    spec: ModelSpec, name: str, rounds: int, num_threads: int, in_order: bool
) -> dict[str, object]:
    """Times are per layer; what the machine gives is measured in every round, between both."""
    runs, attention, num_layers = CASES[name], spec.layers[0].attention, len(spec.layers)
    native, twin = prepare(spec, runs, in_order)
    with torch.inference_mode():
        native(), twin()
        rounds = [
            (seconds(native), measure_rates(num_threads, spec.kv_dtype), seconds(twin))
            for _ in range(rounds)
        ]
    mine = statistics.median(taken for taken, _, _ in rounds) / num_layers
    other = statistics.median(taken for _, _, taken in rounds) / num_layers
    rates = [
        statistics.median(side) for side in zip(*(found for _, found, _ in rounds), strict=True)
    ]
    per_token = kv_bytes_per_token(spec) // num_layers
    nbytes = per_token * sum(done + new for done, new in runs)
    seen = sum(new * done + new * (new + 1) // 2 for done, new in runs)
    flops = 4 * seen * attention.num_heads * attention.head_dim
    bound = max(nbytes / rates[0], flops / rates[1])
    return {
        "case": f"{name}, {spec.kv_dtype}",
        "us": mine * 1e6,
        "torch_us": other * 1e6,
        "ratio": statistics.median(theirs / ours for ours, _, theirs in rounds),
        "read_gb_s": rates[0] / 1e9,
        "gflop_s": rates[1] / 1e9,
        "bytes": nbytes,
        "bound": "bytes" if nbytes / rates[0] > flops / rates[1] else "flops",
        "percent": 100 * bound / mine,
    }


def measure_rates(num_threads: int, kv: str) -> tuple[float, float]:
    """Bytes read and operations per second with this many threads: the best of three samples,
    so that a bound is what the machine can do, not what it was kept from."""
    multiply = _native.multiply_rates(RATES[kv], num_threads, 3, 0.01)
    if clock is time.thread_time:
        floats = torch.ones(64 << 20)
        return floats.nbytes / seconds(floats.sum), max(rate for rate, _ in multiply)
    read = _native.read_rates(256 << 20, num_threads, 3, 0.02)
    return max(rate for rate, _ in read), max(rate for rate, _ in multiply)


def speed(asked: argparse.Namespace) -> None:
    global clock
    num_threads: int = 1 if asked.cpu_time else asked.threads
    clock = time.thread_time if asked.cpu_time else time.perf_counter
    torch.set_num_threads(num_threads)
    full = with_dtype(load_spec(asked.model), "float32")
    spec = type(full)(
        **{name: getattr(full, name) for name in full.__struct_fields__}
        | {"layers": full.layers[: asked.layers]}
    )
    for kv in asked.kv:
        for name in (name for name in CASES if asked.only in name):
            row = case(with_kv_dtype(spec, kv), name, asked.rounds, num_threads, asked.in_order)
            print(
                f"{row['case']:46} {row['us']:10.0f} us {row['percent']:5.0f} % of {row['bound']}"
                f"   {row['ratio']:6.2f}x torch   {json.dumps(row)}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="dummy:llama-1b-32k")
    parser.add_argument("--kv", nargs="+", choices=KV_FORMATS, default=list(KV_FORMATS))
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--layers", type=int, default=4, help="layers that alternate")
    parser.add_argument("--in-order", action="store_true", help="blocks one behind the other")
    parser.add_argument("--cpu-time", action="store_true", help="CPU time of one thread")
    speed(parser.parse_args())


if __name__ == "__main__":
    main()
