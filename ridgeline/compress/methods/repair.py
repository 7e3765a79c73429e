"""Compensates earlier rounding: weights that read rounded inputs approximate the original outputs.

  W° x°  ≈  W x        W = W° (1 + p · Σ(x° - x) xᵀ · (Σ x xᵀ)⁻¹)

x is what a product reads in the quantised model, x° what it reads in the original. Where x predicts
the difference (rounding shrinks or turns directions of the hidden state), the least-squares W
undoes it before W itself is rounded; p = 1/2 takes half of it, since part of what calibration text
predicts does not generalise (Arai & Ichikawa, "Quantization Error Propagation", 2025, arXiv
2504.09629, also the source of p). Any rounding method continues from W. A block is processed in
halves: the feed-forward reads what the rounded attention produces.

How much generalises is measured: held-out windows determine, for each product, the p that fits them
best, and the smaller of that and 1/2 is used. With little text, or text that predicts nothing, W°
stays unchanged.

Invariant: if nothing has been rounded before, W is W°; the error on the held-out rows never grows.

When it loses: the text is processed twice. Experts behind a router are unchanged, because another
token may be in each row.

Shape suffixes: O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.compress.layer_walk import ObservedInputs
from ridgeline.compress.statistics import InputStats, ProductKey, WindowPair
from ridgeline.engine.checkpoints.sources import WeightSource
from ridgeline.engine.checkpoints.tensor_names import Part

Half = Sequence[tuple[Part, ProductKey]]
"""Weights of a layer's attention or of its feed-forward, each with its product."""


class Repaired(NamedTuple):
    """The adjusted weights, and notes on the others."""

    weights: dict[Part, Tensor]
    notes: list[str]


def repair(
    source: WeightSource,
    half: Half,
    watched: ObservedInputs,
    most: float,
    damping: float,
) -> Repaired:
    """Weights adjusted towards the original outputs; none without original rows, or if held-out
    rows do not improve.

    Consumes the statistics' `gap_II` or `aim_OI` (as large as the inputs' second moments) and the
    held-out rows, which are then added to the others.
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


def steps_to(weights: Sequence[Tensor], seen: InputStats, damping: float) -> list[Tensor] | None:
    """The full adjustment of each weight of a product; None if inputs cannot be distinguished."""
    assert seen.moment_II is not None and not seen.waiting
    gap_II = seen.gap_II
    aims = [seen.aim_OI] if gap_II is None else [w_OI @ gap_II for w_OI in weights]
    lower_II, info = seen.moment_II.clone(), torch.empty((), dtype=torch.int32)
    lower_II.diagonal().add_(damping * lower_II.diagonal().mean())
    torch.linalg.cholesky_ex(lower_II, out=(lower_II, info))
    if info:
        return None
    return [torch.cholesky_solve(aim_OI.T, lower_II).T for aim_OI in aims if aim_OI is not None]


def best_share(
    weights: Sequence[Tensor], steps: Sequence[Tensor], held: Sequence[WindowPair]
) -> float:
    """The share of the adjustment that fits the held-out rows best by least squares; at least 0."""
    along = length = 0.0
    for pair in held:
        for w_OI, step_OI in zip(weights, steps, strict=True):
            wanted_TO = (pair.original_TI - pair.x_TI) @ w_OI.T
            moved_TO = pair.x_TI @ step_OI.T
            along += float((wanted_TO * moved_TO).sum())
            length += float(moved_TO.square().sum())
    return max(0.0, along / length) if length > 0 else 0.0
