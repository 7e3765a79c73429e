"""INT8 on CUDA: rows are rounded in one pass, and multiplied by the kernel for their number.

Few rows stream the weights (Ridgeline's Triton kernel, or `torch._int_mm` without it), many take
cuBLASLt's tensor cores through `torch._int_mm`. Sums are exact in int32 either way.

When it loses: activations with strong outliers, as everywhere with one scale per row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.engine.kernels.scaled_products import multiply, quantise_rows, why_not
from ridgeline.engine.quant.int8.base import Gemm


class ScaledGemm:
    """8-bit rows times 8-bit weights behind `GemmKind`; takes and returns any float dtype."""

    def __init__(self, q_OI: Tensor, scale_O: Tensor) -> None:
        self._q_OI, self._scale_O = q_OI, scale_O

    @staticmethod
    def refusal(device: torch.device, num_out: int, num_in: int) -> str | None:
        return why_not(num_out, num_in, device)

    @staticmethod
    def pack(q_OI: Tensor, scale_O: Tensor) -> Gemm:
        return ScaledGemm(q_OI.contiguous(), scale_O)

    def __call__(self, x_TI: Tensor) -> Tensor:
        p_TI, scale_T1 = quantise_rows(x_TI, "int8")
        return multiply(p_TI, scale_T1, self._q_OI, self._scale_O, None, x_TI.dtype)
