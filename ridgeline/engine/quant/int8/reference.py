"""The reference: every stage in float64, which represents each int32 exactly.

Slow, for any device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.engine.quant.int8.base import LARGEST


class ReferenceGemm:
    """The float64 reference behind `GemmKind`."""

    def __init__(self, q_OI: Tensor, scale_O: Tensor) -> None:
        self._q_OI, self._scale_O = q_OI.double(), scale_O.double()

    @staticmethod
    def refusal(device: torch.device, num_out: int, num_in: int) -> str | None:
        return None

    @staticmethod
    def pack(q_OI: Tensor, scale_O: Tensor) -> ReferenceGemm:
        return ReferenceGemm(q_OI, scale_O)

    def __call__(self, x_TI: Tensor) -> Tensor:
        top_T1 = x_TI.double().abs().amax(1, keepdim=True)
        scale_T1 = torch.where(top_T1 == 0, 1.0, top_T1) / LARGEST
        p_TI = (x_TI.double() / scale_T1).round()
        return (p_TI @ self._q_OI.T * self._scale_O * scale_T1).float()
