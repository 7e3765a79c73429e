"""The values that a quantised weight may take, before the integers are chosen.

Every method gets its lattice from `ridgeline.compress.methods.rtn.lattice`, chooses integers on it
in its own way, and converts them to the stored form (`Lattice.grid`).

Shape suffixes: O outputs, I inputs, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.compress.formats.coded import CodedWeight
from ridgeline.compress.recipe import QuantizeRecipe
from ridgeline.engine.quant.grid import Grid
from ridgeline.engine.quant.int4.quantise import in_groups
from ridgeline.engine.quant.outliers import OutlierSplit

TINY = 1e-30
Rounded = Grid | CodedWeight | OutlierSplit
"""A weight that has been rounded; all say what they mean by `dense()`."""


@dataclass(frozen=True, slots=True)
class Lattice:
    """Scale and zero per output and group, and the range of q.

    Numbers follow `Grid`: q in low..high, float32 zeros.
    """

    scale_OG: Tensor
    zero_OG: Tensor
    low: int
    high: int
    group_size: int

    def round(self, weight_OI: Tensor) -> Tensor:
        """q_OI, as floats."""
        at_OGJ = in_groups(weight_OI, self.group_size) / self.scale_OG.unsqueeze(2)
        q_OGJ = at_OGJ.add_(self.zero_OG.unsqueeze(2)).round_().clamp_(self.low, self.high)
        return q_OGJ.flatten(1)[:, : weight_OI.shape[1]]

    def dense(self, q_OI: Tensor) -> Tensor:
        """The weights that integers q_OI stand for."""
        value_OGJ = in_groups(q_OI, self.group_size) - self.zero_OG.unsqueeze(2)
        return value_OGJ.mul_(self.scale_OG.unsqueeze(2)).flatten(1)[:, : q_OI.shape[1]]

    def grid(self, q_OI: Tensor, recipe: QuantizeRecipe) -> Rounded:
        zero = self.zero_OG.to(torch.uint8) if recipe.zeros else None
        return Grid(
            q_OI.to(torch.uint8).contiguous(), self.scale_OG, zero, recipe.bits, self.group_size
        )


def round_significant(scale: Tensor, significant: int) -> Tensor:
    """Round to that many significant bits, at any magnitude."""
    mantissa, exponent = torch.frexp(scale)
    return torch.ldexp((mantissa * 2**significant).round() / 2**significant, exponent)


def round_up_significant(scale: Tensor, significant: int) -> Tensor:
    """Round positive numbers up to that many significant bits."""
    power = torch.exp2(torch.floor(torch.log2(scale)) - (significant - 1))
    return torch.ceil(scale / power) * power
