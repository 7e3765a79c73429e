"""INT8 with outlier inputs kept in high precision: LLM.int8's mixed precision with a fixed choice.

A few input channels of a transformer are tens of times larger than the others, in every token.
Rounded with their row they leave few levels for the others (Dettmers et al., "LLM.int8()", NeurIPS
2022, arXiv 2208.07339). So those columns of the weight stay in 16 or 32 bits and are multiplied as
floats; the rest is INT8 weights times INT8 rows, scaled without them:

  y = s_x · (W₈ · round(x' / s_x)) + W_wide · x_wide        x': x, its outlier inputs 0

The paper looks for outliers in each batch. Here they are chosen when the model is quantised, from
calibration text (`ridgeline quantize --method llm-int8`): a row's result must not depend on its
batch, and the weight's columns must be available in full precision.

Invariant: a row's result is bitwise the same in any batch, on any number of threads and every ISA.

When it loses: models without outliers, where it is plain INT8; an outlier missed by calibration is
rounded with its row; layers run operator by operator (no native segments).

Shape suffixes: T rows, I inputs, O outputs, W inputs kept separate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.engine.kernels.native_linear import Kind, NativeLinear, Packed, pack_lines
from ridgeline.engine.quant.grid import Grid, pack, stack_grids
from ridgeline.engine.quant.packed import PackedLinear


@dataclass(frozen=True, slots=True)
class OutlierSplit:
    """A weight on an 8-bit grid except for the columns `columns_W`, stored in `wide_OW` (float32 or
    bfloat16).

    The grid is 0 in those columns.
    """

    grid: Grid
    columns_W: Tensor
    wide_OW: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        return self.grid.shape

    def dense(self) -> Tensor:
        """The weights, float32 [O, I]."""
        return self.grid.dense().index_copy_(1, self.columns_W, self.wide_OW.float())


class OutlierPacked(NamedTuple):
    """A split weight as the kernels read it: `wide` has the columns `columns_W` (int64)."""

    packed: Packed
    wide: Packed
    columns_W: Tensor


def pack_split(splits: Sequence[OutlierSplit]) -> OutlierPacked:
    """Splits with the same columns, outputs stacked."""
    first = splits[0]
    assert all(torch.equal(split.columns_W, first.columns_W) for split in splits)
    wide_OW = torch.cat([split.wide_OW for split in splits])
    kind: Kind = "bf16" if wide_OW.dtype == torch.bfloat16 else "fp32"
    lines = pack_lines(kind, wide_OW, 0)
    wide = Packed(kind, wide_OW.shape[0], wide_OW.shape[1], 0, lines)
    return OutlierPacked(pack(stack_grids([split.grid for split in splits])), wide, first.columns_W)


class OutlierLinear:
    """An INT8 linear with separate outlier columns; the bias is `inner`'s."""

    __slots__ = ("columns_W", "inner", "wide")

    def __init__(self, inner: PackedLinear, ready: OutlierPacked) -> None:
        self.inner, self.wide = inner, NativeLinear(ready.wide)
        self.columns_W = ready.columns_W

    def __call__(self, x_TI: Tensor) -> Tensor:
        wide_TW = x_TI.index_select(-1, self.columns_W).float()
        y_TO = self.inner(x_TI.index_fill(-1, self.columns_W, 0.0))
        return y_TO.add_(self.wide(wide_TW).to(y_TO.dtype))

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes + self.wide.nbytes + self.columns_W.nbytes
