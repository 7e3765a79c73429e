"""Attention over a cache in INT4, in plain torch.

What. A query at position p sees the groups before its own in 4 bits, and its own group up to p in
INT8. Which form a key is seen in depends on the positions alone, so that chunks, batches,
preemption and rejected drafts change nothing. New rows are written as recent ones; a group whose
last token a step writes is coded within that step, before attention. Recent rows stay until the
sequence computes beyond their group: where drafts that completed a group are rejected, it is coded
again.

Paper. KIVI (Liu et al. 2024, arXiv 2402.02750), whose residual window is here the group that is
being filled.

When it loses. In time: keys and values are widened to float32 before use, run by run. The kernel
(`native.py`) reads the codes as they are.

Shape legend: T new tokens, H query heads, K key heads, G = H/K, M groups, N blocks, B tokens of a
group, L keys, D head_dim, R bytes of a recent row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.attention.dense import KeySpan, attend_prefill
from ridgeline.engine.attention.int4.format import Int4Kv, decode_groups, encode_groups
from ridgeline.engine.attention.kv_format import code_offsets
from ridgeline.engine.scheduler.plan import Run
from ridgeline.modelspec.model import AttentionSpec, ModelSpec

QUERIES_AT_ONCE = 256  # limits the size of masks


class Int4Attention:
    """Runs on the CPU in every float dtype."""

    def __init__(self, spec: ModelSpec, cache: KvCache) -> None:
        self.attentions = tuple(layer.attention for layer in spec.layers)
        self.cache = cache

    def prepare(self, runs: Sequence[Run]) -> Int4Step:
        return Int4Step(self, runs)


class Int4Step:
    """One step of `Int4Attention`."""

    def __init__(self, owner: Int4Attention, runs: Sequence[Run]) -> None:
        self.attentions, self.cache = owner.attentions, owner.cache
        size = owner.cache.block_size
        rows = list(accumulate((len(run.tokens) for run in runs), initial=0))
        self.runs = [PlacedRun.of(run, row, size) for run, row in zip(runs, rows, strict=False)]
        self.written = [
            _join([_written_blocks(run, group, size) for run in runs]) for group in range(2)
        ]
        positions = [range(run.start, run.start + len(run.tokens)) for run in runs]
        self.within_T = torch.tensor([at % size for position in positions for at in position])
        self.filled = [filled_groups(runs, group, size) for group in range(2)]

    def __call__(
        self, q_THD: Tensor, kv_T2KD: Tensor, layer: int, sinks_H: Tensor | None = None
    ) -> Tensor:
        self._write(kv_T2KD, layer)
        attention = self.attentions[layer]
        code_filled(self.cache, attention, layer, self.filled[self.cache.recent[layer][1]])
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        for run in self.runs:
            old_2KLD = self._coded(run.coded_blocks(attention), layer, q_THD.dtype)
            recent_2KLD = self._recent(run, layer, q_THD.dtype)
            out_THD[run.rows] = attend_mixed(
                q_THD[run.rows], (old_2KLD, recent_2KLD), run.places(attention), attention, sinks_H
            )
        return out_THD

    def _write(self, kv_T2KD: Tensor, layer: int) -> None:
        """Store new rows as recent ones."""
        memory_NP, group = self.cache.recent[layer]
        rows_T2KR = self.cache.format.encode(kv_T2KD)
        _, _, num_heads, width = rows_T2KR.shape
        size = self.cache.block_size
        offsets_2BR = code_offsets(size, kv_T2KD.shape[-1]).view(2, size, width)
        heads_K11 = torch.arange(num_heads).view(-1, 1, 1)
        sides_2111 = torch.arange(2).view(2, 1, 1, 1)
        tiles_2K11 = (sides_2111 * num_heads + heads_K11) * (size * width)
        at_2KTR = tiles_2K11 + offsets_2BR[:, self.within_T].unsqueeze(1)
        at_T2KR = at_2KTR.permute(2, 0, 1, 3) + (self.written[group] * memory_NP.shape[1]).view(
            -1, 1, 1, 1
        )
        memory_NP.view(-1).index_copy_(0, at_T2KR.flatten(), rows_T2KR.flatten())

    def _recent(self, run: PlacedRun, layer: int, dtype: torch.dtype) -> Tensor:
        """kv_2KLD from the start of the run's first group to its last token."""
        blocks_M = run.recent_blocks[self.cache.recent[layer][1]]
        kv_M2KBD = recent_groups(self.cache, self.attentions[layer], layer, blocks_M, dtype)
        return kv_M2KBD.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : run.num_recent]

    def _coded(self, blocks_M: Tensor, layer: int, dtype: torch.dtype) -> Tensor:
        """kv_2KLD of whole groups."""
        tiles_M2KBW = self.cache.layers[layer].index_select(0, blocks_M)
        kv_M2KBD = decode_groups(tiles_M2KBW, self.attentions[layer].head_dim, dtype)
        return kv_M2KBD.permute(1, 2, 0, 3, 4).flatten(2, 3)


def code_filled(
    cache: KvCache, attention: AttentionSpec, layer: int, filled: tuple[Tensor, Tensor]
) -> None:
    """Code the groups whose last token a step has written: recent blocks [M] to coded ones [M]."""
    recent_M, coded_M = filled
    if len(recent_M):
        kv_M2KBD = recent_groups(cache, attention, layer, recent_M, torch.float32)
        cache.layers[layer].index_copy_(0, coded_M, encode_groups(kv_M2KBD))


def recent_groups(
    cache: KvCache, attention: AttentionSpec, layer: int, blocks_M: Tensor, dtype: torch.dtype
) -> Tensor:
    """kv_M2KBD of blocks of recent rows."""
    memory_NP, format, size = cache.recent[layer][0], cache.format, cache.block_size
    assert isinstance(format, Int4Kv)
    shape = (2, attention.num_kv_heads, size, format.recent_width(attention.head_dim))
    num_bytes = shape[0] * shape[1] * shape[2] * shape[3]
    tiles = memory_NP[:, :num_bytes].index_select(0, blocks_M).view(-1, *shape)
    return format.decode(format.from_tiles(tiles), dtype)


@dataclass(frozen=True)
class MixedPlaces:
    """Positions of queries and keys of a run.

    Coded keys begin at `first_coded`, recent ones at `first_recent`, queries at `start`; `size`:
    tokens of a group.
    """

    start: int
    first_coded: int
    first_recent: int
    size: int


@dataclass(frozen=True)
class PlacedRun:
    """A run's rows of the step, and its blocks: coded groups, and recent ones by window group."""

    run: Run
    rows: slice
    size: int
    recent_blocks: tuple[Tensor, ...]
    num_recent: int

    @staticmethod
    def of(run: Run, row: int, size: int) -> PlacedRun:
        first, end = run.start // size, run.start + len(run.tokens)
        blocks = slice(first - run.first_place, -(-end // size) - run.first_place)
        return PlacedRun(
            run,
            slice(row, row + len(run.tokens)),
            size,
            tuple(torch.tensor(table[blocks]) for table in run.windows),
            end - first * size,
        )

    def _first_coded_group(self, attention: AttentionSpec) -> int:
        return KeySpan.of(attention).first_seen(self.run.start) // self.size

    def coded_blocks(self, attention: AttentionSpec) -> Tensor:
        """The groups in 4 bits that some row of the run may see."""
        end = (self.run.start + len(self.run.tokens) - 1) // self.size
        first = min(self._first_coded_group(attention), end)
        return torch.tensor(self.run.blocks[first:end], dtype=torch.int64)

    def places(self, attention: AttentionSpec) -> MixedPlaces:
        return MixedPlaces(
            self.run.start,
            self._first_coded_group(attention) * self.size,
            self.run.start // self.size * self.size,
            self.size,
        )


def attend_mixed(
    q_THD: Tensor,
    keys: tuple[Tensor, Tensor],
    places: MixedPlaces,
    attention: AttentionSpec,
    sinks_H: Tensor | None,
) -> Tensor:
    """o_THD over `keys`: kv_2KLD of coded groups, and of recent tokens."""
    coded, recent = (kv.shape[2] for kv in keys)
    kv_2KLD = torch.cat(keys, 2)
    at_L = torch.cat(
        [
            torch.arange(coded) + places.first_coded,
            torch.arange(recent) + places.first_recent,
        ]
    )
    is_coded_L = torch.arange(coded + recent) < coded
    out = []
    for first in range(0, len(q_THD), QUERIES_AT_ONCE):
        q_TKGD = q_THD[first : first + QUERIES_AT_ONCE].unflatten(1, (attention.num_kv_heads, -1))
        at_T1 = (torch.arange(len(q_TKGD)) + places.start + first).unsqueeze(1)
        own_TL = at_L // places.size == at_T1 // places.size
        hidden_TL = (at_L > at_T1) | (own_TL == is_coded_L)
        # A recent key of an earlier group is seen coded, a coded one of the own group recent.
        KeySpan.of(attention).hide(hidden_TL, at_T1, at_L)
        mask_TL = torch.zeros(hidden_TL.shape, dtype=q_THD.dtype)
        o_KGTD = attend_prefill(
            q_TKGD.permute(1, 2, 0, 3),
            kv_2KLD[0],
            kv_2KLD[1],
            mask_TL.masked_fill_(hidden_TL, float("-inf")),
            attention.scale,
            attention.softcap,
            sinks_H,
        )
        out.append(o_KGTD.permute(2, 0, 1, 3).flatten(1, 2))
    return torch.cat(out)


def attend_text(
    q_THD: Tensor,
    kv_T2KD: Tensor,
    attention: AttentionSpec,
    format: Int4Kv,
    size: int,
    sinks_H: Tensor | None,
) -> Tensor:
    """o_THD of a whole text, without a cache: what steps would compute."""
    recent_T2KD = format.decode(format.encode(kv_T2KD), torch.float32)
    num_coded = (len(q_THD) - 1) // size
    groups_MB2KD = recent_T2KD[: num_coded * size].unflatten(0, (num_coded, size))
    tiles = encode_groups(groups_MB2KD.permute(0, 2, 3, 1, 4))
    kv_M2KBD = decode_groups(tiles, attention.head_dim, q_THD.dtype)
    coded_2KLD = kv_M2KBD.permute(1, 2, 0, 3, 4).flatten(2, 3)
    recent_2KLD = recent_T2KD.to(q_THD.dtype).permute(1, 2, 0, 3)
    return attend_mixed(
        q_THD, (coded_2KLD, recent_2KLD), MixedPlaces(0, 0, 0, size), attention, sinks_H
    )


def _written_blocks(run: Run, group: int, size: int) -> Tensor:
    """The block of each new row among those of a window group; empty if there is no such group."""
    if group >= len(run.windows):
        return torch.empty(0, dtype=torch.int64)
    end = run.start + len(run.tokens)
    table = run.windows[group]
    places = [at // size - run.first_place for at in range(run.start, end)]
    return torch.tensor([table[place] for place in places], dtype=torch.int64)


def filled_groups(runs: Sequence[Run], group: int, size: int) -> tuple[Tensor, Tensor]:
    """Recent and coded blocks of the groups whose last token the runs write."""
    recent, coded = [], []
    for run in runs:
        for place in range(run.start // size, (run.start + len(run.tokens)) // size):
            if group < len(run.windows):
                recent.append(run.windows[group][place - run.first_place])
                coded.append(run.blocks[place])
    return torch.tensor(recent, dtype=torch.int64), torch.tensor(coded, dtype=torch.int64)


def _join(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
