"""Indices and masks of one step for one kind of layer, built from the runs' host lists.

    row of the cache seen as [N·2·K·B, D]:  slot(block, w, head, offset) = ((block·2 + w)·K +
    head)·B + offset
    row of the cache seen as [N·2·K, B·D]:  tile(block, w, head)         =  (block·2 + w)·K + head

A latent row is neither key nor value: its layers have one side in place of these 2.

Shape legend: T new tokens, R = T·2·K rows written, S sequences of a group, K key heads, B
block_size, L gathered positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ridgeline.engine.attention.dense import KeySpan, causal_mask
from ridgeline.engine.scheduler.plan import Run

QUERIES_PER_SPAN = 256
"""Limits the size of masks; later spans of a prompt skip keys that none of their queries sees."""
SLACK_TOKENS = 64
"""Contexts this close share a group: below it, a call costs more than the wasted reads."""


@dataclass(frozen=True)
class DecodeGroup:
    """Decode runs that see nearly the same number of blocks.

    Keys `first:end` of those gathered count.
    """

    rows_S: Tensor
    tiles: Tensor
    first: int
    end: int
    mask_S11L: Tensor | None


@dataclass(frozen=True)
class QuerySpan:
    """Queries `rows` of the step over gathered keys `keys`.

    Without a mask, causal from position 0.
    """

    rows: slice
    keys: slice
    mask_TL: Tensor | None


@dataclass(frozen=True)
class PrefillRun:
    """A run of several tokens: its tiles, and its queries in spans."""

    tiles: Tensor
    spans: tuple[QuerySpan, ...]


@dataclass(frozen=True)
class StepIndices:
    """Everything a layer needs for all runs of the step.

    `whole` is the only group of a step that consists of one group, with its rows in order.
    """

    slots_R: Tensor
    groups: tuple[DecodeGroup, ...]
    prefills: tuple[PrefillRun, ...]
    whole: DecodeGroup | None


NO_INDICES = StepIndices(torch.empty(0, dtype=torch.int64), (), (), None)
"""Those of a layer without keys."""


class IndexBuilder:
    """Builds the indices for one kind of layer, with the device and dtype of `like`."""

    def __init__(
        self,
        block_size: int,
        num_kv_heads: int,
        span: KeySpan,
        explicit_scores: bool,
        like: Tensor,
        num_sides: int = 2,
    ) -> None:
        self.block_size, self.span = block_size, span
        self.explicit_scores, self.like = explicit_scores, like
        self.num_tiles = num_sides * num_kv_heads  # of one block
        heads = torch.arange(self.num_tiles, device=like.device)
        self.slot_of_head = heads * block_size
        self.tile_of_head = heads.view(num_sides, 1, num_kv_heads, 1)

    def build(self, runs: Sequence[Run]) -> StepIndices:
        """The indices of a step with these runs."""
        first_rows = list(accumulate((len(run.tokens) for run in runs), initial=0))
        placed = list(zip(first_rows, runs, strict=False))
        single = [(row, run) for row, run in placed if len(run.tokens) == 1]
        groups = tuple(self._group(members) for members in self._grouped(single))
        return StepIndices(
            slots_R=self._slots(runs),
            groups=groups,
            whole=groups[0] if len(groups) == 1 and len(single) == len(runs) else None,
            prefills=tuple(
                self._prefill_run(row, run) for row, run in placed if len(run.tokens) > 1
            ),
        )

    def _slots(self, runs: Sequence[Run]) -> Tensor:
        slots: list[int] = []
        size = self.block_size
        per_block = self.num_tiles * size
        for run in runs:
            position, end = run.start, run.start + len(run.tokens)
            while position < end:
                offset = position % size
                count = min(size - offset, end - position)
                at = run.blocks[position // size] * per_block + offset
                slots.extend(range(at, at + count))
                position += count
        return (self._tensor(slots).unsqueeze(1) + self.slot_of_head).view(-1)

    def _first_seen(self, position: int) -> int:
        return self.span.first_seen(position)

    def _grouped(self, members: list[tuple[int, Run]]) -> list[list[tuple[int, Run]]]:
        least = max(1, SLACK_TOKENS // self.block_size)
        groups: dict[int, list[tuple[int, Run]]] = {}
        for row, run in members:
            seen = run.start // self.block_size - self._first_seen(run.start) // self.block_size + 1
            step = max(least, 1 << max(0, seen.bit_length() - 4))
            groups.setdefault(-(-seen // step) * step, []).append((row, run))
        return list(groups.values())

    def _group(self, members: list[tuple[int, Run]]) -> DecodeGroup:
        size = self.block_size
        firsts = [self._first_seen(run.start) // size for _, run in members]
        lasts = [run.start // size for _, run in members]
        num_blocks = max(last - first + 1 for first, last in zip(firsts, lasts, strict=True))
        blocks: list[int] = []
        for (_, run), first, last in zip(members, firsts, lasts, strict=True):
            blocks.extend(run.blocks[first : last + 1])
            blocks.extend((run.blocks[last],) * (num_blocks - (last - first + 1)))
        rows = self._tensor([row for row, _ in members])
        tiles = self._tiles(blocks, len(members))
        if len(members) == 1:
            position, base = members[0][1].start, firsts[0] * size
            return DecodeGroup(
                rows, tiles, self._first_seen(position) - base, position + 1 - base, None
            )
        length = num_blocks * size
        return DecodeGroup(rows, tiles, 0, length, self._group_mask(members, firsts, length))

    def _group_mask(self, members: list[tuple[int, Run]], firsts: list[int], length: int) -> Tensor:
        at = [
            (run.start, first * self.block_size)
            for (_, run), first in zip(members, firsts, strict=True)
        ]
        position_S1, base_S1 = self._tensor(at).unsqueeze(-1).unbind(1)
        k_SL = base_S1 + torch.arange(length, device=self.like.device)
        hidden_SL = k_SL > position_S1
        self.span.hide(hidden_SL, position_S1, k_SL)
        zeros = torch.zeros(hidden_SL.shape, dtype=self.like.dtype, device=self.like.device)
        return zeros.masked_fill_(hidden_SL, float("-inf"))[:, None, None]

    def _tiles(self, blocks: Sequence[int], num_seqs: int) -> Tensor:
        block_1S1N = self._tensor(blocks).view(1, num_seqs, 1, -1)
        return (block_1S1N * self.num_tiles + self.tile_of_head).view(-1)

    def _prefill_run(self, first_row: int, run: Run) -> PrefillRun:
        size, end = self.block_size, run.start + len(run.tokens)
        first_block = self._first_seen(run.start) // size
        tiles = self._tiles(run.blocks[first_block : (end - 1) // size + 1], 1)
        starts = range(run.start, end, QUERIES_PER_SPAN)
        spans = (
            self._span(
                first_row - run.start, at, min(at + QUERIES_PER_SPAN, end), first_block * size
            )
            for at in starts
        )
        return PrefillRun(tiles, tuple(spans))

    def _span(self, to_row: int, start: int, end: int, base: int) -> QuerySpan:
        """Queries at positions start..end - 1.

        The row of a position is position + to_row, its gathered key is position - base.
        """
        first_key = self._first_seen(start)
        rows = slice(start + to_row, end + to_row)
        keys = slice(first_key - base, end - base)
        if first_key == start and self._first_seen(end - 1) <= start and not self.explicit_scores:
            return QuerySpan(rows, keys, None)
        mask_TL = causal_mask(start, end - start, first_key, end - first_key, self.span, self.like)
        return QuerySpan(rows, keys, mask_TL)

    def _tensor(self, values: Sequence[object]) -> Tensor:
        return torch.tensor(values, device=self.like.device)
