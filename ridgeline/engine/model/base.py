"""What surrounds attention in a decoder, for one step: the family's contract.

A forward is built once over the loaded pieces (`DecoderBody`). Each step it takes the tokens with their
positions and the step's attention, and gives the last hidden states.

Invariants, checked by `tests/conformance/test_forward.py`:

1. x_TC equals that of `torch_ops.TorchForward` up to rounding (activations are rounded to int8 on
   the way into quantised products: a difference in the last bit of a norm may move one of them).
2. Row t depends on its own token, its position and what attention gave it, and on nothing else.
3. Attention is called once per layer, in order, with q_THD and kv_T2KD that stay valid until the
   next call; what it gives back is read before that.

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
from ridgeline.engine.model.layers import Block, Norm
from ridgeline.engine.model.rope import RopeTables
from ridgeline.engine.model.table import EmbeddingTable
from ridgeline.modelspec.format import Format
from ridgeline.modelspec.model import ModelSpec


@dataclass(frozen=True)
class DecoderBody:
    """A decoder without its head. Rows of `table` may be narrower than `dtype`, which is computed
    in."""

    spec: ModelSpec
    table: EmbeddingTable
    embed_scale: float
    blocks: tuple[Block, ...]
    norm: Norm
    ropes: RopeTables
    dtype: torch.dtype


class LayerForward(Protocol):
    """One step through all layers."""

    def __call__(self, tokens_T: Tensor, positions_T: Tensor, end: int, attend: Attend) -> Tensor:
        """Normalised last hidden states x_TC; `end` is larger than every position."""
        ...


class LayerBackend(Protocol):
    """What the registry names: a class that can say why not, and be built."""

    @staticmethod
    def why_not(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> Sequence[str]:
        """Reasons why it cannot run this model there; empty where it can."""
        ...

    @staticmethod
    def storage_format(format: Format) -> Format:
        """The format in which it wants a weight of `format`: the same numbers, perhaps in order."""
        ...

    def __call__(self, body: DecoderBody) -> LayerForward: ...
