"""Rounding weights to 4 bits in groups: to the nearest, with the scale of least squared error.

    symmetric   w ≈ (q - 8) · s, q in 0..15; the value of largest magnitude is met exactly by q = 0
    with zeros  w ≈ (q - z) · s, the range from min to max (0 included)

Candidates shrink the range step by step: clipping the few largest values a little makes the steps
of all others finer. Scales are kept as fp16 times a power of two per output, so that none is lost
to fp16's range; weights are rounded with the scale as it will be read.

Shapes: I inputs, O outputs, G groups, J inputs of a group.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SHRINK = tuple(1.0 - 0.05 * i for i in range(9))
_TINY = 1e-30


class Int4Weights(NamedTuple):
    """q_OI (uint8, 0..15), scale_OG (fp16), zero_OG (uint8, None: 8 everywhere), factor_O."""

    q_OI: Tensor
    scale_OG: Tensor
    zero_OG: Tensor | None
    factor_O: Tensor

    def dense(self, group_size: int) -> Tensor:
        """The weights that these numbers mean, in float32 [O, I]."""
        num_in = self.q_OI.shape[1]
        scale_OG = self.scale_OG.float() * self.factor_O.unsqueeze(1)
        zero_OG = torch.full_like(scale_OG, 8) if self.zero_OG is None else self.zero_OG.float()
        scale_OI, zero_OI = (
            v.repeat_interleave(group_size, 1)[:, :num_in] for v in (scale_OG, zero_OG)
        )
        return (self.q_OI.float() - zero_OI) * scale_OI


def quantise(weight_OI: Tensor, group_size: int, *, zeros: bool) -> Int4Weights:
    """Round to nearest, each group with the best of `SHRINK`'s scales."""
    num_in = weight_OI.shape[1]
    padded_OI = torch.nn.functional.pad(weight_OI.float(), (0, -num_in % group_size))
    weight_OGJ = padded_OI.view(len(padded_OI), -1, group_size)
    full_OG, zero_OG = _with_zeros(weight_OGJ) if zeros else _symmetric(weight_OGJ)
    factor_O = torch.exp2(torch.floor(torch.log2(full_OG.abs().amax(1))))
    best_OG = torch.full_like(full_OG, torch.inf)
    scale_OG = torch.zeros_like(full_OG, dtype=torch.float16)
    for shrink in SHRINK:
        some_OG = (full_OG * shrink / factor_O.unsqueeze(1)).half()
        wide_OG = some_OG.float() * factor_O.unsqueeze(1)
        error_OG = _error(weight_OGJ, wide_OG, zero_OG)
        better_OG = error_OG < best_OG
        best_OG = torch.where(better_OG, error_OG, best_OG)
        scale_OG = torch.where(better_OG, some_OG, scale_OG)
    q_OGJ = _round(weight_OGJ, scale_OG.float() * factor_O.unsqueeze(1), zero_OG)
    q_OI = q_OGJ.flatten(1)[:, :num_in].to(torch.uint8).contiguous()
    return Int4Weights(q_OI, scale_OG, zero_OG.to(torch.uint8) if zeros else None, factor_O)


def _symmetric(weight_OGJ: Tensor) -> tuple[Tensor, Tensor]:
    """Scales that meet the value of largest magnitude, whatever its sign, with q = 0: -8 · s."""
    at_OG1 = weight_OGJ.abs().argmax(2, keepdim=True)
    top_OG = weight_OGJ.gather(2, at_OG1).squeeze(2)
    scale_OG = torch.where(top_OG.abs() < _TINY, _TINY, top_OG / -8)
    return scale_OG, torch.full_like(scale_OG, 8)


def _with_zeros(weight_OGJ: Tensor) -> tuple[Tensor, Tensor]:
    low_OG, high_OG = weight_OGJ.amin(2).clamp(max=0), weight_OGJ.amax(2).clamp(min=0)
    scale_OG = ((high_OG - low_OG) / 15).clamp(min=_TINY)
    return scale_OG, (-low_OG / scale_OG).round().clamp(0, 15)


def _round(weight_OGJ: Tensor, scale_OG: Tensor, zero_OG: Tensor) -> Tensor:
    inverse_OG = torch.where(scale_OG == 0, 0.0, 1 / scale_OG)
    q_OGJ = torch.addcmul(zero_OG.unsqueeze(2), weight_OGJ, inverse_OG.unsqueeze(2))
    return q_OGJ.round_().clamp_(0, 15)


def _error(weight_OGJ: Tensor, scale_OG: Tensor, zero_OG: Tensor) -> Tensor:
    q_OGJ = _round(weight_OGJ, scale_OG, zero_OG).sub_(zero_OG.unsqueeze(2))
    return q_OGJ.mul_(scale_OG.unsqueeze(2)).sub_(weight_OGJ).square_().sum(2)
