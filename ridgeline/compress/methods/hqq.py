"""HQQ: a scale that ignores outliers, found without data (Badri & Shaji, "Half-Quadratic
Quantization", 2023).

Instead of the squared error, Σ |w - ŵ|^p with p = 0.7 is minimised, so a few large weights do not
stretch the steps of all others. Half-quadratic splitting: e absorbs the large errors (shrunk by the
proximal operator of |·|^p), and the scale is refitted to w - e by least squares; β grows from round
to round. HQQ solves for a floating-point zero-point; our grid has integer ones, so the scale is
solved for and the zero-point stays that of rounding to nearest.

Invariant: reads no text; the same weights give the same grid.

When it loses: with calibration text, GPTQ and AWQ know which inputs matter. Rounding to nearest
already searches its ranges by squared error here, and on the demo model HQQ is no better. Starting
from narrower ranges finds a smaller Σ|error|^0.7 and twice the KL divergence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.compress.formats.lattice import Lattice, Rounded, round_significant
from ridgeline.compress.methods.rtn import lattice
from ridgeline.compress.recipe import QuantizeRecipe
from ridgeline.compress.statistics import InputStats

POWER, ROUNDS, BETA, GROWTH = 0.7, 20, 10.0, 1.05


def round_hqq(weight_OI: Tensor, stats: InputStats | None, recipe: QuantizeRecipe) -> Rounded:
    """The grid of least Σ |error|^0.7, starting from rounding to nearest; `stats` are not used."""
    start = lattice(weight_OI, recipe, None)
    size = start.group_size
    padded_OI = torch.nn.functional.pad(weight_OI.float(), (0, -weight_OI.shape[1] % size))
    weight_OGJ = padded_OI.view(len(padded_OI), -1, size)
    scale_OG1, zero_OG1 = start.scale_OG.unsqueeze(2), start.zero_OG.unsqueeze(2)
    best_OG1, least_OG1 = scale_OG1, _loss(weight_OGJ, scale_OG1, zero_OG1, start)
    beta = BETA / float(weight_OGJ.abs().mean().clamp(min=1e-30))
    for _ in range(ROUNDS):
        scale_OG1 = _refit(weight_OGJ, scale_OG1, zero_OG1, start, beta)
        scale_OG1 = round_significant(scale_OG1, recipe.scale_bits)
        loss_OG1 = _loss(weight_OGJ, scale_OG1, zero_OG1, start)
        better_OG1 = loss_OG1 < least_OG1
        best_OG1 = torch.where(better_OG1, scale_OG1, best_OG1)
        least_OG1 = torch.where(better_OG1, loss_OG1, least_OG1)
        beta *= GROWTH
    found = Lattice(best_OG1.squeeze(2), start.zero_OG, start.low, start.high, size)
    return found.grid(found.round(weight_OI), recipe)


def _levels(weight_OGJ: Tensor, scale_OG1: Tensor, zero_OG1: Tensor, on: Lattice) -> Tensor:
    q_OGJ = (weight_OGJ / scale_OG1 + zero_OG1).round_().clamp_(on.low, on.high)
    return q_OGJ - zero_OG1


def _loss(weight_OGJ: Tensor, scale_OG1: Tensor, zero_OG1: Tensor, on: Lattice) -> Tensor:
    error_OGJ = weight_OGJ - _levels(weight_OGJ, scale_OG1, zero_OG1, on) * scale_OG1
    return error_OGJ.abs().pow(POWER).sum(2, keepdim=True)


def _refit(
    weight_OGJ: Tensor, scale_OG1: Tensor, zero_OG1: Tensor, on: Lattice, beta: float
) -> Tensor:
    """One round: the part of the error attributed to outliers, then the least-squares scale without
    it.
    """
    level_OGJ = _levels(weight_OGJ, scale_OG1, zero_OG1, on)
    error_OGJ = weight_OGJ - level_OGJ * scale_OG1
    magnitude_OGJ = error_OGJ.abs()
    kept_OGJ = (magnitude_OGJ - magnitude_OGJ.clamp(min=1e-12).pow(POWER - 1) / beta).clamp(min=0)
    target_OGJ = weight_OGJ - error_OGJ.sign() * kept_OGJ
    over_OG1 = level_OGJ.square().sum(2, keepdim=True)
    fitted_OG1 = (target_OGJ * level_OGJ).sum(2, keepdim=True) / over_OG1.clamp(min=1e-30)
    usable_OG1 = (over_OG1 > 0) & (fitted_OG1 != 0) & (fitted_OG1.sign() == scale_OG1.sign())
    return torch.where(usable_OG1, fitted_OG1, scale_OG1)
