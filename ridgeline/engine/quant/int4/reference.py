"""The reference: rows rounded per group, products and sums in float64. Slow, for any device."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.engine.quant.int4.quantise import Int4Weights

MOST = 120
"""The largest whole number of a row: room is left for a nibble (native/linear/int4_winograd.h)."""


def rounded_rows(x_TI: Tensor, group_size: int) -> Tensor:
    """Dequantised int8 rows with a scale per group of inputs, float64 [T, I]."""
    num_in = x_TI.shape[1]
    x_TGJ = torch.nn.functional.pad(x_TI, (0, -num_in % group_size)).view(
        len(x_TI), -(-num_in // group_size), group_size
    )
    top_TG1 = x_TGJ.abs().amax(2, keepdim=True).clamp(min=1e-30)
    whole_TGJ = (x_TGJ * (MOST / top_TG1)).round()
    return (whole_TGJ.double() * (top_TG1 / MOST).double()).flatten(1)[:, :num_in]


def multiply(weights: Int4Weights, x_TI: Tensor, group_size: int) -> Tensor:
    """y_TO in float64."""
    return rounded_rows(x_TI, group_size) @ weights.dense(group_size).double().T
