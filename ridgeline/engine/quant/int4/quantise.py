"""Rounds weights to 4 bits in groups: to nearest, with the scale of least squared error.

  symmetric   w ≈ (q - 8) · s, q in 0..15; the value of largest magnitude is represented by q = 0
  with zeros  w ≈ (q - z) · s, the range from min to max (0 included)

Candidates shrink the range step by step: clipping the few largest values slightly makes the steps
of all others finer. Scales are stored as fp16 times a power of two per output, so none is lost to
fp16's range; weights are rounded with the scale as it will be read.

Shape suffixes: I inputs, O outputs, G groups, J inputs of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

SHRINK = tuple(1.0 - 0.05 * i for i in range(9))
_TINY = 1e-30


class QuantRange(NamedTuple):
    """The lowest and highest q of a grid of up to 4 bits, as nibbles."""

    low: int
    high: int

    @staticmethod
    def of(bits: int, zeros: bool) -> QuantRange:
        half = 2 ** (bits - 1)
        return QuantRange(0, 2 * half - 1) if zeros else QuantRange(8 - half, 7 + half)


class Int4Weights(NamedTuple):
    """q_OI (uint8, 0..15), scale_OG (fp16), zero_OG (uint8, None: 8 everywhere), factor_O."""

    q_OI: Tensor
    scale_OG: Tensor
    zero_OG: Tensor | None
    factor_O: Tensor

    def dense(self, group_size: int) -> Tensor:
        """The dequantised weights, float32 [O, I]."""
        num_in = self.q_OI.shape[1]
        scale_OG = self.scale_OG.float() * self.factor_O.unsqueeze(1)
        zero_OG = torch.full_like(scale_OG, 8) if self.zero_OG is None else self.zero_OG.float()
        scale_OI, zero_OI = (
            v.repeat_interleave(group_size, 1)[:, :num_in] for v in (scale_OG, zero_OG)
        )
        return (self.q_OI.float() - zero_OI) * scale_OI


def quantise(
    weight_OI: Tensor,
    group_size: int,
    *,
    zeros: bool,
    bits: int = 4,
    importance_I: Tensor | None = None,
    shrinks: Sequence[float] = SHRINK,
) -> Int4Weights:
    """Round to nearest, each group with the best of the scales that `shrinks` of its range give.

    Fewer than 4 bits use part of the nibble: the middle of it, or the lower end with `zeros`.
    `importance_I` weights the squared errors by input (its mean square), or, as [I, I] (Σ x xᵀ),
    gives the error of the group's output; None: all alike.
    """
    num_in = weight_OI.shape[1]
    weight_OGJ = in_groups(weight_OI.float(), group_size)
    weighing = _weighing(importance_I, group_size)
    reach = QuantRange.of(bits, zeros)
    full_OG, zero_OG = _with_zeros(weight_OGJ, reach) if zeros else _symmetric(weight_OGJ, reach)
    factor_O = torch.exp2(torch.floor(torch.log2(full_OG.abs().amax(1))))
    best_OG = torch.full_like(full_OG, torch.inf)
    scale_OG = torch.zeros_like(full_OG, dtype=torch.float16)
    for shrink in shrinks:
        some_OG = (full_OG * shrink / factor_O.unsqueeze(1)).half()
        wide_OG = some_OG.float() * factor_O.unsqueeze(1)
        error_OG = _error(weight_OGJ, wide_OG, zero_OG, reach, weighing)
        better_OG = error_OG < best_OG
        best_OG = torch.where(better_OG, error_OG, best_OG)
        scale_OG = torch.where(better_OG, some_OG, scale_OG)
    q_OGJ = _round(weight_OGJ, scale_OG.float() * factor_O.unsqueeze(1), zero_OG, reach)
    q_OI = q_OGJ.flatten(1)[:, :num_in].to(torch.uint8).contiguous()
    return Int4Weights(q_OI, scale_OG, zero_OG.to(torch.uint8) if zeros else None, factor_O)


def in_groups(values_OI: Tensor, group_size: int) -> Tensor:
    """[O, G, J], the last group padded with zeros."""
    padded_OI = torch.nn.functional.pad(values_OI, (0, -values_OI.shape[1] % group_size))
    return padded_OI.view(len(padded_OI), -1, group_size)


def _symmetric(weight_OGJ: Tensor, reach: QuantRange) -> tuple[Tensor, Tensor]:
    """Scales that represent the value of largest magnitude, of either sign, by the lowest q."""
    at_OG1 = weight_OGJ.abs().argmax(2, keepdim=True)
    top_OG = weight_OGJ.gather(2, at_OG1).squeeze(2)
    scale_OG = torch.where(top_OG.abs() < _TINY, _TINY, top_OG / (reach.low - 8))
    return scale_OG, torch.full_like(scale_OG, 8)


def _with_zeros(weight_OGJ: Tensor, reach: QuantRange) -> tuple[Tensor, Tensor]:
    low_OG, high_OG = weight_OGJ.amin(2).clamp(max=0), weight_OGJ.amax(2).clamp(min=0)
    scale_OG = ((high_OG - low_OG) / reach.high).clamp(min=_TINY)
    return scale_OG, (-low_OG / scale_OG).round().clamp(0, reach.high)


def _round(weight_OGJ: Tensor, scale_OG: Tensor, zero_OG: Tensor, reach: QuantRange) -> Tensor:
    inverse_OG = torch.where(scale_OG == 0, 0.0, 1 / scale_OG)
    q_OGJ = torch.addcmul(zero_OG.unsqueeze(2), weight_OGJ, inverse_OG.unsqueeze(2))
    return q_OGJ.round_().clamp_(reach.low, reach.high)


def _weighing(importance_I: Tensor | None, group_size: int) -> Tensor | None:
    """Importance by group: [G, J], or [G, J, J] from a matrix of second moments."""
    if importance_I is None:
        return None
    if importance_I.dim() == 1:
        return in_groups(importance_I.float().unsqueeze(0), group_size)[0]
    missing = -len(importance_I) % group_size
    moment_II = torch.nn.functional.pad(importance_I.float(), (0, missing, 0, missing))
    starts = range(0, len(moment_II), group_size)
    return torch.stack([moment_II[i : i + group_size, i : i + group_size] for i in starts])


def _error(
    weight_OGJ: Tensor,
    scale_OG: Tensor,
    zero_OG: Tensor,
    reach: QuantRange,
    weighing: Tensor | None,
) -> Tensor:
    q_OGJ = _round(weight_OGJ, scale_OG, zero_OG, reach).sub_(zero_OG.unsqueeze(2))
    error_OGJ = q_OGJ.mul_(scale_OG.unsqueeze(2)).sub_(weight_OGJ)
    if weighing is None:
        return error_OGJ.square_().sum(2)
    if weighing.dim() == 2:
        return error_OGJ.square_().mul_(weighing).sum(2)
    error_GOJ = error_OGJ.transpose(0, 1)
    return (torch.bmm(error_GOJ, weighing) * error_GOJ).sum(2).T
