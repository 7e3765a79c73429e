"""INT8 linear by Ridgeline's own CPU kernel: exact int32 sums on every ISA, with or without VNNI.

What: weights and activations in INT8, products summed in int32 (native/int8_linear.h). On AVX2 the
weights widen to int16 in registers, because the instruction that multiplies bytes saturates.

Invariant: a row's result is bitwise the same in any batch and on any number of threads (integer
sums are exact, and the scales are applied per row).

When it loses: on a CPU with VNNI, where torch's kernels multiply bytes in one instruction.

Shape legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

import ridgeline._native as _native

ISA_VARIABLE = "RIDGELINE_NATIVE_ISA"  # forces a kernel variant: auto, portable, avx2, avx512


class NativeInt8:
    """y_TO = x_TI @ (q_OI · scale_O).T + bias_O, x quantised per row; the weight is packed once."""

    def __init__(self, q_OI: Tensor, scale_O: Tensor, bias_O: Tensor | None) -> None:
        assert q_OI.dtype == torch.int8 and q_OI.is_contiguous()
        scale_O = scale_O.to(torch.float32).contiguous()
        bias_O = None if bias_O is None else bias_O.to(torch.float32).contiguous()
        self.num_out, self.num_in = q_OI.shape
        self._weight = _native.Int8Weight(
            q_OI.data_ptr(),
            scale_O.data_ptr(),
            0 if bias_O is None else bias_O.data_ptr(),
            self.num_out,
            self.num_in,
        )
        self._isa = os.environ.get(ISA_VARIABLE, "auto")
        self._num_threads = torch.get_num_threads()

    def __call__(self, x_TI: Tensor, row_scale: float = 0.0) -> Tensor:
        """y_TO; activations are round(x / row_scale); 0: by each row's own max|x| / 127."""
        assert x_TI.dtype == torch.float32 and x_TI.shape[-1] == self.num_in
        if x_TI.stride(-1) != 1:
            x_TI = x_TI.contiguous()
        out_TO = torch.empty((x_TI.shape[0], self.num_out), dtype=torch.float32)
        _native.linear_int8(
            self._weight,
            x_TI.data_ptr(),
            x_TI.stride(0),
            x_TI.shape[0],
            out_TO.data_ptr(),
            row_scale,
            self._num_threads,
            self._isa,
        )
        return out_TO

    @property
    def nbytes(self) -> int:
        return int(self._weight.nbytes)
