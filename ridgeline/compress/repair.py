"""Making up for what rounding has done before: weights that read rounded inputs aim at the answers
to the original ones.

    W° x°  ≈  W x        W = W° (1 + p · Σ(x° - x) xᵀ · (Σ x xᵀ)⁻¹)

What: x is what a product reads in the quantised model, x° what it reads in the original. Where the
two differ in a way that x itself foretells (rounding shrinks or turns directions of the hidden
state), the least-squares W undoes the difference before W is rounded at all; p = 1/2 takes half of
it, since some of what calibration text foretells does not hold elsewhere (Arai & Ichikawa,
"Quantization Error Propagation", 2025, arXiv 2504.09629, whose p it is too). Any rounder goes on
from W. A block is done in halves: the feed-forward reads what the rounded attention leaves.

Invariant: where nothing has been rounded before, W is W°.

When it loses: calibration text with few rows to a product's inputs; then damping holds W near W°.
Experts behind a router are left as they are: another token may sit in each row.

Shape legend: O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor

from ridgeline.compress.statistics import ProductKey, Stats
from ridgeline.engine.model.names import Part
from ridgeline.engine.model.weights import Weights

Half = Sequence[tuple[Part, ProductKey]]
"""Weights of a layer's attention or of its feed-forward, each with its product."""


def repair(
    source: Weights,
    half: Half,
    stats: Mapping[ProductKey, Stats],
    share: float,
    damping: float,
) -> dict[Part, Tensor]:
    """The weights that aim at the original's answers; none where nothing was told of those.

    Uses up the statistics' `gap_II`: each is as large as the inputs' second moments.
    """
    found: dict[Part, Tensor] = {}
    for key, group in groupby(half, lambda each: each[1]):
        seen = stats[key]
        if seen.gap_II is None:
            continue
        weights = {part: source.get(part).float() for part, _ in group}
        found |= dict(
            zip(weights, repaired([*weights.values()], seen, share, damping), strict=True)
        )
        seen.gap_II = None
    return found


def repaired(
    weights: Sequence[Tensor], seen: Stats, share: float, damping: float
) -> Sequence[Tensor]:
    """Weights of one product, moved by `share` of the way; as they are where inputs cannot be told
    apart."""
    assert seen.moment_II is not None and seen.gap_II is not None
    lower_II, info = seen.moment_II.clone(), torch.empty((), dtype=torch.int32)
    lower_II.diagonal().add_(damping * lower_II.diagonal().mean())
    torch.linalg.cholesky_ex(lower_II, out=(lower_II, info))
    if info:
        return weights
    steps = [torch.cholesky_solve((w_OI @ seen.gap_II).T, lower_II).T for w_OI in weights]
    return [w_OI + share * step_OI for w_OI, step_OI in zip(weights, steps, strict=True)]
