"""Ridgeline's own INT8 kernel: scales, rounding and product in one call (native/linear/linear.h).

Bytes are multiplied by tiles (AMX) or with `vpdpbusd` if the CPU has them, else widened and
multiplied with `pmaddwd`, which adds pairs in 32 bits. Exact with full-range weights on every x86,
without element-wise work in PyTorch.

When it loses: many rows on a CPU without VNNI, against FBGEMM.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ridgeline.engine.quant.int8.base import Gemm


class NativeGemm:
    """Ridgeline's kernel behind `GemmKind`."""

    @staticmethod
    def refusal(device: torch.device, num_out: int, num_in: int) -> str | None:
        if device.type != "cpu":
            return "needs a CPU"
        if find_spec("ridgeline._native") is None:
            return "the native module is not built"
        return None

    @staticmethod
    def pack(q_OI: Tensor, scale_O: Tensor) -> Gemm:
        from ridgeline.engine.kernels.native_int8 import NativeInt8

        return NativeInt8(q_OI.contiguous(), scale_O, None)
