"""Cosines and sines of rotary embeddings, tabulated once and looked up once per step.

`ridgeline.modelspec.rope` defines the frequencies. Two kinds depend on a length, which is chosen so
that a token's key depends on its own position alone. (A key that depended on the prompt's length
could not be shared by a prefix cache and would change with the chunking.)

* `dynamic` (NTK): position p is rotated with the frequencies of a sequence of p+1 tokens. This is
  what transformers computes when a sequence grows token by token. It differs for a prompt longer
  than the trained context that is given at once: transformers then uses the length of the whole
  prompt for every position.
* `longrope`: the long factors for every sequence if the engine's context is longer than the trained
  one (vLLM's rule); transformers decides by the length of each sequence. Up to the trained context
  the two agree.

Tables grow by doubling, so a long context costs memory only once it is used.

Shape legend: T tokens, P positions, R rotated dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ridgeline.modelspec.model import RopeSpec
from ridgeline.modelspec.rope import attention_factor, inv_freq

SMALLEST_TABLE = 1024


def angles(rope: RopeSpec, num_positions: int, context: int) -> Tensor:
    """Angles in radians, float32 [P, R/2], for an engine whose context is `context` tokens."""
    positions_P = torch.arange(num_positions, dtype=torch.float32)
    freq_PR = torch.tensor(inv_freq(rope, context if rope.kind == "longrope" else 0))
    if rope.kind == "dynamic":
        freq_PR = _dynamic_frequencies(rope, num_positions)
    return positions_P.unsqueeze(1) * freq_PR


def _dynamic_frequencies(rope: RopeSpec, num_positions: int) -> Tensor:
    """Row p = inv_freq(rope, p + 1), for all rows at once."""
    assert rope.original_max_positions is not None
    lengths_P = torch.arange(1, num_positions + 1, dtype=torch.float64)
    ratio_P = lengths_P.clamp(min=rope.original_max_positions) / rope.original_max_positions
    stretch_P = rope.factor * ratio_P - (rope.factor - 1)
    theta_P1 = (rope.theta * stretch_P ** (rope.dim / (rope.dim - 2))).unsqueeze(1)
    exponents = -torch.arange(0, rope.dim, 2, dtype=torch.float64) / rope.dim
    return (theta_P1**exponents).float()


class RopeTables:
    """The tables of every distinct rope of a model; `context` is the engine's longest sequence."""

    def __init__(
        self, ropes: Sequence[RopeSpec], context: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.ropes, self.context = tuple(ropes), context
        self.dtype, self.device = dtype, device
        self.tables: tuple[Tensor, ...] = ()
        self.num_positions = 0

    def at(self, positions_T: Tensor, end: int) -> tuple[tuple[Tensor, Tensor], ...]:
        """(cos_T1R, sin_T1R) of each rope; `end` is larger than every position.

        The first half of sin is negated: x·cos + swap_halves(x)·sin is the rotation. Where queries
        are scaled by their position, one more column holds their factors, and zeros.
        """
        rows = (table.index_select(0, positions_T) for table in self.tables_up_to(end))
        return tuple((row[:, 0:1], row[:, 1:2]) for row in rows)

    def tables_up_to(self, end: int) -> tuple[Tensor, ...]:
        """table_P2R of each rope for positions below `end`; the same tuple until they grow."""
        if end > self.num_positions:
            self._grow(end)
        return self.tables

    def _grow(self, end: int) -> None:
        self.num_positions = max(SMALLEST_TABLE, 1 << (end - 1).bit_length())
        self.tables = tuple(self._table(rope) for rope in self.ropes)

    def _table(self, rope: RopeSpec) -> Tensor:
        angle_PR = angles(rope, self.num_positions, self.context)
        cos, sin = angle_PR.cos(), angle_PR.sin()
        both = torch.stack((torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)), 1)
        both = both * attention_factor(rope)
        if rope.query_floor is not None:
            both = torch.cat((both, query_factors(rope, self.num_positions)), -1)
        return both.to(device=self.device, dtype=self.dtype)


def query_factors(rope: RopeSpec, num_positions: int) -> Tensor:
    """A table of the factor of the query at each position, and zero: float32 [P, 2, 1]."""
    assert rope.query_floor is not None
    places_P = torch.arange(num_positions, dtype=torch.float32) + rope.query_offset
    steps_P = places_P // rope.query_floor
    factor_P = 1.0 + rope.query_scale * torch.log1p(steps_P)
    return torch.stack((factor_P, torch.zeros_like(factor_P)), 1).unsqueeze(-1)


def scale_queries_(num_heads: int, x_THD: Tensor, factor_T11: Tensor, _: Tensor) -> None:
    """Multiply the first `num_heads` heads in place, in place of a rotation."""
    x_THD[:, :num_heads].mul_(factor_T11)


def rotate_and_scale_queries_(
    rotate: Callable[[Tensor, Tensor, Tensor], None],
    num_heads: int,
    x_THD: Tensor,
    cos_T1X: Tensor,
    sin_T1X: Tensor,
) -> None:
    """Rotate all heads in place; multiply the first `num_heads` by the last column, X = R + 1."""
    rotate(x_THD, cos_T1X[..., :-1], sin_T1X[..., :-1])
    x_THD[:, :num_heads].mul_(cos_T1X[..., -1:])


def rotate_part_and_scale_(
    rotate: Callable[[Tensor, Tensor, Tensor], None], q_THD: Tensor, cos: Tensor, sin: Tensor
) -> None:
    """Rotate the last R numbers of each head in place; multiply all by column R."""
    num_rotated = cos.shape[-1] - 1
    rotate(q_THD[..., q_THD.shape[-1] - num_rotated :], cos[..., :-1], sin[..., :-1])
    q_THD.mul_(cos[..., -1:])


def rotate_alone_(
    rotate: Callable[[Tensor, Tensor, Tensor], None], x_THD: Tensor, cos: Tensor, sin: Tensor
) -> None:
    """Rotate in place by tables whose last column is of queries alone."""
    rotate(x_THD, cos[..., :-1], sin[..., :-1])


def rotate_part_(
    rotate: Callable[[Tensor, Tensor, Tensor], None], q_THD: Tensor, cos: Tensor, sin: Tensor
) -> None:
    """Rotate the last R numbers of each head in place."""
    rotate(q_THD[..., q_THD.shape[-1] - cos.shape[-1] :], cos, sin)


def rotate_interleaved_(x_THD: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> None:
    """Rotate dimensions 2i and 2i + 1 of the leading R of each head in place."""
    half = cos_T1R.shape[-1] // 2
    cos_T1P, sin_T1P = cos_T1R[..., :half], sin_T1R[..., half:]
    even_THP, odd_THP = x_THD[..., 0 : 2 * half : 2], x_THD[..., 1 : 2 * half : 2]
    turned_THP = odd_THP * cos_T1P + even_THP * sin_T1P
    even_THP.mul_(cos_T1P).sub_(odd_THP * sin_T1P)
    odd_THP.copy_(turned_THP)


def rotate_(x_THD: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> None:
    """Rotate the leading R dimensions of each head in place."""
    num_rotated = cos_T1R.shape[-1]
    rotated_part = x_THD[..., :num_rotated]
    swapped = rotated_part.roll(num_rotated // 2, -1)
    rotated_part.mul_(cos_T1R).addcmul_(swapped, sin_T1R)
