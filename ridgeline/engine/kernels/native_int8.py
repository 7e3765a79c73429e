"""INT8 weights with one scale per output, multiplied by Ridgeline's own kernel on every ISA.

Weights and activations are INT8, and products are summed exactly in int32
(native/linear/linear.h). On AVX2 without VNNI, weights are widened to int16, because the
instruction that multiplies bytes saturates at int16.

Shape legend: O outputs, I inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.engine.kernels.native_linear import NativeLinear, Packed, in_panels, pack_lines


def pack(q_OI: Tensor, scale_O: Tensor) -> Packed:
    """Pack q_OI, int8 in [-127, 127], in the kernels' layout."""
    num_out, num_in = q_OI.shape
    factors = in_panels(scale_O.to(torch.float32))
    return Packed("int8", num_out, num_in, 0, pack_lines("int8", q_OI, 0), factors=factors)


class NativeInt8(NativeLinear):
    """y_TO = x_TI @ (q_OI · scale_O).T + bias_O, with x quantised per row."""

    __slots__ = ()

    def __init__(self, q_OI: Tensor, scale_O: Tensor, bias_O: Tensor | None) -> None:
        super().__init__(pack(q_OI, scale_O), bias_O)
