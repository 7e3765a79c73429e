"""Chooses each group's range by the error of the whole output: AWQ's clipping, group by group.

With a given lattice and every weight rounded to its nearest value, the output's error is tr(E H
Eᵀ), H = Σ x xᵀ over the calibration inputs. A group's share depends on the errors of the others: e
H_gg eᵀ + 2 e (E H)_gᵀ, with E excluding the group itself. So groups take turns: each tries scales
around its own (and adjacent zero-points) and keeps the best while the others stay fixed; in a
second round the others have settled. Errors of different groups learn to cancel, which ranges
chosen one by one for their own inputs cannot do.

Invariant: the error of the calibration's output never grows, apart from rounding of sums; every
weight is at its nearest value.

When it loses: against GPTQ, in which single weights compensate each other, not only groups; and
with fewer rows of calibration text than inputs, where the cancellation overfits.

Shape suffixes: O outputs, I inputs, G groups, J inputs of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.compress.formats.lattice import Lattice, round_significant
from ridgeline.compress.recipe import QuantizeRecipe
from ridgeline.engine.kernels.native_linear import NativeLinear
from ridgeline.engine.kernels.scale_search import search_scales

ROUNDS = 2
TOGETHER = 4
"""Groups whose pull from the rest of their rows is one product, large enough for the kernel."""
STEPS = tuple(1.0 + 0.025 * i for i in range(-8, 9) if i)
"""Of the scale that a group has."""
LEAST = 2.0**-13
"""Of the row's largest scale: smaller ones stay, fp16 would hold fewer bits of them."""


def search_ranges(
    weight_OI: Tensor, on: Lattice, moment_II: Tensor, recipe: QuantizeRecipe
) -> Lattice:
    """The lattice `on` with scales (and zero-points, if there are any) of less output error."""
    search = _RangeSearch(weight_OI, moment_II, on, recipe)
    groups = range(on.scale_OG.shape[1])
    for _ in range(ROUNDS):
        for first in groups[::TOGETHER]:
            search.improve(groups[first : first + TOGETHER])
    return Lattice(search.scale_OG, search.zero_OG, on.low, on.high, on.group_size)


class _RangeSearch:
    """Scales, zeros and the errors they leave, while groups take turns."""

    def __init__(
        self, weight_OI: Tensor, moment_II: Tensor, on: Lattice, recipe: QuantizeRecipe
    ) -> None:
        self._weight_OI, self._moment_II = weight_OI.contiguous(), moment_II
        self._on, self._recipe = on, recipe
        self.scale_OG, self.zero_OG = on.scale_OG.clone(), on.zero_OG.clone()
        self._error_OI = (on.dense(on.round(weight_OI)) - weight_OI).contiguous()

    def improve(self, groups: range) -> None:
        """Let these groups choose again, one after the other, while the rest stays fixed."""
        size, end = self._on.group_size, self._weight_OI.shape[1]
        spans = [slice(at * size, min((at + 1) * size, end)) for at in groups]
        begin, end = spans[0].start, spans[-1].stop
        pull_OB = self._pull(begin, end)
        for group, at in zip(groups, spans, strict=True):
            moved_OJ = self._turn(group, at, pull_OB[:, at.start - begin : at.stop - begin])
            later_OB = pull_OB[:, at.stop - begin :]
            later_OB.addmm_(moved_OJ, self._moment_II[at, at.stop : end])

    def _pull(self, begin: int, end: int) -> Tensor:
        """Columns of E H for these inputs. H is symmetric."""
        return NativeLinear.from_floats(self._moment_II[begin:end])(self._error_OI)

    def _turn(self, group: int, at: slice, pull_OJ: Tensor) -> Tensor:
        """Let one group choose; returns the change of its errors."""
        own_JJ, error_OJ = self._moment_II[at, at], self._error_OI[:, at]
        before_OJ = error_OJ.clone()
        scale_OC = self._scales(self.scale_OG[:, group])
        zero_OZ = self._zeros(self.zero_OG[:, group])
        chosen_O = search_scales(
            self._weight_OI[:, at],
            error_OJ,
            torch.addmm(pull_OJ, before_OJ, own_JJ, alpha=-1),
            own_JJ,
            scale_OC,
            zero_OZ,
            (self._on.low, self._on.high),
        )
        rows_R = (chosen_O >= 0).nonzero().squeeze(1)
        chosen_R, num_zeros = chosen_O[rows_R], zero_OZ.shape[1]
        self.scale_OG[rows_R, group] = scale_OC[rows_R, chosen_R // num_zeros]
        self.zero_OG[rows_R, group] = zero_OZ[rows_R, chosen_R % num_zeros]
        return error_OJ - before_OJ

    def _scales(self, scale_O: Tensor) -> Tensor:
        """Candidate scales around the group's."""
        scale_O1 = scale_O.unsqueeze(1)
        fixed_O1 = scale_O1.abs() < LEAST * self.scale_OG.abs().amax(1, keepdim=True)
        some_OC = round_significant(scale_O1 * torch.tensor(STEPS), self._recipe.scale_bits)
        return torch.where(fixed_O1, scale_O1, some_OC)

    def _zeros(self, zero_O: Tensor) -> Tensor:
        """The group's zero-point and its neighbours."""
        moves = torch.tensor([-1.0, 0.0, 1.0] if self._recipe.zeros else [0.0])
        return (zero_O.unsqueeze(1) + moves).clamp_(self._on.low, self._on.high)
