"""Walking through a model one block at a time: the calibration's hidden states, layer after layer.

Only one block's weights are in memory; the states of all windows are.

Shape legend: T tokens of a window, C hidden_size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch
import torch.nn.functional as F

from ridgeline.compress.statistics import Stats, Tap
from ridgeline.engine.attention.full import FullAttention
from ridgeline.engine.model.layers import Block
from ridgeline.engine.model.load import DecoderBuilder
from ridgeline.engine.model.names import Part
from ridgeline.engine.model.rope import RopeTables
from ridgeline.engine.model.weights import Weights
from ridgeline.engine.quant.base import Linear
from ridgeline.errors import BadModel
from ridgeline.spec.model import LinearSpec, ModelSpec

ProductKey = tuple[tuple[str, ...], int | None]
"""The keys of a product, and its expert."""


class TappingBuilder(DecoderBuilder):
    """Builds blocks whose linears note their inputs in `taps`."""

    def __init__(self, spec: ModelSpec, weights: Weights, moments: bool) -> None:
        super().__init__(spec, weights, torch.device("cpu"), torch.float32)
        self.taps: dict[ProductKey, Stats] = {}
        self._moments = moments

    def _linear(
        self, keys: list[str], specs: list[LinearSpec], layer: int | None, expert: int | None = None
    ) -> Linear:
        linear = super()._linear(keys, specs, layer, expert)
        stats = Stats.empty(specs[0].num_in, self._moments)
        self.taps[tuple(keys), expert] = stats
        return Tap(linear, stats)


class Walk:
    """Hidden states x_TC of every window, before the layer that is next."""

    def __init__(self, spec: ModelSpec, weights: Weights, windows: Sequence[Sequence[int]]) -> None:
        self._spec = spec
        self._ropes = list(dict.fromkeys(layer.attention.rope for layer in spec.layers))
        length = len(windows[0])
        embed_VC = weights.get(Part("embed", (spec.vocab_size, spec.hidden_size))).float()
        ids = [F.embedding(torch.tensor(tokens), embed_VC) for tokens in windows]
        self.states = [x_TC * spec.embed_scale for x_TC in ids]
        self._attend = FullAttention(spec, length, embed_VC)
        tables = RopeTables(self._ropes, length, torch.float32, torch.device("cpu"))
        self._turns = tables.at(torch.arange(length), length)

    def fork(self) -> Walk:
        """Another walk that starts where this one stands."""
        other = copy(self)
        other.states = list(self.states)
        return other

    def _block(self, builder: DecoderBuilder, index: int) -> Block:
        return builder.block(self._spec.layers[index], index, self._ropes)

    def watch(self, weights: Weights, index: int, moments: bool) -> dict[ProductKey, Stats]:
        """What the products of layer `index` read; the walk stays where it is."""
        builder = TappingBuilder(self._spec, weights, moments)
        block = self._block(builder, index)
        for x_TC in self.states:
            block(x_TC, self._turns, self._attend, index)
        return builder.taps

    def go(self, weights: Weights, index: int) -> None:
        """Through layer `index`. Raises BadModel where the states are no longer numbers."""
        builder = DecoderBuilder(self._spec, weights, torch.device("cpu"), torch.float32)
        block = self._block(builder, index)
        self.states = [block(x, self._turns, self._attend, index) for x in self.states]
        if not all(torch.isfinite(x_TC).all() for x_TC in self.states):
            raise BadModel(f"the calibration's activations overflow in layer {index}")
