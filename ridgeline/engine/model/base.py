"""The contract of the layer backends: everything around attention in a decoder.

A `LayerForward` is built once from the loaded parts (`DecoderBody`). Each step it takes the tokens
with their positions and the step's attention, and returns the final hidden states.

Invariants, checked by `tests/conformance/test_forward.py`:

1. x_TC equals that of `torch_ops.TorchForward` up to rounding (the inputs of quantised products are
   rounded to int8, so a difference in the last bit of a norm may move one of them).
2. Row t depends on its own token, its position and its attention output, and on nothing else.
3. Attention is called once per layer, in order, with q_THD and kv_T2KD that stay valid until the
   next call. Its result is read before that.

Shape legend: T tokens of the step, C hidden_size, V vocabulary, H query heads, K key heads,
D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ridgeline.engine.attention.base import Attend
from ridgeline.engine.model.layer_inputs import HiddenStreams, LayerInputs
from ridgeline.engine.model.layers import Block, Norm
from ridgeline.engine.model.rope import RopeTables
from ridgeline.engine.model.table import EmbeddingTable
from ridgeline.modelspec.format import Format
from ridgeline.modelspec.model import ModelSpec


@dataclass(frozen=True)
class DecoderBody:
    """A decoder without its LM head.

    `dtype` is the compute dtype; rows of `table` may be narrower. `inputs` and `streams` are None
    in models whose layers have no inputs, and one hidden state.
    """

    spec: ModelSpec
    table: EmbeddingTable
    embed_scale: float
    blocks: tuple[Block, ...]
    norm: Norm
    ropes: RopeTables
    dtype: torch.dtype
    inputs: LayerInputs | None = None
    streams: HiddenStreams | None = None


class LayerForward(Protocol):
    """One step through all layers."""

    def __call__(self, tokens_T: Tensor, positions_T: Tensor, end: int, attend: Attend) -> Tensor:
        """Normalised last hidden states x_TC; `end` is larger than every position."""
        ...


class LayerBackend(Protocol):
    """A registered class: states why it cannot run, or is built into a `LayerForward`."""

    @staticmethod
    def why_not(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> Sequence[str]:
        """Reasons why it cannot run this model on the device; empty if it can."""
        ...

    @staticmethod
    def storage_format(format: Format) -> Format:
        """The storage format it needs for a weight of `format`: the same values, reordered."""
        ...

    def __call__(self, body: DecoderBody) -> LayerForward: ...
