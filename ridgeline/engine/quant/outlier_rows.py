"""INT8 with outlier activations detected at run time: bitsandbytes' LLM.int8, row by row.

A bitsandbytes checkpoint stores every weight in 8 bits with a scale per row and names a threshold
(6). Inputs of a row that reach it in magnitude are removed before the row's scale is chosen, and
multiply their columns' dequantised weights as floats:

  y = s_x · (W₈ · round(x' / s_x)) + Σ_i x_i · W₈[:, i]    |x_i| >= threshold; x': x, those 0

Source: Dettmers et al., "LLM.int8()" (NeurIPS 2022, arXiv 2208.07339); bitsandbytes'
`int8_vectorwise_quant` and `int8_mixed_scaled_mm`. There a column with an outlier in any row of a
batch is multiplied in 16 bits for all rows, so a response depends on its batch; here each row has
its own columns, which equals bitsandbytes' result for a batch of one with 32-bit instead of 16-bit
floats.

Invariant: a row's result is bitwise the same in any batch, on any number of threads and every ISA
(a zero input adds exactly nothing to a sum of fused multiply-adds).

When it loses: inputs that nearly all reach the threshold (a gated product's often do), whose
product is then computed twice; many rows with outliers in different columns. Compared with
`ridgeline quantize --method llm-int8`: the columns' weights were rounded to 8 bits, and they are
unpacked in every step. Layers run operator by operator (no native segments).

Shape suffixes: T rows, I inputs, O outputs, W inputs that are outliers of some row, P panels of 16
outputs, L lines of 4 inputs.
"""

from __future__ import annotations

from torch import Tensor

from ridgeline.engine.kernels.native_linear import PANEL, NativeLinear, Packed
from ridgeline.engine.quant.packed import PackedLinear

_INPUTS = 4  # of a line of int8 weights (native/linear/linear.h)


class OutlierRowsLinear:
    """An INT8 linear with outliers detected per row; the bias is `inner`'s."""

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
    """Dequantised columns of an int8 weight, [O, W]."""
    assert packed.kind == "int8" and packed.factors is not None
    num_panels = -(-packed.num_out // PANEL)
    lines_PLOI = packed.lines.view(num_panels, -1, PANEL, _INPUTS)
    bytes_WPO = lines_PLOI[:, columns_W // _INPUTS, :, columns_W % _INPUTS]
    q_OW = bytes_WPO.flatten(1).T.float() - 128
    return (q_OW * packed.factors.unsqueeze(1))[: packed.num_out]
