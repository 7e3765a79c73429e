"""A weight on a grid of integers: the meaning of every integer format, before packing.

  w[o, i] = (q[o, i] - zero[o, g]) · scale[o, g]      g = i // group_size, or group_I[i]

Quantisation methods and checkpoint readers produce grids, writers consume them. `pack` converts one
to the native kernels' layout exactly, if there is one: up to 4 bits in groups that are multiples of
32 use the INT4 kernel, 8 symmetric bits per row the INT8 kernel, 5 to 8 symmetric bits in groups
that are multiples of 16 INT8 in groups. `refusal` says why another grid has no kernel.

Shape suffixes: O outputs, I inputs, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ridgeline.engine.kernels.native_linear import Kind, Packed, in_panels, pack_lines
from ridgeline.modelspec.format import Format, format_for


@dataclass(frozen=True, slots=True)
class Grid:
    """Integers with scales and zero-points. `q_OI` is uint8, `scale_OG` float32, `zero_OG` uint8.

    `zero_OG` None: 2^(bits-1) everywhere. `group_I` None: groups are consecutive inputs; else the
    group of each input (GPTQ's act-order).
    """

    q_OI: Tensor
    scale_OG: Tensor
    zero_OG: Tensor | None
    bits: int
    group_size: int
    group_I: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        return self.q_OI.shape[0], self.q_OI.shape[1]

    @property
    def middle(self) -> int:
        """The zero-point of a symmetric grid."""
        return int(2 ** (self.bits - 1))

    def groups(self) -> Tensor:
        """The group of every input."""
        if self.group_I is not None:
            return self.group_I.long()
        return torch.arange(self.q_OI.shape[1]) // self.group_size

    def dense(self) -> Tensor:
        """The weights, float32 [O, I]; exact up to one rounding each."""
        at_I = self.groups()
        q_OI = self.q_OI.float()
        zero_OI = self.middle if self.zero_OG is None else self.zero_OG.float()[:, at_I]
        return (q_OI - zero_OI) * self.scale_OG.float()[:, at_I]


def stack_grids(grids: Sequence[Grid]) -> Grid:
    """Grids of one input and one layout as one, outputs stacked."""
    first = grids[0]
    assert all(_layout(grid) == _layout(first) for grid in grids)
    zeros = [grid.zero_OG for grid in grids if grid.zero_OG is not None]
    return replace(
        first,
        q_OI=torch.cat([grid.q_OI for grid in grids]),
        scale_OG=torch.cat([grid.scale_OG for grid in grids]),
        zero_OG=torch.cat(zeros) if zeros else None,
    )


def _layout(grid: Grid) -> tuple[int, int, bool, int]:
    return grid.bits, grid.group_size, grid.zero_OG is None, grid.q_OI.shape[1]


def refusal(grid: Grid) -> str | None:
    """Why no packed kernel computes this grid exactly; None if one does."""
    zeros, format = grid.zero_OG is not None, _format(grid)
    if format.kind == "dense":
        return f"no kernel for {grid.bits} bits in groups of {grid.group_size}" + (
            " with zero-points" if zeros else ""
        )
    if format.kind == "int8" or _halves(grid.scale_OG) is not None:
        return None
    return "its scales need more than fp16 holds"


def _format(grid: Grid) -> Format:
    return format_for(grid.bits, grid.group_size, grid.shape[1], grid.zero_OG is not None)


def _halves(scale_OG: Tensor) -> tuple[Tensor, Tensor] | None:
    """Scales as fp16 times a power of two per output; None if that is not exact."""
    top_O = scale_OG.abs().amax(1)
    near_O = torch.where(top_O > 0, torch.exp2(torch.floor(torch.log2(top_O))), 1.0)
    for factor_O in (near_O, torch.ones_like(top_O)):  # fp16 as they are, whatever their range
        half_OG = (scale_OG / factor_O.unsqueeze(1)).half()
        if torch.equal(half_OG.float() * factor_O.unsqueeze(1), scale_OG):
            return half_OG, factor_O
    return None


def pack(grid: Grid) -> Packed:
    """The grid in the kernels' layout; `refusal` must be None. Inputs must be in group order
    (`in_order`).
    """
    assert refusal(grid) is None and grid.group_I is None, refusal(grid)
    num_out, num_in = grid.shape
    format = _format(grid)
    if format.kind == "int8":
        q_OI = (grid.q_OI.to(torch.int16) - 128).to(torch.int8)
        lines = pack_lines("int8", q_OI, 0)
        factors = in_panels(grid.scale_OG[:, 0].float().contiguous())
        return Packed("int8", num_out, num_in, 0, lines, factors=factors)
    group, halves = format.group_size, _halves(grid.scale_OG)
    assert group is not None and halves is not None
    half_OG, factor_O = halves
    kind: Kind = "int4" if format.kind == "int4" else "int8_groups"
    if kind == "int4":
        q_OI = grid.q_OI + (0 if grid.zero_OG is not None else 8 - grid.middle)
    else:
        q_OI = (grid.q_OI.to(torch.int16) - grid.middle).to(torch.int8)
    num_groups = -(-num_in // group)
    at_G = (torch.arange(num_groups) * group) // grid.group_size
    return Packed(
        kind,
        num_out,
        num_in,
        group,
        pack_lines(kind, q_OI, group),
        in_panels(half_OG[:, at_G]),
        None if grid.zero_OG is None else in_panels(grid.zero_OG[:, at_G]),
        in_panels(factor_O),
    )


def in_order(grid: Grid) -> tuple[Grid, Tensor | None]:
    """The grid with its inputs sorted by group, and that order (None if it changes nothing).

    Raises ValueError if groups differ in size.
    """
    if grid.group_I is None:
        return grid, None
    group_I = grid.group_I.long()
    plain_I = torch.arange(len(group_I)) // grid.group_size
    if torch.equal(group_I, plain_I):
        return replace(grid, group_I=None), None
    order_I = torch.argsort(group_I, stable=True)
    if not torch.equal(group_I[order_I], plain_I):
        raise ValueError("groups of unequal size")
    return replace(grid, q_OI=grid.q_OI[:, order_I].contiguous(), group_I=None), order_I
