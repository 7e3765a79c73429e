"""Chooses the bits of each weight by how much rounding it changes the model's output.

Every product (q, k and v together; o; gate and up; down) is rounded alone to each width, and the KL
divergence of the whole model's next-token distributions is measured on calibration text. Starting
from the fewest bits everywhere, the width whose KL falls most per bit is widened until the budget
(mean bits per weight, scales included) is spent.

Only two blocks are in memory: the hidden states of every variant walk through the model side by
side, each layer of which is built once. Eight windows of 128 tokens are compared at 64 positions
each; with 256 tokens and all positions the demo model's choice is nearly the same
(docs/guides/quantise/mixed.md).

The measurement rounds to nearest whatever method is used later, and assumes that losses add up,
which holds while they are small.

Invariant: the budget is kept; the same text and seed give the same widths.

When it loses: equally sensitive products, for which a uniform width is as good.

Shape suffixes: T tokens, C hidden_size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from time import perf_counter
from typing import NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor

from ridgeline.compress.layer_walk import ATTENTION, HiddenStateWalk, native_builder
from ridgeline.compress.methods.rtn import round_rtn
from ridgeline.compress.progress import ProgressCallback, QuantizeProgress
from ridgeline.compress.recipe import QuantizeRecipe
from ridgeline.engine.checkpoints.sources import PlainWeights, WeightSource
from ridgeline.engine.checkpoints.tensor_names import Part
from ridgeline.engine.checkpoints.write_packed import layer_products
from ridgeline.engine.model.decoder import final_logits
from ridgeline.engine.model.layers import make_norm
from ridgeline.errors import BadInput
from ridgeline.modelspec.model import ModelSpec

SCALE_BITS, ZERO_BITS = 16, 8
MOST_WINDOWS, MOST_TOKENS = 8, 128
MOST_POSITIONS = 64  # of a window, at which distributions are compared


class MixedPrecision(NamedTuple):
    """`budget`: mean bits per weight of the layers, scales included; `widths`: the choices."""

    budget: float
    widths: tuple[int, ...]


class PrecisionVariant(NamedTuple):
    """A product of one layer (its keys) at one width."""

    layer: int
    keys: tuple[str, ...]
    bits: int


class _RoundedSource(PlainWeights):
    """A source in which one variant's weights are rounded."""

    def __init__(
        self, inner: WeightSource, variant: PrecisionVariant, recipe: QuantizeRecipe
    ) -> None:
        self._inner, self._variant, self._recipe = inner, variant, recipe

    def get(self, part: Part) -> Tensor:
        value = self._inner.get(part)
        if part.key not in self._variant.keys or part.layer != self._variant.layer:
            return value
        widths = {f"{part.layer}.{part.key}": self._variant.bits}
        own = with_widths(self._recipe, widths).at(part.key, part.layer, part.shape[1])
        return round_rtn(value.float(), None, own).dense()


def with_widths(recipe: QuantizeRecipe, widths: dict[str, int]) -> QuantizeRecipe:
    """The recipe with bits of individual weights."""
    return replace(recipe, widths=widths)


def choose_widths(
    spec: ModelSpec,
    source: WeightSource,
    recipe: QuantizeRecipe,
    windows: Sequence[Sequence[int]],
    mixed: MixedPrecision,
    on_progress: ProgressCallback,
) -> dict[str, int]:
    """Bits of every weight, by "layer.key". Raises BadInput if no choice meets the budget."""
    sizes = {(layer, keys): size for layer, keys, size in _products(spec)}
    least = sum(size * bits_per_weight(recipe, min(mixed.widths)) for size in sizes.values())
    total = sum(sizes.values())
    if least > mixed.budget * total:
        raise BadInput(
            "no choice of widths is so small",
            value=f"{mixed.budget:g} bits per weight",
            limit=f"at least {least / total:.3f}, scales included",
        )
    pieces = [window[:MOST_TOKENS] for window in windows[:MOST_WINDOWS]]
    losses = measure_sensitivity(spec, source, recipe, pieces, mixed.widths, on_progress)
    chosen = spend_budget(losses, sizes, recipe, mixed)
    return {f"{layer}.{key}": bits for (layer, keys), bits in chosen.items() for key in keys}


def bits_per_weight(recipe: QuantizeRecipe, bits: int) -> float:
    """Bits of storage per weight, with its share of scales and zero-points."""
    if bits == 8:
        return 8.0
    zeros = ZERO_BITS if recipe.zeros else 0
    return bits + (SCALE_BITS + zeros) / (recipe.group_size or 128)


Site = tuple[int, tuple[str, ...]]


def spend_budget(
    losses: Mapping[PrecisionVariant, float],
    sizes: Mapping[Site, int],
    recipe: QuantizeRecipe,
    mixed: MixedPrecision,
) -> dict[Site, int]:
    """Widen where KL falls most per bit while the budget lasts."""
    chosen = dict.fromkeys(sizes, min(mixed.widths))
    left = mixed.budget * sum(sizes.values())
    left -= sum(size * bits_per_weight(recipe, chosen[site]) for site, size in sizes.items())
    while True:
        steps = [
            (gain / price, site, bits)
            for site, size in sizes.items()
            for bits in mixed.widths
            if bits > chosen[site]
            and (
                price := size
                * (bits_per_weight(recipe, bits) - bits_per_weight(recipe, chosen[site]))
            )
            <= left
            and (
                gain := losses[PrecisionVariant(*site, chosen[site])]
                - losses[PrecisionVariant(*site, bits)]
            )
            > 0
        ]
        if not steps:
            return chosen
        _, site, bits = max(steps)
        left -= sizes[site] * (
            bits_per_weight(recipe, bits) - bits_per_weight(recipe, chosen[site])
        )
        chosen[site] = bits


def num_weights(spec: ModelSpec) -> int:
    """The weights of all layers' products, over which a budget is averaged."""
    return sum(size for _, _, size in _products(spec))


def _products(spec: ModelSpec) -> Iterator[tuple[int, tuple[str, ...], int]]:
    """Layer, keys and number of weights of every product; experts of a layer together."""
    for index, layer in enumerate(spec.layers):
        sizes: dict[tuple[str, ...], int] = {}
        for product in layer_products(layer, index):
            if not product.keys[0].endswith("router"):
                count = sum(linear.num_out * linear.num_in for linear in product.specs)
                keys = tuple(product.keys)
                sizes[keys] = sizes.get(keys, 0) + count
        yield from ((index, keys, size) for keys, size in sizes.items())


def measure_sensitivity(
    spec: ModelSpec,
    source: WeightSource,
    recipe: QuantizeRecipe,
    windows: Sequence[Sequence[int]],
    widths: Sequence[int],
    on_progress: ProgressCallback,
) -> dict[PrecisionVariant, float]:
    """KL divergence in nats per token from rounding each product alone to each width."""
    clean = HiddenStateWalk(spec, source, windows)
    walks: dict[PrecisionVariant, HiddenStateWalk] = {}
    num_layers = len(spec.layers)
    for index in range(num_layers):
        begun_s = perf_counter()
        fresh = [
            PrecisionVariant(index, keys, bits)
            for layer, keys, _ in _products(spec)
            if layer == index
            for bits in widths
        ]
        _advance_layer(source, recipe, clean, walks, fresh)
        took_s = perf_counter() - begun_s
        num_walks, left = 1 + len(walks), num_layers - index - 1
        to_come = left * num_walks + len(fresh) * left * (left + 1) // 2
        on_progress(
            QuantizeProgress(
                unit="sensitivity of layer",
                layer=index,
                num_layers=num_layers,
                took_s=took_s,
                left_s=took_s * to_come / num_walks,
            )
        )
    return _divergences(spec, source, clean, walks, on_progress)


def _advance_layer(
    source: WeightSource,
    recipe: QuantizeRecipe,
    clean: HiddenStateWalk,
    walks: dict[PrecisionVariant, HiddenStateWalk],
    fresh: Sequence[PrecisionVariant],
) -> None:
    """Advance every walk through a layer, and add one for each of its variants.

    The layer is built once for all walks. A variant begins behind what it shares with the original:
    one of the feed-forward behind the attention.
    """
    index = fresh[0].layer
    block = clean.block(native_builder(clean.spec, source), index)
    for walk in walks.values():
        for half in (0, 1):
            walk.advance(block, index, half)
    begins = []
    for half in (0, 1):
        begins.append(clean.fork())
        clean.advance(block, index, half)
    for variant in fresh:
        half = 0 if variant.keys[0] in ATTENTION else 1
        walk = walks[variant] = begins[half].fork()
        rounded = native_builder(clean.spec, _RoundedSource(source, variant, recipe))
        walk.advance(walk.block(rounded, index), index, half)
        if half == 0:
            walk.advance(block, index, 1)


def _divergences(
    spec: ModelSpec,
    source: WeightSource,
    clean: HiddenStateWalk,
    walks: Mapping[PrecisionVariant, HiddenStateWalk],
    on_progress: ProgressCallback,
) -> dict[PrecisionVariant, float]:
    """At most `MOST_POSITIONS` of each window, evenly spaced, pass through the LM head."""
    gain_C = source.get(Part("norm", (spec.hidden_size,)))
    norm = make_norm(spec, gain_C, torch.float32)
    head = "embed" if spec.tied_embeddings else "lm_head"
    head_VC = source.get(Part(head, (spec.vocab_size, spec.hidden_size))).float()

    def logprobs(x_TC: Tensor) -> Tensor:
        chosen_TC = x_TC[:: -(-len(x_TC) // MOST_POSITIONS)]
        return torch.log_softmax(final_logits(spec, norm(chosen_TC) @ head_VC.T), -1)

    totals = dict.fromkeys(walks, 0.0)
    for at, x_TC in enumerate(clean.states):
        begun_s = perf_counter()
        truth_TV = logprobs(x_TC)
        truth_share_TV = truth_TV.exp()
        for variant, walk in walks.items():
            gap_TV = truth_TV - logprobs(walk.states[at])
            totals[variant] += float((truth_share_TV * gap_TV).sum(-1).mean())
        took_s = perf_counter() - begun_s
        on_progress(
            QuantizeProgress(
                unit="divergence on window",
                layer=at,
                num_layers=len(clean.states),
                took_s=took_s,
                left_s=(len(clean.states) - at - 1) * took_s,
            )
        )
    return {variant: total / len(clean.states) for variant, total in totals.items()}
