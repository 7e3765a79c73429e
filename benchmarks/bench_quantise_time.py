"""How long `ridgeline quantize` takes for a model of a given shape: one layer, piece by piece.

    python benchmarks/bench_quantise_time.py [--model dummy:llama-1b-32k] [--method gptq]

A layer of the shape with random weights: what grows with the calibration text (watching what the
products read, walking through the rounded layer) is measured on few windows and scaled to all of
them; rounding (and AWQ's search), which does not, is measured as it is. The total is layers times
that; reading and writing files, embedding and head are left out.
"""

from __future__ import annotations

import argparse
import resource
from time import perf_counter

import torch
from msgspec.structs import replace

from ridgeline.compress.balance import Balanced
from ridgeline.compress.pipeline import _balance, _round, _weights_of
from ridgeline.compress.recipe import Recipe
from ridgeline.compress.walk import Walk
from ridgeline.engine.model.weights import DummyWeights
from ridgeline.spec.load import load_spec
from ridgeline.spec.rewrite import with_dtype


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="dummy:llama-1b-32k")
    parser.add_argument("--method", default="gptq", choices=["gptq", "awq", "rtn"])
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--keys", nargs="+", help="round these weights only (q, down, …)")
    args = parser.parse_args()
    torch.set_num_threads(2)
    spec = with_dtype(load_spec(args.model), "float32")
    num_layers = len(spec.layers)
    head = replace(spec.lm_head, num_out=512)
    spec = replace(spec, layers=spec.layers[:1], vocab_size=512, lm_head=head)
    recipe = Recipe(method=args.method)
    with torch.inference_mode():
        source = DummyWeights(spec, 0)
        pieces = [[(7 * i + w) % 512 for i in range(256)] for w in range(args.windows)]
        walk = Walk(spec, source, pieces)
        begun = perf_counter()
        stats = walk.watch(source, 0, moments=True)
        watch_s = perf_counter() - begun
        walk.go(source, 0)
        go_s = perf_counter() - begun - watch_s
        print(
            f"watching {watch_s:.1f} s, walking on {go_s:.1f} s: {args.windows} windows", flush=True
        )
        begun = perf_counter()
        if args.method == "awq":
            stats = _balance(spec, Balanced(source, spec), recipe, stats, 0)
            print(f"search {perf_counter() - begun:.1f} s", flush=True)
        for part, key in _weights_of(spec, 0):
            if args.keys and part.key not in args.keys:
                continue
            at = perf_counter()
            _round(source.get(part).float(), stats.get(key), recipe, "bfloat16")
            print(f"{part.key} {list(part.shape)}: {perf_counter() - at:.1f} s", flush=True)
        round_s = perf_counter() - begun
    scale = recipe.num_windows / args.windows
    layer_s = scale * (watch_s + go_s) + round_s
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(
        f"{args.method}: {layer_s:.0f} s a layer, {num_layers} layers: "
        f"{num_layers * layer_s / 60:.1f} min; peak {peak:.2f} GB"
    )


if __name__ == "__main__":
    main()
