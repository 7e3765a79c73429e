"""Zeroes single weights: magnitude, Wanda and SparseGPT, in any place or two in every four.

  magnitude   |W|                        over a whole matrix
  Wanda       |W_oi| · ‖x_i‖             over each output (Sun et al., ICLR 2024, arXiv 2306.11695)
  SparseGPT   W_oi² / [U_ii]²            over blocks of 128 inputs; the inputs that follow take over
              the error, as in GPTQ (Frantar & Alistarh, ICML 2023, arXiv 2301.00774)

U is the upper Cholesky factor of the inverse of H = Σ x xᵀ. With 2:4 the comparison is between four
adjacent inputs of one output.

Invariant: exactly the requested share of every matrix (or of each output, block, four) is zero;
among equal scores the first goes. Magnitude and Wanda leave the other weights as they are.

When it loses: everywhere but on hardware with sparse products. A matrix with zeros is stored and
multiplied as a dense one here; 2:4 files are smaller, in memory they are not.

Shape suffixes: O outputs, I inputs, B inputs of a block, G groups of four.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.compress.methods.gptq import HessianFactor, factor_of
from ridgeline.compress.prune.recipe import PruneRecipe
from ridgeline.compress.recipe import QuantizeRecipe
from ridgeline.compress.statistics import InputStats

BLOCK = 128


def mask_weights(
    weights: list[Tensor], stats: InputStats | None, recipe: PruneRecipe
) -> tuple[list[Tensor], str]:
    """The weights of one product with zeros, and a note.

    Consumes the statistics' second moments. `stats` None: only magnitudes are known.
    """
    seen = stats if stats is not None and stats.num_rows else None
    if recipe.method == "magnitude" or seen is None:
        note = "" if recipe.method == "magnitude" else "no text reached it: masked by magnitude"
        return [_zeroed(w_OI, w_OI.abs(), recipe, by_row=False) for w_OI in weights], note
    if recipe.method == "wanda":
        norm_I = seen.square_I.sqrt()
        return [_zeroed(w_OI, w_OI.abs() * norm_I, recipe, by_row=True) for w_OI in weights], ""
    factor = factor_of(seen, QuantizeRecipe(act_order=False, damping=recipe.damping))
    if isinstance(factor, HessianFactor):
        return [sparsegpt(w_OI, factor.upper_II, recipe) for w_OI in weights], ""
    norm_I = seen.square_I.sqrt()
    masked = [_zeroed(w_OI, w_OI.abs() * norm_I, recipe, by_row=True) for w_OI in weights]
    return masked, f"masked by Wanda: {factor}"


def lowest(score_RN: Tensor, count: int) -> Tensor:
    """A mask of the `count` lowest scores of each row."""
    at_RK = torch.argsort(score_RN, dim=-1, stable=True)[..., :count]
    return torch.zeros_like(score_RN, dtype=torch.bool).scatter_(-1, at_RK, True)


def _zeroed(weight_OI: Tensor, score_OI: Tensor, recipe: PruneRecipe, by_row: bool) -> Tensor:
    shape = weight_OI.shape
    if recipe.pattern == "2:4":
        gone_OI = lowest(score_OI.reshape(shape[0], -1, 4), 2).view(shape)
    elif by_row:
        gone_OI = lowest(score_OI, round(recipe.sparsity * shape[1]))
    else:
        gone_OI = lowest(score_OI.flatten(), round(recipe.sparsity * score_OI.numel())).view(shape)
    return weight_OI.masked_fill(gone_OI, 0.0)


def sparsegpt(weight_OI: Tensor, upper_II: Tensor, recipe: PruneRecipe) -> Tensor:
    """SparseGPT's solution, given the factor of the inputs' inverse Hessian."""
    weight_IO = weight_OI.T.contiguous()
    for begin in range(0, len(weight_IO), BLOCK):
        end = min(begin + BLOCK, len(weight_IO))
        diagonal_B1 = upper_II.diagonal()[begin:end].unsqueeze(1)
        gone_BO = torch.zeros_like(weight_IO[begin:end], dtype=torch.bool)
        if recipe.pattern == "unstructured":
            score_BO = (weight_IO[begin:end] / diagonal_B1).square()
            count = round(recipe.sparsity * score_BO.numel())
            gone_BO = lowest(score_BO.flatten(), count).view(score_BO.shape)
        error_BO = torch.empty_like(weight_IO[begin:end])
        for i in range(begin, end):
            at = i - begin
            if recipe.pattern == "2:4" and i % 4 == 0:
                score_4O = (weight_IO[i : i + 4] / diagonal_B1[at : at + 4]).square()
                gone_BO[at : at + 4] = lowest(score_4O.T, 2).T
            gone_O = gone_BO[at]
            error_O = torch.where(gone_O, weight_IO[i], 0.0) / upper_II[i, i]
            weight_IO[i].masked_fill_(gone_O, 0.0)
            weight_IO[i + 1 : end].addr_(upper_II[i, i + 1 : end], error_O, alpha=-1)
            error_BO[at] = error_O
        weight_IO[end:].addmm_(upper_II[begin:end, end:].T, error_BO, alpha=-1)
    return weight_IO.T.contiguous()
