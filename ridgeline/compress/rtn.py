"""Round to nearest: every weight by itself, with the scale of least squared error per group.

What: `engine.quant.int4.quantise` tries nine ranges per group and keeps the best; 8 bits take the
whole row's range. With calibrated statistics the squared error is weighed by each input's mean
square, which is what the error of the output is made of when inputs are uncorrelated.

When it loses: fewer than 4 bits, or small models; GPTQ and AWQ spend calibration to do better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.compress.recipe import Recipe
from ridgeline.compress.statistics import Stats
from ridgeline.engine.quant.grid import Grid
from ridgeline.engine.quant.int4.quantise import SHRINK, Reach, quantise

_TINY = 1e-30


@dataclass(frozen=True, slots=True)
class Lattice:
    """Where a weight may lie: scale and zero per output and group, and the range of q.

    Numbers are those of `Grid`: q in low..high, float32 zeros.
    """

    scale_OG: Tensor
    zero_OG: Tensor
    low: int
    high: int
    group_size: int

    def round(self, weight_OI: Tensor) -> Tensor:
        """q_OI, as floats."""
        at_I = torch.arange(weight_OI.shape[1]) // self.group_size
        scale_OI, zero_OI = self.scale_OG[:, at_I], self.zero_OG[:, at_I]
        return (weight_OI / scale_OI + zero_OI).round_().clamp_(self.low, self.high)

    def dense(self, q_OI: Tensor) -> Tensor:
        """What those whole numbers mean."""
        at_I = torch.arange(q_OI.shape[1]) // self.group_size
        return (q_OI - self.zero_OG[:, at_I]) * self.scale_OG[:, at_I]

    def grid(self, q_OI: Tensor, recipe: Recipe) -> Grid:
        zero = self.zero_OG.to(torch.uint8) if recipe.zeros else None
        return Grid(
            q_OI.to(torch.uint8).contiguous(), self.scale_OG, zero, recipe.bits, self.group_size
        )


def lattice(
    weight_OI: Tensor,
    recipe: Recipe,
    importance_I: Tensor | None,
    shrinks: Sequence[float] = SHRINK,
) -> Lattice:
    """Scales and zeros that lose least when `weight_OI` is rounded to nearest."""
    if recipe.bits == 8:
        return _bytes(weight_OI, recipe.scale_bits)
    group = recipe.group(weight_OI.shape[1])
    found = quantise(
        weight_OI,
        group,
        zeros=recipe.zeros,
        bits=recipe.bits,
        importance_I=importance_I,
        shrinks=shrinks,
    )
    scale_OG = found.scale_OG.float() * found.factor_O.unsqueeze(1)
    scale_OG = torch.where(scale_OG == 0, _TINY, rounded(scale_OG, recipe.scale_bits))
    reach, middle = Reach.of(recipe.bits, recipe.zeros), 2 ** (recipe.bits - 1)
    if found.zero_OG is not None:
        return Lattice(scale_OG, found.zero_OG.float(), reach.low, reach.high, group)
    zero_OG = torch.full_like(scale_OG, middle)
    return Lattice(scale_OG, zero_OG, 0, 2 * middle - 1, group)


def rounded(scale: Tensor, significant: int) -> Tensor:
    """Rounded to so many significant bits, at any magnitude."""
    mantissa, exponent = torch.frexp(scale)
    return torch.ldexp((mantissa * 2**significant).round() / 2**significant, exponent)


def _bytes(weight_OI: Tensor, scale_bits: int) -> Lattice:
    """One symmetric scale per row, rounded up to what the format can hold."""
    top_O1 = weight_OI.abs().amax(1, keepdim=True).clamp(min=_TINY) / 127
    power_O1 = torch.exp2(torch.floor(torch.log2(top_O1)) - (scale_bits - 1))
    scale_O1 = torch.ceil(top_O1 / power_O1) * power_O1
    return Lattice(scale_O1, torch.full_like(scale_O1, 128), 1, 255, weight_OI.shape[1])


def round_rtn(weight_OI: Tensor, stats: Stats | None, recipe: Recipe) -> Grid:
    """The nearest point of the grid."""
    importance_I = None if stats is None else stats.importance()
    found = lattice(weight_OI, recipe, importance_I)
    return found.grid(found.round(weight_OI), recipe)


def round_clipped(weight_OI: Tensor, stats: Stats, recipe: Recipe) -> Grid:
    """To nearest, each group's range chosen by the error of its output (AWQ's clipping)."""
    assert stats.moment_II is not None
    found = lattice(weight_OI, recipe, stats.moment_II / max(1, stats.num_rows))
    return found.grid(found.round(weight_OI), recipe)
