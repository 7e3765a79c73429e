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

import torch
from torch import Tensor

from ridgeline.compress.statistics import ProductKey, Stats
from ridgeline.engine.kernels.native_linear import Packed
from ridgeline.engine.model.names import Part
from ridgeline.engine.model.weights import Weights
from ridgeline.spec.model import LinearSpec


class Repaired:
    """A source whose products, those with statistics, aim at the original's answers."""

    def __init__(
        self, inner: Weights, stats: Mapping[ProductKey, Stats], share: float, damping: float
    ) -> None:
        self._inner, self._share, self._damping = inner, share, damping
        self._stats = {
            (key, expert): seen for (keys, expert), seen in stats.items() for key in keys
        }

    def get(self, part: Part) -> Tensor:
        value = self._inner.get(part)
        seen = self._stats.get((part.key, part.expert))
        if seen is None or seen.gap_II is None or self._share == 0:
            return value
        return repaired(value.float(), seen, self._share, self._damping)

    def packed(
        self, spec: LinearSpec, keys: Sequence[str], layer: int | None, expert: int | None
    ) -> Packed | None:
        """None: it holds plain weights."""
        return None


def repaired(weight_OI: Tensor, seen: Stats, share: float, damping: float) -> Tensor:
    """The weight, moved by `share` of the way; as it is where the inputs cannot be told apart."""
    assert seen.moment_II is not None and seen.gap_II is not None
    damped_II = seen.moment_II.clone()
    damped_II.diagonal().add_(damping * damped_II.diagonal().mean())
    lower_II, bad = torch.linalg.cholesky_ex(damped_II)
    if bad:
        return weight_OI
    wanted_IO = (weight_OI @ seen.gap_II).T
    return weight_OI + share * torch.cholesky_solve(wanted_IO, lower_II).T
