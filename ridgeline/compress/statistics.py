"""Calibration statistics of a linear's inputs: second moments and magnitudes, never the rows.

Sums over rows are products computed by the native kernel, which reaches the machine's peak on every
CPU (torch's library reaches half of it on processors of another vendor).

Shape suffixes: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.engine.kernels.native_linear import BLOCK as STEP
from ridgeline.engine.kernels.native_linear import PANEL, NativeLinear, Packed
from ridgeline.engine.quant.base import Linear

BLOCK = 1024  # of the symmetric sums, of which only half is computed
MIN_ROWS_PER_PASS = 1024  # rows that are worth a pass over the sums
ProductKey = tuple[tuple[str, ...], int | None]
"""The keys of a product, and its expert."""


@dataclass(slots=True)
class InputStats:
    """Sums over all rows that a product has seen. `moment_II` is Σ x xᵀ, or None if not requested.

    Sums over pairs lack the last rows, and everything below the diagonal's blocks, until
    `complete`. `gap_II` is Σ (x° - x) xᵀ, with x° the corresponding row in the original model; for
    products with few outputs `aim_OI`, Σ W (x° - x) xᵀ, replaces it. Both are None if original rows
    were not given.
    """

    abs_sum_I: Tensor
    abs_max_I: Tensor
    square_I: Tensor
    moment_II: Tensor | None
    num_rows: int = 0
    gap_II: Tensor | None = None
    aim_OI: Tensor | None = None
    waiting: list[tuple[Tensor, ...]] = field(default_factory=list)
    """Rows that are not in the sums yet, each with its counterpart from the original, if given."""

    @staticmethod
    def empty(num_in: int, moments: bool) -> InputStats:
        zeros = torch.zeros(num_in)
        moment = torch.zeros(num_in, num_in) if moments else None
        return InputStats(zeros, zeros.clone(), zeros.clone(), moment)

    def add(
        self, x_TI: Tensor, original_TI: Tensor | None = None, answer: Linear | None = None
    ) -> None:
        """Add rows and their counterparts in the original model. `answer`: the product without
        bias, to accumulate `aim_OI`.
        """
        x_TI = x_TI.float()
        magnitude_TI = x_TI.abs()
        self.abs_sum_I += magnitude_TI.sum(0)
        self.abs_max_I = torch.maximum(self.abs_max_I, magnitude_TI.amax(0))
        self.square_I += x_TI.square().sum(0)
        self.num_rows += len(x_TI)
        if self.moment_II is None and original_TI is None:
            return
        targets = () if original_TI is None else (self._target(original_TI - x_TI, answer),)
        if self.waiting and len(self.waiting[0]) != 1 + len(targets):
            self._take_in()
        self.waiting.append((x_TI, *targets))
        if sum(len(x) for x, *_ in self.waiting) >= MIN_ROWS_PER_PASS:
            self._take_in()

    def _target(self, gap_TI: Tensor, answer: Linear | None) -> Tensor:
        """The error of the inputs, or of the outputs if `answer` is given."""
        num_in = gap_TI.shape[1]
        if answer is None:
            if self.gap_II is None:
                self.gap_II = torch.zeros(num_in, num_in)
            return gap_TI
        aim_TO = answer(gap_TI)
        if self.aim_OI is None:
            self.aim_OI = torch.zeros(aim_TO.shape[1], num_in)
        return aim_TO

    def _take_in(self) -> None:
        """Add the pending rows to the sums."""
        if not self.waiting:
            return
        x_TI, *targets = (torch.cat(rows) for rows in zip(*self.waiting, strict=True))
        self.waiting = []
        by = _Columns(x_TI)
        if self.moment_II is not None:
            by.add_products(x_TI, self.moment_II, half=True)
        for target_TO in targets:
            to_OI = self.gap_II if self.aim_OI is None else self.aim_OI
            assert to_OI is not None
            by.add_products(target_TO, to_OI)

    def complete(self) -> None:
        """Add the last rows and mirror `moment_II` at its diagonal."""
        self._take_in()
        if self.moment_II is None:
            return
        for begin in range(BLOCK, len(self.moment_II), BLOCK):
            self.moment_II[begin : begin + BLOCK, :begin] = self.moment_II[
                :begin, begin : begin + BLOCK
            ].T

    def abs_mean(self) -> Tensor:
        return self.abs_sum_I / max(1, self.num_rows)

    def importance(self) -> Tensor:
        """The mean square of each input, never exactly 0: unseen inputs may occur later."""
        mean_I = self.square_I / max(1, self.num_rows)
        return mean_I.clamp(min=float(mean_I.mean()) * 1e-4 + 1e-30)

    def divided(self, scale_I: Tensor) -> InputStats:
        """The statistics of x / scale."""
        moment = self.moment_II
        return replace(
            self,
            abs_sum_I=self.abs_sum_I / scale_I,
            abs_max_I=self.abs_max_I / scale_I,
            square_I=self.square_I / scale_I.square(),
            moment_II=None if moment is None else moment / torch.outer(scale_I, scale_I),
        )


class _Columns:
    """Columns of rows x_TI, prepared for multiplication with columns of other rows.

    In the kernels' order a weight equal to x transposed is x itself, 16 columns at a time.
    """

    def __init__(self, x_TI: Tensor) -> None:
        num_rows, self._num_in = x_TI.shape
        padded = F.pad(x_TI, (0, -self._num_in % PANEL, 0, -num_rows % STEP))
        self._lines_PTE = padded.view(len(padded), -1, PANEL).transpose(0, 1).contiguous()
        self._num_rows = num_rows

    def add_products(self, y_TO: Tensor, to_OI: Tensor, half: bool = False) -> None:
        """to_OI += y_TOᵀ x_TI; with `half` only what is not below the diagonal's blocks."""
        for begin in range(0, y_TO.shape[1], BLOCK):
            first = begin if half else 0
            lines = self._lines_PTE[first // PANEL :].view(torch.uint8).view(-1)
            packed = Packed("fp32", self._num_in - first, self._num_rows, 0, lines)
            rows_OT = y_TO[:, begin : begin + BLOCK].T.contiguous()
            to_OI[begin : begin + BLOCK, first:] += NativeLinear(packed)(rows_OT)


class WindowPair(NamedTuple):
    """Rows of one window: what a product reads, and what it reads in the original model."""

    x_TI: Tensor
    original_TI: Tensor


class InputTap:
    """A linear that reports its inputs before it computes."""

    __slots__ = ("_hear", "_linear")

    def __init__(self, linear: Linear, hear: Callable[[Tensor], None]) -> None:
        self._linear, self._hear = linear, hear

    def __call__(self, x_TI: Tensor) -> Tensor:
        self._hear(x_TI)
        return self._linear(x_TI)

    @property
    def nbytes(self) -> int:
        return self._linear.nbytes
