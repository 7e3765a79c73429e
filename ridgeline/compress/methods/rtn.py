"""Round to nearest: every weight independently, with the scale of least squared error per group.

`engine.quant.int4.quantise` tries nine ranges per group and keeps the best; 8 bits use the whole
row's range. With calibration statistics the squared error is weighted by each input's mean square,
which is the output's error if inputs are uncorrelated.

When it loses: below 4 bits, or small models; GPTQ and AWQ use calibration to do better.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ridgeline.compress.formats.k_quants import k_lattice
from ridgeline.compress.formats.lattice import (
    TINY,
    Lattice,
    Rounded,
    round_significant,
    round_up_significant,
)
from ridgeline.compress.formats.range_search import search_ranges
from ridgeline.compress.recipe import QuantizeRecipe
from ridgeline.compress.statistics import InputStats
from ridgeline.engine.quant.int4.quantise import SHRINK, QuantRange, quantise


def lattice(
    weight_OI: Tensor,
    recipe: QuantizeRecipe,
    importance_I: Tensor | None,
    shrinks: Sequence[float] = SHRINK,
) -> Lattice:
    """Scales and zeros with the least loss when `weight_OI` is rounded to nearest."""
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
    scale_OG = torch.where(scale_OG == 0, TINY, round_significant(scale_OG, recipe.scale_bits))
    reach, middle = QuantRange.of(recipe.bits, recipe.zeros), 2 ** (recipe.bits - 1)
    if found.zero_OG is not None:
        return Lattice(scale_OG, found.zero_OG.float(), reach.low, reach.high, group)
    zero_OG = torch.full_like(scale_OG, middle)
    return Lattice(scale_OG, zero_OG, 0, 2 * middle - 1, group)


def _bytes(weight_OI: Tensor, scale_bits: int) -> Lattice:
    """One symmetric scale per row, rounded up to what the format can hold."""
    top_O1 = weight_OI.abs().amax(1, keepdim=True).clamp(min=TINY) / 127
    scale_O1 = round_up_significant(top_O1, scale_bits)
    return Lattice(scale_O1, torch.full_like(scale_O1, 128), 1, 255, weight_OI.shape[1])


def round_rtn(weight_OI: Tensor, stats: InputStats | None, recipe: QuantizeRecipe) -> Rounded:
    """The nearest point of the grid."""
    importance_I = None if stats is None else stats.importance()
    found = lattice(weight_OI, recipe, importance_I)
    return found.grid(found.round(weight_OI), recipe)


def round_clipped(weight_OI: Tensor, stats: InputStats, recipe: QuantizeRecipe) -> Rounded:
    """Round to nearest, each group's range chosen by the output's error (AWQ's clipping)."""
    assert stats.moment_II is not None
    moment_II = stats.moment_II / max(1, stats.num_rows)
    found = lattice(weight_OI, recipe, moment_II)
    if recipe.numbers == "int":
        found = search_ranges(weight_OI, found, moment_II, recipe)
    return found.grid(found.round(weight_OI), recipe)
