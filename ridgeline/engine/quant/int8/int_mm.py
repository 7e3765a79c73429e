"""`torch._int_mm`: s8·s8 into int32. Exact everywhere; the INT8 path of CUDA (cuBLASLt).

When it loses: on CPUs without AVX-512 it is scalar, a hundred times slower than the others. On CUDA
it requires more than 16 rows, so a single row is computed as 32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.engine.quant.int8.base import Gemm, RowScaled

_CUDA_MIN_ROWS = 32
_CUDA_MULTIPLE = 8


class IntMmGemm:
    """`torch._int_mm` behind `GemmKind`; called with integers by `RowScaled`."""

    def __init__(self, q_OI: Tensor, scale_O: Tensor) -> None:
        self._q_IO, self._scale_O = q_OI.t(), scale_O
        self._min_rows = _CUDA_MIN_ROWS if q_OI.is_cuda else 1

    @staticmethod
    def refusal(device: torch.device, num_out: int, num_in: int) -> str | None:
        if device.type not in ("cpu", "cuda"):
            return "needs a CPU or CUDA"
        if device.type == "cuda" and (num_out % _CUDA_MULTIPLE or num_in % _CUDA_MULTIPLE):
            return f"needs sizes that are multiples of {_CUDA_MULTIPLE} on CUDA"
        return None

    @staticmethod
    def pack(q_OI: Tensor, scale_O: Tensor) -> Gemm:
        return RowScaled(IntMmGemm(q_OI.contiguous(), scale_O))

    def __call__(self, x_TI: Tensor) -> Tensor:
        p_TI = x_TI.to(torch.int8)
        missing = self._min_rows - len(p_TI)
        if missing > 0:
            p_TI = F.pad(p_TI, (0, 0, 0, missing))
        return torch._int_mm(p_TI, self._q_IO)[: len(x_TI)] * self._scale_O
