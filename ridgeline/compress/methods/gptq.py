"""GPTQ: round one input's weights after another and let the remaining ones compensate (Frantar et
al., "GPTQ", ICLR 2023, arXiv 2210.17323).

The layer's output error is tr(E H Eᵀ) with H = Σ x xᵀ over the calibration inputs. The error of
rounding column i is compensated best by the later columns along the rows of the Cholesky factor of
H⁻¹. Columns are processed in order of decreasing H_ii (act-order), so the most important ones are
rounded while the most freedom is left; scales are fixed beforehand on consecutive groups ("static
groups"), so nothing is gathered at run time. Blocks of 128 columns collect their updates into one
matrix product.

If H is not positive definite even with 100 times the damping (too few distinct rows), the weight is
rounded to nearest and the pipeline reports it.

Invariant: float32 with a fixed order of sums: the same text and seed give the same grid.

When it loses: calibration text unlike the real use; at 8 bits there is nothing to gain.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.compress.formats.lattice import Lattice, Rounded
from ridgeline.compress.methods.rtn import lattice, round_rtn
from ridgeline.compress.recipe import QuantizeRecipe
from ridgeline.compress.statistics import InputStats

BLOCK = 128
DAMPING_STEPS = (1.0, 10.0, 100.0)  # times the damping asked for


class NotPositiveError(Exception):
    """The Hessian cannot be factorised; the message says what was tried."""


class HessianFactor(NamedTuple):
    """Shared by the weights of one product: the order of their inputs, and the upper Cholesky
    factor of the damped inverse Hessian in that order.
    """

    order_I: Tensor
    upper_II: Tensor


def factor_of(stats: InputStats, recipe: QuantizeRecipe) -> HessianFactor | str:
    """The factor of a product's inputs, or why there is none. Consumes their second moments."""
    assert stats.moment_II is not None and not stats.waiting
    order_I = torch.arange(len(stats.moment_II))
    if recipe.act_order:
        order_I = torch.argsort(stats.moment_II.diagonal(), descending=True, stable=True)
    try:
        upper_II = _inverse_factor(stats, order_I, recipe.damping)
    except NotPositiveError as error:
        return str(error)
    return HessianFactor(order_I, upper_II)


def round_gptq(
    weight_OI: Tensor, stats: InputStats, factor: HessianFactor, recipe: QuantizeRecipe
) -> Rounded:
    """The grid with the least loss of the layer's output."""
    on, order_I = lattice(weight_OI, recipe, stats.importance()), factor.order_I
    q_IO = _solve(weight_OI.T[order_I].contiguous(), factor.upper_II, on, order_I)
    q_OI = torch.empty_like(weight_OI)
    q_OI[:, order_I] = q_IO.T
    return on.grid(q_OI, recipe)


def round_gptq_or_rtn(
    weight_OI: Tensor, stats: InputStats, factor: HessianFactor | str, recipe: QuantizeRecipe
) -> tuple[Rounded, str | None]:
    """GPTQ's grid; rounding to nearest, with the reason, if its Hessian is unusable."""
    if isinstance(factor, HessianFactor):
        return round_gptq(weight_OI, stats, factor, recipe), None
    return round_rtn(weight_OI, stats, recipe), f"rounded to nearest: {factor}"


def _inverse_factor(stats: InputStats, order_I: Tensor, damping: float) -> Tensor:
    """Upper Cholesky factor of the damped inverse, inputs in order; unseen inputs count as
    independent.

    Consumes `moment_II`: two matrices of its size are held at a time.
    """
    assert stats.moment_II is not None
    diagonal_I, num_rows = stats.moment_II.diagonal(), max(1, stats.num_rows)
    if not torch.isfinite(diagonal_I).all():
        raise NotPositiveError("the calibration's activations are not finite")
    seen = diagonal_I > 0
    if not seen.any():
        raise NotPositiveError("no calibration row reached this weight")
    mean = diagonal_I[seen].mean() / num_rows
    info = torch.empty((), dtype=torch.int32)
    for patience in DAMPING_STEPS:
        lower_II = stats.moment_II[order_I.unsqueeze(1), order_I].div_(num_rows)
        lower_II.diagonal().add_(damping * patience * mean)
        torch.linalg.cholesky_ex(lower_II, out=(lower_II, info))
        if not info:
            stats.moment_II = None
            return _of_inverse(lower_II)
    raise NotPositiveError(
        f"its Hessian is not positive definite with {DAMPING_STEPS[-1]:g} x damping"
    )


def _of_inverse(lower_II: Tensor) -> Tensor:
    """The upper factor of the inverse of the matrix with lower factor `lower_II`, which is
    consumed.
    """
    inverse_II, info = torch.cholesky_inverse(lower_II), torch.empty((), dtype=torch.int32)
    torch.linalg.cholesky_ex(inverse_II, out=(lower_II, info))
    if info or not torch.isfinite(lower_II).all():
        raise NotPositiveError("the inverse of its Hessian is not positive definite")
    return lower_II.T


def _solve(weight_IO: Tensor, factor_II: Tensor, on: Lattice, order_I: Tensor) -> Tensor:
    """q_IO (floats); row i is the input order_I[i]. `weight_IO` is consumed."""
    group_I = order_I // on.group_size
    scale_GO, zero_GO = on.scale_OG.T.contiguous(), on.zero_OG.T.contiguous()
    q_IO = torch.empty_like(weight_IO)
    for begin in range(0, len(weight_IO), BLOCK):
        end = min(begin + BLOCK, len(weight_IO))
        error_BO = torch.empty_like(weight_IO[begin:end])
        for i in range(begin, end):
            scale_O, zero_O = scale_GO[group_I[i]], zero_GO[group_I[i]]
            q_O = (weight_IO[i] / scale_O + zero_O).round_().clamp_(on.low, on.high)
            q_IO[i] = q_O
            error_O = (weight_IO[i] - (q_O - zero_O) * scale_O) / factor_II[i, i]
            weight_IO[i + 1 : end].addr_(factor_II[i, i + 1 : end], error_O, alpha=-1)
            error_BO[i - begin] = error_O
        weight_IO[end:].addmm_(factor_II[begin:end, end:].T, error_BO, alpha=-1)
    return q_IO
