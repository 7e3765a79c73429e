"""Making up for what rounding has done before: weights that read rounded inputs aim at the answers
to the original ones.

    W° x°  ≈  W x        W = W° (1 + p · Σ(x° - x) xᵀ · (Σ x xᵀ)⁻¹)

What: x is what a product reads in the quantised model, x° what it reads in the original. Where the
two differ in a way that x itself foretells (rounding shrinks or turns directions of the hidden
state), the least-squares W undoes the difference before W is rounded at all; p = 1/2 takes half of
it, since some of what calibration text foretells does not hold elsewhere (Arai & Ichikawa,
"Quantization Error Propagation", 2025, arXiv 2504.09629, whose p it is too). Any rounder goes on
from W. A block is done in halves: the feed-forward reads what the rounded attention leaves.

How much of it holds elsewhere is measured: windows of the text that are not learnt from say, for
each product, which p answers them best, and p is the smaller of that and 1/2. Little text, or text
that foretells nothing, thus leaves W° as it is.

Invariant: where nothing has been rounded before, W is W°; the error on the held rows never grows.

When it loses: the text is walked twice. Experts behind a router are left as they are: another token
may sit in each row.

Shape legend: O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.compress.layer_walk import Watched
from ridgeline.compress.statistics import Pair, ProductKey, Stats
from ridgeline.engine.checkpoints.sources import Weights
from ridgeline.engine.checkpoints.tensor_names import Part

Half = Sequence[tuple[Part, ProductKey]]
"""Weights of a layer's attention or of its feed-forward, each with its product."""


class Repaired(NamedTuple):
    """The weights that were moved; what is worth saying of the others."""

    weights: dict[Part, Tensor]
    notes: list[str]


def repair(
    source: Weights,
    half: Half,
    watched: Watched,
    most: float,
    damping: float,
) -> Repaired:
    """The weights that aim at the original's answers; none where nothing was told of those, or
    where it would not help the rows held back.

    Uses up the statistics' `gap_II` or `aim_OI` (as large as the inputs' second moments) and the
    held rows, which are then counted among the others.
    """
    found, notes = dict[Part, Tensor](), list[str]()
    for key, group in groupby(half, lambda each: each[1]):
        seen = watched.stats[key]
        if seen.gap_II is None and seen.aim_OI is None:
            continue
        weights = {part: source.get(part).float() for part, _ in group}
        held = watched.held.pop(key, [])
        steps = steps_to([*weights.values()], seen, damping)
        seen.gap_II = seen.aim_OI = None
        if steps is not None:
            share = min(most, best_share([*weights.values()], steps, held))
            if share > 0:
                found |= {
                    part: w_OI + share * step_OI
                    for (part, w_OI), step_OI in zip(weights.items(), steps, strict=True)
                }
            elif most > 0 and any(bool(step_OI.any()) for step_OI in steps):
                notes.append(f"{'+'.join(key[0])}: as it is, a repair fails on the text held back")
        for pair in held:
            seen.add(pair.x_TI)
        seen.complete()
    return Repaired(found, notes)


def steps_to(weights: Sequence[Tensor], seen: Stats, damping: float) -> list[Tensor] | None:
    """The whole way, for each weight of a product; None where inputs cannot be told apart."""
    assert seen.moment_II is not None and not seen.waiting
    gap_II = seen.gap_II
    aims = [seen.aim_OI] if gap_II is None else [w_OI @ gap_II for w_OI in weights]
    lower_II, info = seen.moment_II.clone(), torch.empty((), dtype=torch.int32)
    lower_II.diagonal().add_(damping * lower_II.diagonal().mean())
    torch.linalg.cholesky_ex(lower_II, out=(lower_II, info))
    if info:
        return None
    return [torch.cholesky_solve(aim_OI.T, lower_II).T for aim_OI in aims if aim_OI is not None]


def best_share(weights: Sequence[Tensor], steps: Sequence[Tensor], held: Sequence[Pair]) -> float:
    """The share of the way that answers the held rows best: least squares over it; 0 at least."""
    along = length = 0.0
    for pair in held:
        for w_OI, step_OI in zip(weights, steps, strict=True):
            wanted_TO = (pair.original_TI - pair.x_TI) @ w_OI.T
            moved_TO = pair.x_TI @ step_OI.T
            along += float((wanted_TO * moved_TO).sum())
            length += float(moved_TO.square().sum())
    return max(0.0, along / length) if length > 0 else 0.0
