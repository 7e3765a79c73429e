"""The dense linear: weights in the compute dtype, multiplied by the device's own GEMM.

A product of a few rows with many outputs is faster in Ridgeline's Triton kernel: on an H200, one
row with a [28672, 4096] weight took 59.9 us there and 64.1 us in cuBLAS. Smaller weights and more
rows are cuBLAS's.

The baseline of the family and the reference of every other kind. It loses where weights do not fit
in cache and the batch is small: each step then reads all of them, 2 or 4 bytes each.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.engine.kernels.triton import load, why_not
from ridgeline.modelspec.model import LinearSpec

FEW_ROWS, WIDE = 8, 16_384
"""On a GPU, Ridgeline's kernel multiplies up to this many rows with at least this many outputs."""


class DenseLinear:
    """y_TO = x_TI @ weight_OI.T (+ bias_O)."""

    __slots__ = ("bias_O", "streams", "weight_OI")

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self.weight_OI, self.bias_O = weight_OI, bias_O
        self.streams = (
            weight_OI.is_cuda
            and weight_OI.dtype in (torch.bfloat16, torch.float16)
            and len(weight_OI) >= WIDE
            and not why_not(weight_OI.device)
        )

    @staticmethod
    def build(
        spec: LinearSpec,
        weight_ON: Tensor,
        bias_O: Tensor | None,
        device: torch.device,
        compute_dtype: torch.dtype,
    ) -> DenseLinear:
        weight = weight_ON.to(device=device, dtype=compute_dtype).contiguous()
        bias = None if bias_O is None else bias_O.to(device=device, dtype=compute_dtype)
        return DenseLinear(weight, bias)

    def __call__(self, x_TI: Tensor) -> Tensor:
        if self.streams and 0 < len(x_TI) <= FEW_ROWS:
            streamed_TO: Tensor = load("linear").w16a16(x_TI, self.weight_OI, self.bias_O)
            return streamed_TO
        return F.linear(x_TI, self.weight_OI, self.bias_O)

    @property
    def nbytes(self) -> int:
        return self.weight_OI.nbytes + (0 if self.bias_O is None else self.bias_O.nbytes)
