"""How long `ridgeline quantize` takes for a model of a given shape: one layer, piece by piece.

    python benchmarks/bench_quantise_time.py [--model dummy:llama-1b-32k] [--method gptq] [--half 0]

A layer of the shape with random weights: what grows with the calibration text (watching what the
products read in both models, walking on) is measured on few windows and scaled to all of them;
repairing, AWQ's search and rounding, which do not, are measured as they are. `--half` takes the
attention (0) or the feed-forward (1) alone: short enough for a quiet machine. The total is layers
times that: reading and writing files, embedding and head are left out. Next to the wall time is
the CPU time divided by two: the time on two otherwise idle cores. The peak of
memory is that of the layer, with the hidden states of all windows in both models put in.
"""

from __future__ import annotations

import argparse
import resource
from collections.abc import Sequence
from itertools import groupby
from time import perf_counter, process_time

import numpy as np
import torch
from msgspec.structs import replace

from ridgeline.compress.calibration import MOST_HELD
from ridgeline.compress.formats.lattice import Rounded
from ridgeline.compress.layer_walk import HiddenStateWalk, PairedWalks, observe_inputs
from ridgeline.compress.methods.channel_balance import BalancedWeights
from ridgeline.compress.methods.repair import repair
from ridgeline.compress.methods.rounding import ProductWeights, round_product
from ridgeline.compress.pipeline import LayerInProgress, balance, halves
from ridgeline.compress.recipe import QuantizeRecipe, check
from ridgeline.engine.checkpoints.sources import DummyWeights, PlainWeights, WeightSource
from ridgeline.engine.checkpoints.tensor_names import Part
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.model import ModelSpec
from ridgeline.modelspec.rewrite import with_dtype

THREADS = 2


class DraftDistributions(PlainWeights):
    """Random weights, drawn once; bfloat16, as checkpoints have them."""

    def __init__(self, inner: WeightSource) -> None:
        self._inner, self._drawn = inner, dict[Part, torch.Tensor]()

    def get(self, part: Part) -> torch.Tensor:
        if part not in self._drawn:
            self._drawn[part] = self._inner.get(part).bfloat16()
        return self._drawn[part]


class Clock:
    """Seconds by what they were spent on: on the wall, and of the processors by their number."""

    def __init__(self) -> None:
        self.text_s, self.rest_s, self._at = np.zeros(2), np.zeros(2), self._now()

    def _now(self) -> np.ndarray:
        return np.array([perf_counter(), process_time() / THREADS])

    def _lap(self, what: str) -> np.ndarray:
        took_s = self._now() - self._at
        self._at = self._now()
        print(f"{what}: {took_s[0]:.1f} s, of the cores {took_s[1]:.1f} s", flush=True)
        return took_s

    def text(self, what: str) -> None:
        self.text_s += self._lap(what)

    def rest(self, what: str) -> None:
        self.rest_s += self._lap(what)


def layer(
    spec: ModelSpec, recipe: QuantizeRecipe, pieces: list[list[int]], chosen: Sequence[int]
) -> Clock:
    """What `ridgeline.compress.pipeline` does with a layer, timed."""
    source = DraftDistributions(DummyWeights(spec, 0))
    clean = HiddenStateWalk(spec, source, pieces)
    walk = clean.fork()
    walk.states = [x_TC + 0.01 * torch.randn_like(x_TC) for x_TC in walk.states]
    num_windows = recipe.num_windows + MOST_HELD
    unseen = [torch.ones_like(clean.states[0]) for _ in range(2 * num_windows)]
    for part, _ in (each for half in halves(spec, 0) for each in half):
        source.get(part)
    grids: dict[Part, Rounded] = {}
    now, clock = LayerInProgress(source, grids, {}), Clock()
    for at in chosen:
        half = halves(spec, 0)[at]
        keys = {part.key for part, _ in half}
        watched = observe_inputs(PairedWalks(clean, walk, 1), source, now, 0, at, keys, True)
        clock.text(f"watching {', '.join(sorted(keys))}")
        aimed = repair(source, half, watched, recipe.repair, recipe.damping)
        clock.rest("repairing")
        balanced, stats = (
            BalancedWeights(LayerInProgress(source, {}, aimed.weights), spec),
            watched.stats,
        )
        if recipe.method == "awq":
            stats = balance(spec, balanced, recipe, stats, half, 0)
            clock.rest("searching")
        for key, group in groupby(half, lambda each: each[1]):
            product = ProductWeights(key, {part: balanced.get(part).float() for part, _ in group})
            rounded, _ = round_product(product, stats, recipe, "bfloat16")
            grids |= rounded
            clock.rest(f"rounding {'+'.join(key[0])}")
        walk.go(LayerInProgress(source, grids, {}), 0, at)
        clock.text("walking on")
    del unseen
    return clock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="dummy:llama-1b-32k")
    parser.add_argument("--method", default="gptq", choices=["gptq", "awq"])
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--half", type=int, choices=[0, 1])
    args = parser.parse_args()
    torch.set_num_threads(THREADS)
    spec = with_dtype(load_spec(args.model), "float32")
    num_layers = len(spec.layers)
    head = replace(spec.lm_head, num_out=512)
    spec = replace(spec, layers=spec.layers[:1], vocab_size=512, lm_head=head)
    recipe = check(QuantizeRecipe(method=args.method))
    pieces = [[(7 * i + w) % 512 for i in range(256)] for w in range(args.windows)]
    with torch.inference_mode():
        clock = layer(spec, recipe, pieces, (0, 1) if args.half is None else (args.half,))
    layer_s = (recipe.num_windows + MOST_HELD) / args.windows * clock.text_s + clock.rest_s
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    for what, took_s in zip(("on the wall", "of the cores"), layer_s, strict=True):
        minutes = num_layers * took_s / 60
        print(f"{args.method}, {what}: {took_s:.0f} s a layer, {num_layers}: {minutes:.1f} min")
    print(f"peak {peak:.2f} GB")


if __name__ == "__main__":
    main()
