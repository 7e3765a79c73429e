"""INT8 weights with one scale per output, multiplied by Ridgeline's own kernel on every ISA.

What: weights and activations in INT8, products summed exactly in int32 (native/linear/linear.h). On AVX2
without VNNI the weights widen to int16 in L1, because the instruction that multiplies bytes
saturates at int16.

When it loses: nowhere measured so far on AVX2.

Shape legend: O outputs, I inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.engine.kernels.native_linear import NativeLinear, Packed, in_panels, pack_lines


def pack(q_OI: Tensor, scale_O: Tensor) -> Packed:
    """In the kernels' layout: q_OI int8 in [-127, 127]."""
    num_out, num_in = q_OI.shape
    factors = in_panels(scale_O.to(torch.float32))
    return Packed("int8", num_out, num_in, 0, pack_lines("int8", q_OI, 0), factors=factors)


class NativeInt8(NativeLinear):
    """y_TO = x_TI @ (q_OI · scale_O).T + bias_O, x quantised per row; the weight is packed once."""

    __slots__ = ()

    def __init__(self, q_OI: Tensor, scale_O: Tensor, bias_O: Tensor | None) -> None:
        super().__init__(pack(q_OI, scale_O), bias_O)
