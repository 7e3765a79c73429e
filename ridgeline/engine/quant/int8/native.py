"""Ridgeline's own kernel: scales, rounding and product in one call (native/linear/linear.h).

What: bytes multiplied by tiles (AMX) or with `vpdpbusd` where the CPU has them; elsewhere widened
and multiplied with `pmaddwd`, which adds pairs in 32 bits. Exact with full-range weights on every
x86, with nothing element-wise left to PyTorch.

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
    """See `base.GemmKind`; the kernel's object is the gemm."""

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
