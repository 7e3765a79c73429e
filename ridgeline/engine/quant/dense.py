"""The dense linear: weights in the compute dtype, multiplied by the device's own GEMM.

The baseline of the family and the reference of every other kind. It loses where weights do not fit
in cache and the batch is small: each step then reads all of them, 2 or 4 bytes each.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.modelspec.model import LinearSpec


class DenseLinear:
    """y_TO = x_TI @ weight_OI.T (+ bias_O)."""

    __slots__ = ("bias_O", "weight_OI")

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self.weight_OI, self.bias_O = weight_OI, bias_O

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
        return F.linear(x_TI, self.weight_OI, self.bias_O)

    @property
    def nbytes(self) -> int:
        return self.weight_OI.nbytes + (0 if self.bias_O is None else self.bias_O.nbytes)
