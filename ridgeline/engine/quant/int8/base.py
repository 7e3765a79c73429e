"""The interface of the kernels below an INT8 linear.

A gemm holds integer weights q_OI with a scale per output and computes for each row of x

  t = max|x| / 127        p_I = round(x_I / t)        y_O = (Σ_I p_I · q_OI) · t · scale_O

with the sum over I exact. float32 in and out. `exact.py` verifies it.

Shape suffixes: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

LARGEST = 127
_TINY = 1e-30  # the scale of a row of zeros


class Gemm(Protocol):
    """Packed weights, ready to multiply; `x_TI` is float32, on the device, with T >= 1."""

    def __call__(self, x_TI: Tensor) -> Tensor: ...


class GemmKind(Protocol):
    """One way to multiply. The registry (`choose.GEMMS`) names the classes."""

    @staticmethod
    def refusal(device: torch.device, num_out: int, num_in: int) -> str | None:
        """Why it cannot be used for this shape on this device, or None."""
        ...

    @staticmethod
    def pack(q_OI: Tensor, scale_O: Tensor) -> Gemm:
        """Pack int8 weights in [-127, 127] and float32 scales on the device."""
        ...


class RowScaled:
    """Adds scaling around a kernel that multiplies integers only: six element-wise calls more.

    `multiply` receives p_TI as float32 and returns y_TO / t.
    """

    def __init__(self, multiply: Callable[[Tensor], Tensor]) -> None:
        self._multiply = multiply

    def __call__(self, x_TI: Tensor) -> Tensor:
        scale_T1 = x_TI.abs().amax(1, keepdim=True).clamp_(min=_TINY).div_(LARGEST)
        return self._multiply((x_TI / scale_T1).round_()).mul_(scale_T1)
