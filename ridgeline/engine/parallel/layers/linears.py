"""Linears, tables and heads of which a rank holds a part.

    columns   outputs are split: every rank multiplies with its rows of W; nothing is exchanged
    rows      inputs are split: the partial products are summed over the ranks
    vocabulary  the embedding's rows and the LM head's outputs

Source. Shoeybi et al., "Megatron-LM" (arXiv:1909.08053), section 3.

Invariants. A partial sum has the bits of the same product computed alone, and parts are added in
the order of ranks. With INT8 weights the parts are integers, rows are rounded with the scale of the
whole row, and the result has the bits of one process.

When it loses. Every sum waits for the slowest rank and costs a message per layer and branch.

Shape legend: T rows, I inputs of this rank, O outputs, S rows of a head, C hidden_size, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ridgeline.engine.kernels.native_linear import NativeLinear, Packed, pack_lines
from ridgeline.engine.model.table import EmbeddingTable
from ridgeline.engine.parallel.exchange.base import (
    Collectives,
    GroupCollectives,
    merge_disjoint,
)
from ridgeline.engine.parallel.layers.rows import RowSums
from ridgeline.engine.quant.base import Linear
from ridgeline.engine.quant.int8.base import LARGEST
from ridgeline.modelspec.shard import Span

EXACT_INPUTS = 1024
"""127 · 127 · this many is below 2^24: such a sum of integers is exact in float32."""


class RowParallelLinear:
    """The sum over ranks of `inner`'s products, plus the bias (which `inner` does not have)."""

    __slots__ = ("_sums", "bias_O", "inner")

    def __init__(self, inner: Linear, bias_O: Tensor | None, sums: RowSums) -> None:
        self.inner, self.bias_O, self._sums = inner, bias_O, sums

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self.complete(self.inner(x_TI))

    def complete(self, part_TO: Tensor) -> Tensor:
        """The result of this rank's product and those of the others."""
        y_TO = self._sums.floats(part_TO)
        return y_TO if self.bias_O is None else y_TO.add_(self.bias_O)

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes + (0 if self.bias_O is None else self.bias_O.nbytes)


class RowParallelInt8:
    """y = (Σ over ranks of integer products) · scale of the row · scale of the output (+ bias).

    `q_OI` are this rank's columns of the weight as the whole row was rounded, `scale_O` the scales
    of the outputs.
    """

    __slots__ = ("_bias_O", "_dtype", "_group", "_pieces", "_scale_O", "_sums", "nbytes")

    def __init__(
        self,
        q_OI: Tensor,
        scale_O: Tensor,
        bias_O: Tensor | None,
        group: GroupCollectives,
        sums: RowSums,
        dtype: torch.dtype,
    ) -> None:
        self._group, self._sums, self._dtype = group, sums, dtype
        self._scale_O = scale_O.float()
        self._bias_O = None if bias_O is None else bias_O.float()
        starts = range(0, q_OI.shape[1], EXACT_INPUTS)
        self._pieces = [
            (start, _integer_product(q_OI[:, start : start + EXACT_INPUTS])) for start in starts
        ]
        self.nbytes = q_OI.nbytes + self._scale_O.nbytes
        self.nbytes += 0 if self._bias_O is None else self._bias_O.nbytes

    def __call__(self, x_TI: Tensor) -> Tensor:
        if not len(x_TI):
            return x_TI.new_empty(0, len(self._scale_O), dtype=self._dtype)
        x_TI = x_TI.float()
        top_T1 = self._group.maximum(x_TI.abs().amax(1, keepdim=True))
        # Tensor by tensor, as the kernels divide: torch computes scalar / tensor as a reciprocal
        # and a product, which rounds twice and moved one row in some hundreds to another code.
        inverse_T1 = torch.where(top_T1 > 0, top_T1.new_tensor(LARGEST) / top_T1, 0.0)
        p_TI = (x_TI * inverse_T1).round_()
        total_TO = torch.zeros((len(x_TI), len(self._scale_O)), dtype=torch.int32)
        for start, multiply in self._pieces:
            total_TO += multiply(p_TI[:, start : start + EXACT_INPUTS], 1.0).to(torch.int32)
        total_TO = self._sums.integers(total_TO)
        y_TO = total_TO.float() * ((self._sums.own(top_T1) / LARGEST) * self._scale_O)
        if self._bias_O is not None:
            y_TO += self._bias_O
        return y_TO.to(self._dtype)


def _integer_product(q_OI: Tensor) -> Callable[[Tensor, float], Tensor]:
    q_OI = q_OI.contiguous()
    num_out, num_in = q_OI.shape
    padded = -(-num_out // 16) * 16
    ones = torch.ones(padded)
    packed = Packed("int8", num_out, num_in, 0, pack_lines("int8", q_OI, 0), factors=ones)
    return NativeLinear(packed)


class VocabularyTable:
    """The embedding table, of which each place of the first stage has the rows `own`."""

    __slots__ = ("_collectives", "inner", "own")

    def __init__(self, inner: EmbeddingTable, own: Span, collectives: Collectives) -> None:
        self.inner, self.own, self._collectives = inner, own, collectives

    def rows(self, tokens_T: Tensor) -> Tensor:
        local_T = tokens_T - self.own.start
        is_mine_T = (local_T >= 0) & (local_T < len(self.own))
        x_TC = self.inner.rows(local_T.clamp(0, max(0, len(self.own) - 1)))
        x_TC = x_TC.masked_fill(~is_mine_T.unsqueeze(-1), 0.0)
        return merge_disjoint(self._collectives, x_TC)

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes

    @property
    def device(self) -> torch.device:
        return self.inner.device


class VocabularyHead:
    """The LM head on rank 0: its own outputs and those of the other places, side by side.

    `announce` tells the other ranks of the stage how many rows follow.
    """

    def __init__(
        self,
        inner: Linear,
        widths: Sequence[int],
        collectives: Collectives,
        announce: Callable[[int], None],
    ) -> None:
        self.inner, self._widths = inner, tuple(widths)
        self._collectives, self._announce = collectives, announce

    def __call__(self, x_TI: Tensor) -> Tensor:
        self._announce(len(x_TI))
        return head_logits(self.inner, x_TI.contiguous(), self._widths, self._collectives)

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes


def head_logits(
    inner: Linear, x_SC: Tensor, widths: Sequence[int], collectives: Collectives
) -> Tensor:
    """Every place's part of the logits of place 0's rows; logits_SV at place 0.

    Elsewhere `x_SC` only has the shape and the dtype.
    """
    return collectives.gather_columns(inner(collectives.broadcast(x_SC)), widths)


class SummedMlp:
    """A feed-forward layer of which each rank computes a part; the parts are added."""

    __slots__ = ("_sums", "inner")

    def __init__(self, inner: Callable[[Tensor], Tensor], sums: RowSums) -> None:
        self.inner, self._sums = inner, sums

    def __call__(self, x_TC: Tensor) -> Tensor:
        return self._sums.floats(self.inner(x_TC))
