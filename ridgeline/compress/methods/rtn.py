"""Round to nearest: every weight by itself, with the scale of least squared error per group.

What: `engine.quant.int4.quantise` tries nine ranges per group and keeps the best; 8 bits take the
whole row's range. With calibrated statistics the squared error is weighed by each input's mean
square, which is what the error of the output is made of when inputs are uncorrelated.

When it loses: fewer than 4 bits, or small models; GPTQ and AWQ spend calibration to do better.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ridgeline.compress.formats.k_quants import k_lattice
from ridgeline.compress.formats.lattice import TINY, Lattice, Rounded, rounded, rounded_up
from ridgeline.compress.formats.range_search import settle
from ridgeline.compress.recipe import Recipe
from ridgeline.compress.statistics import Stats
from ridgeline.engine.quant.int4.quantise import SHRINK, Reach, quantise


def lattice(
    weight_OI: Tensor,
    recipe: Recipe,
    importance_I: Tensor | None,
    shrinks: Sequence[float] = SHRINK,
) -> Lattice:
    """Scales and zeros that lose least when `weight_OI` is rounded to nearest."""
    if recipe.numbers in ("q4_k", "q6_k"):
        return k_lattice(weight_OI, recipe.numbers, importance_I)
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
    scale_OG = torch.where(scale_OG == 0, TINY, rounded(scale_OG, recipe.scale_bits))
    reach, middle = Reach.of(recipe.bits, recipe.zeros), 2 ** (recipe.bits - 1)
    if found.zero_OG is not None:
        return Lattice(scale_OG, found.zero_OG.float(), reach.low, reach.high, group)
    zero_OG = torch.full_like(scale_OG, middle)
    return Lattice(scale_OG, zero_OG, 0, 2 * middle - 1, group)


def _bytes(weight_OI: Tensor, scale_bits: int) -> Lattice:
    """One symmetric scale per row, rounded up to what the format can hold."""
    top_O1 = weight_OI.abs().amax(1, keepdim=True).clamp(min=TINY) / 127
    scale_O1 = rounded_up(top_O1, scale_bits)
    return Lattice(scale_O1, torch.full_like(scale_O1, 128), 1, 255, weight_OI.shape[1])


def round_rtn(weight_OI: Tensor, stats: Stats | None, recipe: Recipe) -> Rounded:
    """The nearest point of the grid."""
    importance_I = None if stats is None else stats.importance()
    found = lattice(weight_OI, recipe, importance_I)
    return found.grid(found.round(weight_OI), recipe)


def round_clipped(weight_OI: Tensor, stats: Stats, recipe: Recipe) -> Rounded:
    """To nearest, each group's range chosen by the error of the output (AWQ's clipping)."""
    assert stats.moment_II is not None
    moment_II = stats.moment_II / max(1, stats.num_rows)
    found = lattice(weight_OI, recipe, moment_II)
    if recipe.numbers == "int":
        found = settle(weight_OI, found, moment_II, recipe)
    return found.grid(found.round(weight_OI), recipe)
