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

BLOCK = 1024  # of the symmetric sums, of which only half is computed
ProductKey = tuple[tuple[str, ...], int | None]
"""The keys of a product, and its expert."""


@dataclass(slots=True)
class Stats:
    """Sums over all rows that a product has seen. `moment_II` is Σ x xᵀ, or None if not wanted;
    `add` leaves out what lies below its diagonal's blocks, until `complete`.

    `gap_II` is Σ (x° - x) xᵀ, x° being the row that the original model has in its place; where a
    product has few outputs, `aim_OI`, Σ W (x° - x) xᵀ, stands for it. None where nothing was told.
    """

    abs_sum_I: Tensor
    abs_max_I: Tensor
    square_I: Tensor
    moment_II: Tensor | None
    num_rows: int = 0
    gap_II: Tensor | None = None
    aim_OI: Tensor | None = None

    @staticmethod
    def empty(num_in: int, moments: bool) -> Stats:
        zeros = torch.zeros(num_in)
        moment = torch.zeros(num_in, num_in) if moments else None
        return Stats(zeros, zeros.clone(), zeros.clone(), moment)

    def add(
        self, x_TI: Tensor, original_TI: Tensor | None = None, weight_OI: Tensor | None = None
    ) -> None:
        """Take in rows, and what they would be in the original model; `weight_OI`: that of the
        product, where it is to sum up `aim_OI`."""
        x_TI = x_TI.float()
        magnitude_TI = x_TI.abs()
        self.abs_sum_I += magnitude_TI.sum(0)
        self.abs_max_I = torch.maximum(self.abs_max_I, magnitude_TI.amax(0))
        self.square_I += x_TI.square().sum(0)
        if self.moment_II is not None:
            for begin in range(0, x_TI.shape[1], BLOCK):
                rows = self.moment_II[begin : begin + BLOCK, begin:]
                rows.addmm_(x_TI[:, begin : begin + BLOCK].T, x_TI[:, begin:])
        if original_TI is not None:
            self._aim(x_TI, original_TI - x_TI, weight_OI)
        self.num_rows += len(x_TI)

    def _aim(self, x_TI: Tensor, gap_TI: Tensor, weight_OI: Tensor | None) -> None:
        if weight_OI is None:
            if self.gap_II is None:
                self.gap_II = torch.zeros(x_TI.shape[1], x_TI.shape[1])
            self.gap_II.addmm_(gap_TI.T, x_TI)
            return
        if self.aim_OI is None:
            self.aim_OI = torch.zeros_like(weight_OI)
        self.aim_OI.addmm_((gap_TI @ weight_OI.T).T, x_TI)

    def complete(self) -> None:
        """Mirror `moment_II` at its diagonal."""
        if self.moment_II is None:
            return
        for begin in range(BLOCK, len(self.moment_II), BLOCK):
            self.moment_II[begin : begin + BLOCK, :begin] = self.moment_II[
                :begin, begin : begin + BLOCK
            ].T

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
