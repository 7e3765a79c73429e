"""Decode steps of latent attention (MLA) in torch on a CPU: rows in pieces against all at once.

    python benchmarks/bench_latent.py [--model deepseek-v2-lite] [--rounds 15] [--json FILE]

One layer of the shape with random weights and a random cache in float32, one thread. Both forms
take turns; medians of milliseconds. "products" is the time of the two products at the speed of a
matrix product of 512 by 512, "read" that of summing the cached rows once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from msgspec.structs import replace

from ridgeline.engine.attention import paged
from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.attention.latent import LatentUp
from ridgeline.engine.scheduler.plan import Run
from ridgeline.modelspec.families.registry import spec_from_config
from ridgeline.modelspec.families.shapes import planning_config
from ridgeline.modelspec.model import ModelSpec
from ridgeline.modelspec.rewrite import with_dtype, with_kv_dtype

BLOCK = 32
CASES = ((1, 128), (1, 1024), (1, 4096), (8, 1024), (8, 4096), (16, 1024))
FORMS = {"pieces": paged._decode_latent_in_pieces, "whole": paged._decode_latent}


def one_layer(model: str) -> ModelSpec:
    spec = spec_from_config(planning_config(model), name=model)
    return with_kv_dtype(with_dtype(replace(spec, layers=spec.layers[-1:]), "float32"), "float32")


def median_ms(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(1000 * (time.perf_counter() - start))
    return {name: statistics.median(found) for name, found in times.items()}


def measure(spec: ModelSpec, num_seqs: int, length: int, rounds: int) -> dict[str, float]:
    attention = spec.layers[0].attention
    latent = attention.latent
    assert latent is not None
    width, blocks = latent.rank + latent.rope_dim, length // BLOCK
    size = attention.k.num_out + attention.v.num_out
    up = LatentUp(attention, torch.randn(size, latent.rank) / latent.rank**0.5)
    cache = KvCache.allocate(spec, num_seqs * blocks, BLOCK, torch.float32, "cpu")
    cache.layers[0].normal_()
    order = torch.randperm(num_seqs * blocks).view(num_seqs, blocks).tolist()
    backend = paged.PagedAttention(spec, cache)
    runs = [Run(i, length - 1, (0,), tuple(own), None) for i, own in enumerate(order)]
    step = backend.prepare(runs)
    q_THD = torch.randn(num_seqs, attention.num_heads, attention.head_dim)
    rows_TW = torch.randn(num_seqs, width)

    def call(form: str) -> Callable[[], object]:
        def run() -> object:
            step.decode_latent = FORMS[form]
            return step.attend_latent(q_THD, rows_TW, 0, up)

        return run

    square = torch.randn(512, 512)
    found = median_ms(
        {
            **{form: call(form) for form in FORMS},
            "read": cache.layers[0].sum,
            "square": lambda: square @ square,
        },
        rounds,
    )
    products = 2 * num_seqs * length * attention.num_heads * (latent.rank + width)
    found["products"] = products / (2 * 512**3) * found.pop("square")
    return {name: round(value, 2) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="deepseek-v2-lite")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    spec, rows = one_layer(chosen.model), []
    for num_seqs, length in CASES:
        found = {"sequences": num_seqs, "tokens": length}
        rows.append({**found, **measure(spec, num_seqs, length, chosen.rounds)})
        print(json.dumps(rows[-1]), flush=True)
    if chosen.json:
        chosen.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
