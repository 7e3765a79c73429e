"""What calibration remembers of a linear's inputs: second moments and magnitudes, never the rows.

Shape legend: T rows, I inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.engine.quant.base import Linear

ProductKey = tuple[tuple[str, ...], int | None]
"""The keys of a product, and its expert."""


@dataclass(slots=True)
class Stats:
    """Sums over all rows that a product has seen. `moment_II` is Σ x xᵀ, or None if not wanted.

    `gap_II` is Σ (x° - x) xᵀ, x° being the row that the original model has in its place; None where
    none has been told.
    """

    abs_sum_I: Tensor
    abs_max_I: Tensor
    square_I: Tensor
    moment_II: Tensor | None
    num_rows: int = 0
    gap_II: Tensor | None = None

    @staticmethod
    def empty(num_in: int, moments: bool) -> Stats:
        zeros = torch.zeros(num_in)
        moment = torch.zeros(num_in, num_in) if moments else None
        return Stats(zeros, zeros.clone(), zeros.clone(), moment)

    def add(self, x_TI: Tensor, original_TI: Tensor | None = None) -> None:
        """Take in rows, and what they would be in the original model."""
        x_TI = x_TI.float()
        magnitude_TI = x_TI.abs()
        self.abs_sum_I += magnitude_TI.sum(0)
        self.abs_max_I = torch.maximum(self.abs_max_I, magnitude_TI.amax(0))
        self.square_I += x_TI.square().sum(0)
        if self.moment_II is not None:
            self.moment_II.addmm_(x_TI.T, x_TI)
        if original_TI is not None:
            if self.gap_II is None:
                self.gap_II = torch.zeros(x_TI.shape[1], x_TI.shape[1])
            self.gap_II.addmm_((original_TI - x_TI).T, x_TI)
        self.num_rows += len(x_TI)

    def abs_mean(self) -> Tensor:
        return self.abs_sum_I / max(1, self.num_rows)

    def importance(self) -> Tensor:
        """The mean square of each input, never quite 0: an input not seen may yet come."""
        mean_I = self.square_I / max(1, self.num_rows)
        return mean_I.clamp(min=float(mean_I.mean()) * 1e-4 + 1e-30)

    def divided(self, scale_I: Tensor) -> Stats:
        """The statistics of x / scale."""
        moment = self.moment_II
        return replace(
            self,
            abs_sum_I=self.abs_sum_I / scale_I,
            abs_max_I=self.abs_max_I / scale_I,
            square_I=self.square_I / scale_I.square(),
            moment_II=None if moment is None else moment / torch.outer(scale_I, scale_I),
        )


class Pair(NamedTuple):
    """Rows of one window: what a product reads, and what it reads in the original model."""

    x_TI: Tensor
    original_TI: Tensor


class Tap:
    """A linear that tells its inputs before it computes."""

    __slots__ = ("_hear", "_linear")

    def __init__(self, linear: Linear, hear: Callable[[Tensor], None]) -> None:
        self._linear, self._hear = linear, hear

    def __call__(self, x_TI: Tensor) -> Tensor:
        self._hear(x_TI)
        return self._linear(x_TI)

    @property
    def nbytes(self) -> int:
        return self._linear.nbytes
