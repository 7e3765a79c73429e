"""Rounds weights to 8 bits, symmetric, one scale per output row.

  full        scale = max|w| / 127. The least error.
  pair_safe   scale = max(max|w|, max|w_2j + w_2j+1|) / 127. No neighbours sum to over 128
              in magnitude, rounding included, hence 255 · 128 = 32,640 < 2^15: a kernel that adds
              the two products of a u8·s8 pair in 16 bits (x86 `vpmaddubsw`, all that AVX2 has)
              cannot saturate. On Gaussian rows it costs about 0.4 bit, where the usual "reduced
              range" of 7 bits costs a whole one; pairs of opposite signs cost nothing.

Shape suffixes: I inputs, O outputs.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ridgeline.engine.quant.int8.base import LARGEST

WeightRange = Literal["full", "pair_safe"]
_TINY = 1e-30  # the scale of a row of zeros


def quantise(weight_OI: Tensor, weight_range: WeightRange) -> tuple[Tensor, Tensor]:
    """Integers q_OI (int8) and scale_O (float32) with weight ≈ q · scale."""
    weight_OI = weight_OI.float()
    top_O = weight_OI.abs().amax(1)
    if weight_range == "pair_safe":
        top_O = torch.maximum(top_O, _largest_pair(weight_OI))
    scale_O = (top_O / LARGEST).clamp_(min=_TINY)
    q_OI = (weight_OI / scale_O.unsqueeze(1)).round_().clamp_(-LARGEST, LARGEST)
    return q_OI.to(torch.int8), scale_O


def _largest_pair(weight_OI: Tensor) -> Tensor:
    num_pairs = weight_OI.shape[1] // 2
    if num_pairs == 0:
        return weight_OI.new_zeros(len(weight_OI))
    even_OJ, odd_OJ = weight_OI[:, : 2 * num_pairs : 2], weight_OI[:, 1 : 2 * num_pairs : 2]
    return (even_OJ + odd_OJ).abs().amax(1)
