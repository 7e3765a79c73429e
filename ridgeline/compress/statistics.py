"""What calibration remembers of a linear's inputs: second moments and magnitudes, never the rows.

Shape legend: T rows, I inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ridgeline.engine.quant.base import Linear


@dataclass(slots=True)
class Stats:
    """Sums over all rows that a product has seen. `moment_II` is Σ x xᵀ, or None if not wanted."""

    abs_sum_I: Tensor
    abs_max_I: Tensor
    square_I: Tensor
    moment_II: Tensor | None
    num_rows: int = 0

    @staticmethod
    def empty(num_in: int, moments: bool) -> Stats:
        zeros = torch.zeros(num_in)
        moment = torch.zeros(num_in, num_in) if moments else None
        return Stats(zeros, zeros.clone(), zeros.clone(), moment)

    def add(self, x_TI: Tensor) -> None:
        """Take in rows."""
        x_TI = x_TI.float()
        magnitude_TI = x_TI.abs()
        self.abs_sum_I += magnitude_TI.sum(0)
        self.abs_max_I = torch.maximum(self.abs_max_I, magnitude_TI.amax(0))
        self.square_I += x_TI.square().sum(0)
        if self.moment_II is not None:
            self.moment_II.addmm_(x_TI.T, x_TI)
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


class Tap:
    """A linear that notes its inputs."""

    __slots__ = ("_linear", "stats")

    def __init__(self, linear: Linear, stats: Stats) -> None:
        self._linear, self.stats = linear, stats

    def __call__(self, x_TI: Tensor) -> Tensor:
        if len(x_TI):
            self.stats.add(x_TI)
        return self._linear(x_TI)

    @property
    def nbytes(self) -> int:
        return self._linear.nbytes
