"""Walks through a model one block at a time with the calibration text's hidden states.

Only one block's weights are in memory (two while inputs are observed), but the states of all
windows. The quantised model's walk is paired with one through the original on the same text, so
each product sees what it will read and what it would have read (`observe_inputs`). A block is
processed in halves, attention and feed-forward: the second is observed with the first already
rounded.

Shape suffixes: T tokens of a window, C hidden_size, I inputs, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from copy import copy
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.compress.statistics import InputStats, InputTap, ProductKey, WindowPair
from ridgeline.engine.attention.full import FullAttention
from ridgeline.engine.checkpoints.load import DecoderBuilder
from ridgeline.engine.checkpoints.sources import WeightSource
from ridgeline.engine.checkpoints.tensor_names import Part
from ridgeline.engine.execution.layers import layer_backend_of
from ridgeline.engine.model.layers import Block
from ridgeline.engine.model.rope import RopeTables
from ridgeline.engine.quant.base import Linear
from ridgeline.engine.quant.packed import PackedLinear
from ridgeline.errors import BadModel
from ridgeline.modelspec.model import LinearSpec, ModelSpec

ATTENTION = ("q", "k", "v", "o")
LAST = (("o",), None), (("down",), None)
"""Products behind whose inputs nothing of their half of a block is read."""


class StopForward(Exception):
    """Raised to end a forward pass once all requested inputs have been observed."""


class TappingBuilder(DecoderBuilder):
    """Builds blocks whose linears with one of the `keys` report their inputs to `hear`.

    At one of the products `until` the block raises `StopForward`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: WeightSource,
        keys: Collection[str],
        hear: Callable[[ProductKey, Tensor], None],
        until: Collection[ProductKey] = (),
    ) -> None:
        super().__init__(
            spec, weights, torch.device("cpu"), torch.float32, layer_backend_of("native")
        )
        self.num_inputs: dict[ProductKey, int] = {}
        self.narrow: dict[ProductKey, Linear] = {}  # of few outputs, by product; without a bias
        self._keys, self._hear, self._until = keys, hear, until

    def _linear(
        self, keys: list[str], specs: list[LinearSpec], layer: int | None, expert: int | None = None
    ) -> Linear:
        linear = super()._linear(keys, specs, layer, expert)
        if keys[0] not in self._keys:
            return linear
        key = (tuple(keys), expert)
        self.num_inputs[key] = specs[0].num_in
        few = len(keys) == 1 and 2 * specs[0].num_out < specs[0].num_in
        if few and isinstance(linear, PackedLinear):
            self.narrow[key] = PackedLinear(linear.native.packed, None, torch.float32)
        return InputTap(linear, lambda x_TI: self._heard(key, x_TI))

    def _heard(self, key: ProductKey, x_TI: Tensor) -> None:
        self._hear(key, x_TI)
        if key in self._until:
            raise StopForward


def native_builder(spec: ModelSpec, weights: WeightSource) -> DecoderBuilder:
    """A builder of blocks in float32 on the CPU, by the native kernels."""
    native = layer_backend_of("native")
    return DecoderBuilder(spec, weights, torch.device("cpu"), torch.float32, native)


class HiddenStateWalk:
    """Hidden states x_TC of every window, before the next layer."""

    def __init__(
        self, spec: ModelSpec, weights: WeightSource, windows: Sequence[Sequence[int]]
    ) -> None:
        self.spec = spec
        self._ropes = list(dict.fromkeys(layer.attention.rope for layer in spec.layers))
        length = len(windows[0])
        embed_VC = weights.get(Part("embed", (spec.vocab_size, spec.hidden_size)))
        ids = [F.embedding(torch.tensor(tokens), embed_VC) for tokens in windows]
        del embed_VC  # it may be larger than a block
        self.states = [x_TC.float() * spec.embed_scale for x_TC in ids]
        self._attend = FullAttention(spec, length, self.states[0])
        tables = RopeTables(self._ropes, length, torch.float32, torch.device("cpu"))
        self._turns = tables.at(torch.arange(length), length)

    def fork(self) -> HiddenStateWalk:
        """Another walk starting at the same position."""
        other = copy(self)
        other.states = list(self.states)
        return other

    def half(self, builder: DecoderBuilder, index: int, half: int) -> Callable[[Tensor], Tensor]:
        """The attention (0) or feed-forward (1) of layer `index`, built by `builder`, as a function
        of one window's states.
        """
        return self._half_of(self.block(builder, index), index, half)

    def block(self, builder: DecoderBuilder, index: int) -> Block:
        """Layer `index`, for `advance`."""
        return builder.block(self.spec.layers[index], index, self._ropes)

    def _half_of(self, block: Block, index: int, half: int) -> Callable[[Tensor], Tensor]:
        if half:
            return block.feed_forward
        return lambda x_TC: block.attend(x_TC, self._turns, self._attend, index)

    def go(self, weights: WeightSource, index: int, half: int) -> None:
        """Advance through half of layer `index`. Raises BadModel if the states contain NaN or
        infinity.
        """
        self.advance(self.block(native_builder(self.spec, weights), index), index, half)

    def advance(self, block: Block, index: int, half: int) -> None:
        """Advance through half of layer `index`, which is built already. Raises as `go`."""
        through = self._half_of(block, index, half)
        for at, x_TC in enumerate(self.states):
            self.states[at] = through(x_TC)
        self.check(index)

    def check(self, index: int) -> None:
        """Raise BadModel if the states contain NaN or infinity."""
        if not all(torch.isfinite(x_TC).all() for x_TC in self.states):
            raise BadModel(f"the calibration's activations overflow in layer {index}")


class PairedWalks(NamedTuple):
    """The calibration's states in the original model and in the quantised one.

    The last `num_held` windows of both are held out: they judge and are not learnt from.
    """

    clean: HiddenStateWalk
    rounded: HiddenStateWalk
    num_held: int


class ObservedInputs(NamedTuple):
    """Inputs of products: sums over the windows to learn from, and rows of the held-out ones."""

    stats: dict[ProductKey, InputStats]
    held: dict[ProductKey, list[WindowPair]]


def observe_inputs(
    walks: PairedWalks,
    source: WeightSource,
    rounded: WeightSource,
    index: int,
    half: int,
    keys: Collection[str],
    moments: bool,
) -> ObservedInputs:
    """What the products with `keys` in half `half` of layer `index` read.

    The rounded walk observes `rounded` (in which this half is unchanged) without advancing. With
    `moments`, the original walk passes through the half of `source` as well. Rows of experts are
    not compared, since routers may send other tokens there.
    """
    clean, walk = walks.clean, walks.rounded
    would: dict[ProductKey, Tensor] = {}
    stats: dict[ProductKey, InputStats] = {}
    held: dict[ProductKey, list[WindowPair]] = {}
    narrow: dict[ProductKey, Linear] = {}
    hold = False

    def add(key: ProductKey, x_TI: Tensor) -> None:
        original_TI = would.get(key) if moments and key[1] is None else None
        if hold and original_TI is not None:
            held.setdefault(key, []).append(WindowPair(x_TI, original_TI))
        elif len(x_TI):
            stats[key].add(x_TI, original_TI, narrow.get(key))

    builder = TappingBuilder(walk.spec, rounded, keys, add, LAST)
    listen = walk.half(builder, index, half)
    stats |= {key: InputStats.empty(size, moments) for key, size in builder.num_inputs.items()}
    if moments:
        clean_builder = TappingBuilder(clean.spec, source, keys, would.__setitem__)
        through = clean.half(clean_builder, index, half)
        narrow |= clean_builder.narrow
    first_held = len(walk.states) - walks.num_held
    for at, x_TC in enumerate(walk.states):
        hold = at >= first_held
        if moments:
            clean.states[at] = through(clean.states[at])
        _run_until_stopped(listen, x_TC)
    for stat in stats.values():
        stat.complete()
    return ObservedInputs(stats, held)


def observe_half(
    walk: HiddenStateWalk,
    weights: WeightSource,
    index: int,
    half: int,
    keys: Collection[str],
    moments: bool,
    num_held: int = 0,
) -> dict[ProductKey, InputStats]:
    """What the products with `keys` in half `half` of layer `index` read, without advancing.

    The last `num_held` windows are left out.
    """
    stats: dict[ProductKey, InputStats] = {}

    def add(key: ProductKey, x_TI: Tensor) -> None:
        if len(x_TI):
            stats[key].add(x_TI)

    builder = TappingBuilder(walk.spec, weights, keys, add, LAST)
    through = walk.half(builder, index, half)
    stats |= {key: InputStats.empty(size, moments) for key, size in builder.num_inputs.items()}
    for x_TC in walk.states[: len(walk.states) - num_held]:
        _run_until_stopped(through, x_TC)
    for stat in stats.values():
        stat.complete()
    return stats


def _run_until_stopped(block: Callable[[Tensor], Tensor], x_TC: Tensor) -> None:
    try:
        block(x_TC)
    except StopForward:
        return
