"""The linear of 8-bit weights and rows with a scale each: FP8 anywhere, INT8 on a GPU.

Shape legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.engine.kernels.scaled_products import Kind, multiply, quantise_rows, quantise_weight


class ScaledLinear:
    """y_TO = W x_TI (+ bias_O); `kind` is that of the weights, and of the rows it multiplies."""

    __slots__ = ("bias_O", "dtype", "kind", "q_OI", "scale_O")

    def __init__(
        self, weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype, kind: Kind
    ) -> None:
        self.q_OI, self.scale_O = quantise_weight(weight_OI, kind)
        self.bias_O = None if bias_O is None else bias_O.to(weight_OI.device, dtype)
        self.dtype, self.kind = dtype, kind

    def __call__(self, x_TI: Tensor) -> Tensor:
        if not len(x_TI):
            return x_TI.new_empty(0, len(self.q_OI), dtype=self.dtype)
        return self.multiply_rounded(*quantise_rows(x_TI, self.kind))

    def multiply_rounded(self, p_TI: Tensor, scale_T1: Tensor) -> Tensor:
        """The same of rows that are rounded already."""
        return multiply(p_TI, scale_T1, self.q_OI, self.scale_O, self.bias_O, self.dtype)

    @property
    def nbytes(self) -> int:
        bias = 0 if self.bias_O is None else self.bias_O.nbytes
        return self.q_OI.nbytes + self.scale_O.nbytes + bias
