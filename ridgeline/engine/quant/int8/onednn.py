"""oneDNN's quantised linear: VNNI and AMX if the CPU has them.

`onednn::qlinear_pointwise` with u8 activations (integers + 128, zero-point 128, scale 1). Signed
activations would use its reference kernel, hundreds of times slower. Source: PyTorch,
aten/src/ATen/native/quantized/cpu/qlinear.cpp; oneDNN's "Nuances of int8 computations".

When it loses: on AVX2 it saturates with full-range weights, and with few rows it is 4 to 6 times
slower than FBGEMM.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.engine.quant.int8.base import Gemm, RowScaled


class OnednnGemm:
    """oneDNN behind `GemmKind`; called with integers by `RowScaled`."""

    def __init__(self, packed: Tensor, scale_O: Tensor) -> None:
        self._packed, self._scale_O = packed, scale_O
        self._zero_O = torch.zeros(len(scale_O), dtype=torch.int64)
        self._op = torch.ops.onednn.qlinear_pointwise.default

    @staticmethod
    def refusal(device: torch.device, num_out: int, num_in: int) -> str | None:
        if device.type != "cpu":
            return "needs a CPU"
        if not torch.backends.mkldnn.is_available():
            return "this PyTorch was built without oneDNN"
        if not hasattr(torch.ops.onednn, "qlinear_pointwise"):
            return "this PyTorch lacks onednn::qlinear_pointwise"
        return None

    @staticmethod
    def pack(q_OI: Tensor, scale_O: Tensor) -> Gemm:
        return RowScaled(OnednnGemm(torch.ops.onednn.qlinear_prepack(q_OI, None), scale_O))

    def __call__(self, x_TI: Tensor) -> Tensor:
        x_u8_TI = (x_TI + 128).to(torch.uint8)
        scales = self._packed, self._scale_O, self._zero_O, None, 1.0, 0
        y_TO: Tensor = self._op(x_u8_TI, 1.0, 128, *scales, torch.float32, "none", [], "")
        return y_TO
