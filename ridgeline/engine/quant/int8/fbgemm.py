"""FBGEMM's u8·s8 kernel: AVX2, AVX-512 and VNNI variants, weights packed once.

`quantized::linear_with_input_q_dq_qweight_dq_output_fp32` rounds its input with a scale and zero-
point given by the caller: 1 and 128, so rows keep their own scales. Source: PyTorch,
aten/src/ATen/native/quantized/cpu/qlinear.cpp; Khudia et al., "FBGEMM" (2021).

On a 2-core AVX2 machine (Zen 3) a 2048×2048 layer took about 0.4 times fp32's time at one row and
half of it at 64 rows and more. When it loses: on AVX2 it saturates with full-range weights (hence
pair-safe ones).
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from ridgeline.engine.quant.int8.base import Gemm, RowScaled


class FbgemmGemm:
    """FBGEMM behind `GemmKind`; called with integers by `RowScaled`."""

    def __init__(self, packed: object) -> None:
        self._packed = packed
        self._op = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32

    @staticmethod
    def refusal(device: torch.device, num_out: int, num_in: int) -> str | None:
        if device.type != "cpu":
            return "needs a CPU"
        if "fbgemm" not in torch.backends.quantized.supported_engines:
            return "this PyTorch was built without FBGEMM"
        if not hasattr(torch.ops.quantized, "linear_with_input_q_dq_qweight_dq_output_fp32"):
            return "this PyTorch lacks the linear with a given activation scale"
        return None

    @staticmethod
    def pack(q_OI: Tensor, scale_O: Tensor) -> Gemm:
        with warnings.catch_warnings():
            # torch announces that it will drop quantised tensors; `refusal` covers that day.
            warnings.simplefilter("ignore", UserWarning)
            weight = torch._make_per_channel_quantized_tensor(
                q_OI, scale_O.double(), torch.zeros(len(q_OI), dtype=torch.int64), 0
            )
        engines = torch.backends.quantized
        before = engines.engine
        try:
            engines.engine = "fbgemm"  # who packs is a global of torch; who multiplies is not
            return RowScaled(FbgemmGemm(torch.ops.quantized.linear_prepack(weight, None)))
        finally:
            engines.engine = before

    def __call__(self, x_TI: Tensor) -> Tensor:
        y_TO: Tensor = self._op(x_TI, 1.0, 128, self._packed)
        return y_TO
