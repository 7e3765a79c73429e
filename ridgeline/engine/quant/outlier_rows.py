"""INT8 whose outlying activations are found as they come: bitsandbytes' LLM.int8, row by row.

What: a checkpoint of bitsandbytes has every weight in 8 bits with a scale per row, and names a
threshold (6). Inputs of a row that reach it in magnitude are taken out before the row's scale is
chosen, and meet the weights of their columns, as their 8 bits mean them, as floats:

    y = s_x · (W₈ · round(x' / s_x)) + Σ_i x_i · W₈[:, i]    |x_i| >= threshold; x': x, those 0

Source: Dettmers et al., "LLM.int8()" (NeurIPS 2022, arXiv 2208.07339); bitsandbytes'
`int8_vectorwise_quant` and `int8_mixed_scaled_mm`. There a column that holds an outlier of any row
of a batch is multiplied in 16 bits for all of them, so that an answer changes with its neighbours;
here each row has its own columns, which is bitsandbytes' own result for a batch of one, its floats
of 16 bits replaced by 32.

Invariant: a row's result is bitwise the same in any batch, on any number of threads and every ISA
(an input that is 0 adds exactly nothing to a sum of fused multiply-adds).

When it loses: inputs that nearly all reach the threshold (a gated product's often do), whose
product is then done twice; many rows whose outliers lie in different columns. Against
`ridgeline quantize --method llm-int8`: the columns' weights have been rounded to 8 bits with their
row, and they are unpacked in every step. Layers run operator by operator (no native segments).

Shape legend: T rows, I inputs, O outputs, W inputs that are outliers of some row, P panels of
16 outputs, L lines of 4 inputs.
"""

from __future__ import annotations

from torch import Tensor

from ridgeline.engine.kernels.native_linear import PANEL, NativeLinear, Packed
from ridgeline.engine.quant.packed import PackedLinear

_INPUTS = 4  # of a line of int8 weights (native/linear/linear.h)


class OutlierRowsLinear:
    """See the module's head; the bias is `inner`'s."""

    __slots__ = ("inner", "threshold")

    def __init__(self, inner: PackedLinear, threshold: float) -> None:
        assert inner.native.packed.kind == "int8" and threshold > 0
        self.inner, self.threshold = inner, threshold

    def __call__(self, x_TI: Tensor) -> Tensor:
        loud_TI = x_TI.abs() >= self.threshold
        columns_W = loud_TI.any(0).nonzero().squeeze(1)
        if not len(columns_W):
            return self.inner(x_TI)
        y_TO = self.inner(x_TI.masked_fill(loud_TI, 0.0))
        wide_TI = x_TI.float().where(loud_TI, 0.0)
        wide = NativeLinear.from_floats(columns(self.inner.native.packed, columns_W))
        return y_TO.add_(wide(wide_TI.index_select(1, columns_W)).to(y_TO.dtype))

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes


def columns(packed: Packed, columns_W: Tensor) -> Tensor:
    """What columns of an int8 weight mean, [O, W]."""
    assert packed.kind == "int8" and packed.factors is not None
    num_panels = -(-packed.num_out // PANEL)
    lines_PLOI = packed.lines.view(num_panels, -1, PANEL, _INPUTS)
    bytes_WPO = lines_PLOI[:, columns_W // _INPUTS, :, columns_W % _INPUTS]
    q_OW = bytes_WPO.flatten(1).T.float() - 128
    return (q_OW * packed.factors.unsqueeze(1))[: packed.num_out]
