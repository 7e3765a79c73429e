"""Each group's range by the error of the whole output: AWQ's clipping, group after group.

What: with a lattice at hand and every weight rounded to its nearest point, the output's error is
tr(E H Eᵀ), H = Σ x xᵀ of the calibration's inputs. A group's share of it depends on the errors of
the others: e H_gg eᵀ + 2 e (E H)_gᵀ, E here without the group itself. So groups take turns: each
tries scales around its own (and zero-points beside its own) and keeps the best while the rest
stands still; a second round finds the others settled. Errors of different groups learn to cancel,
which ranges chosen one by one, each for its own inputs, cannot do.

Invariant: the error of the calibration's output never grows, except by the rounding of sums; every
weight lies at the point nearest to it.

When it loses: against GPTQ, which lets single weights make up for each other, not only groups; and
on calibration text with fewer rows than inputs, where cancelling is learnt by heart.

Shape legend: O outputs, I inputs, G groups, J inputs of a group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.compress.lattice import Lattice, rounded
from ridgeline.compress.recipe import Recipe

ROUNDS = 2
STEPS = tuple(1.0 + 0.025 * i for i in range(-8, 9) if i)
"""Of the scale that a group has."""
LEAST = 2.0**-13
"""Of the row's largest scale: smaller ones stay, fp16 would hold fewer bits of them."""


def settle(weight_OI: Tensor, on: Lattice, moment_II: Tensor, recipe: Recipe) -> Lattice:
    """`on` with scales (and zero-points, if the recipe has them) of less output error."""
    search = _Search(weight_OI, moment_II, on, recipe)
    for _ in range(ROUNDS):
        for group in range(on.scale_OG.shape[1]):
            search.improve(group)
    return Lattice(search.scale_OG, search.zero_OG, on.low, on.high, on.group_size)


@dataclass(slots=True)
class _Best:
    """The best that a group has seen: loss, scale, zero per output; the errors of its weights."""

    loss_O: Tensor
    scale_O: Tensor
    zero_O: Tensor
    error_OJ: Tensor

    def take(self, loss_O: Tensor, scale_O: Tensor, zero_O: Tensor, error_OJ: Tensor) -> None:
        better_O = loss_O < self.loss_O
        self.loss_O = torch.where(better_O, loss_O, self.loss_O)
        self.scale_O = torch.where(better_O, scale_O, self.scale_O)
        self.zero_O = torch.where(better_O, zero_O, self.zero_O)
        self.error_OJ = torch.where(better_O.unsqueeze(1), error_OJ, self.error_OJ)


class _Search:
    """Scales, zeros and the errors that they leave, as groups take their turns."""

    def __init__(self, weight_OI: Tensor, moment_II: Tensor, on: Lattice, recipe: Recipe) -> None:
        self._weight_OI, self._moment_II = weight_OI, moment_II
        self._on, self._recipe = on, recipe
        self.scale_OG, self.zero_OG = on.scale_OG.clone(), on.zero_OG.clone()
        self._error_OI = on.dense(on.round(weight_OI)) - weight_OI

    def improve(self, group: int) -> None:
        """Let one group choose anew; the others stand still."""
        size = self._on.group_size
        at = slice(group * size, min((group + 1) * size, self._weight_OI.shape[1]))
        own_JJ, error_OJ = self._moment_II[at, at], self._error_OI[:, at]
        others_OJ = self._error_OI @ self._moment_II[:, at] - error_OJ @ own_JJ

        def loss(of_OJ: Tensor) -> Tensor:
            return ((of_OJ @ own_JJ + 2 * others_OJ) * of_OJ).sum(1)

        scale_O, zero_O = self.scale_OG[:, group], self.zero_OG[:, group]
        best = _Best(loss(error_OJ), scale_O, zero_O, error_OJ)
        for some_O, other_O in self._candidates(scale_O, zero_O):
            some_OJ = self._errors(at, some_O, other_O)
            best.take(loss(some_OJ), some_O, other_O, some_OJ)
        self.scale_OG[:, group], self.zero_OG[:, group] = best.scale_O, best.zero_O
        self._error_OI[:, at] = best.error_OJ

    def _candidates(self, scale_O: Tensor, zero_O: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Scales around the group's, with its zero-point and those beside it."""
        fixed_O = scale_O.abs() < LEAST * self.scale_OG.abs().amax(1)
        for step in STEPS:
            some_O = torch.where(fixed_O, scale_O, rounded(scale_O * step, self._recipe.scale_bits))
            for move in (-1, 0, 1) if self._recipe.zeros else (0,):
                yield some_O, (zero_O + move).clamp(self._on.low, self._on.high)

    def _errors(self, at: slice, scale_O: Tensor, zero_O: Tensor) -> Tensor:
        scale_O1, zero_O1 = scale_O.unsqueeze(1), zero_O.unsqueeze(1)
        weight_OJ = self._weight_OI[:, at]
        q_OJ = torch.addcmul(zero_O1, weight_OJ, 1 / scale_O1).round_()
        return q_OJ.clamp_(self._on.low, self._on.high).sub_(zero_O1).mul_(scale_O1).sub_(weight_OJ)
