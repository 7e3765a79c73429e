"""Attention over keys that are divided between the ranks of a stage.

What. A sequence's positions are cut into chunks of 512 keys, and chunk c is on rank c mod N, so
that each rank's cache holds an N-th of a long sequence. Every rank attends all queries to its own
chunks, the partial results (weighted values, largest score and sum of weights of each chunk) are
exchanged, and each rank merges those of its rows. Where a row's result depends on no other row
(native layers), the rows of a step are divided between the ranks as well, and queries, keys and
values are exchanged first.

Source. Decode context parallelism of vLLM and the partial softmax of Flash-Decoding (Dao et al.,
2023). Unlike both, which merge what a rank has seen as a whole, the chunks are merged one by one.

Invariant. The kernel of one process computes the same chunks and merges them in the same ascending
order (native/attention/attention.h), so no bit differs from it.

When it loses. Every layer exchanges one partial per row, head and chunk of context, and a step
waits for the slowest rank. All ranks hold all weights of their layers. A block of the cache holds
512·N positions, so that short sequences waste memory and prefixes are shared in such steps.

Shape legend: T rows of the step, t rows of this rank, H query heads, K key heads, D head_dim,
P partials of a rank, W floats of a partial.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

import ridgeline._native as _native
from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.attention.native import NativeAttention, sinks_argument
from ridgeline.engine.parallel.exchange.base import GroupCollectives
from ridgeline.engine.scheduler.plan import Run
from ridgeline.modelspec.model import ModelSpec
from ridgeline.modelspec.shard import CHUNK_TOKENS, split


class ContextAttention:
    """Native attention over this rank's chunks; `cache` has blocks of one chunk.

    A run's block b holds the rank's chunk of each N consecutive ones. With `divides_rows`, queries
    and results are those of the rank's rows.
    """

    has_groups = True

    def __init__(
        self, spec: ModelSpec, cache: KvCache, *, collectives: GroupCollectives, divides_rows: bool
    ) -> None:
        assert cache.block_size == CHUNK_TOKENS, "a block is a chunk"
        self.native = NativeAttention(spec, cache)
        self.collectives, self.divides_rows = collectives, divides_rows
        self.backend = partial(ContextAttention, collectives=collectives, divides_rows=divides_rows)

    def prepare(self, runs: Sequence[Run]) -> ContextStep:
        return ContextStep(self, runs)


class ContextStep:
    """The `Attend` of one step."""

    def __init__(self, owner: ContextAttention, runs: Sequence[Run]) -> None:
        self.owner, native = owner, owner.native
        self._num_ranks, self._rank = owner.collectives.num_places, owner.collectives.place
        layout = native.cache.layout
        tables = [[(run.blocks, 0) for run in runs]] if layout.full else []
        for j in range(len(layout.windowed)):
            tables.append([(run.windows[j], run.first_place) for run in runs])
        self._plans = [self._plan(runs, own) for own in tables]
        self._stores = [self._store_plan(runs, own) for own in tables]
        self._stored_T = torch.tensor(
            [
                row
                for first, start, stop in self._own_spans(runs)
                for row in range(first, first + stop - start)
            ],
            dtype=torch.int64,
        )
        self._contexts: dict[tuple[int, int], _native.ContextPlan] = {}
        num_rows = sum(len(run.tokens) for run in runs)
        self._counts = [
            len(split(num_rows, self._num_ranks, place)) if owner.divides_rows else num_rows
            for place in range(self._num_ranks)
        ]
        self._rows = (
            split(num_rows, self._num_ranks, self._rank)
            if owner.divides_rows
            else split(num_rows, 1, 0)
        )

    def __call__(
        self, q_THD: Tensor, kv_T2KD: Tensor, layer: int, sinks_H: Tensor | None = None
    ) -> Tensor:
        native = self.owner.native
        attention, group = native.attentions[layer], native.groups[layer]
        heads = (attention.num_heads, attention.head_dim)
        if self.owner.divides_rows:
            q_THD, kv_T2KD = self._gather_rows(q_THD, kv_T2KD)
        else:
            q_THD, kv_T2KD = q_THD.contiguous(), kv_T2KD.contiguous()
        place, plan, isa = native.place(layer), self._plans[group], native.isa
        if len(self._stored_T):
            own_T2KD = kv_T2KD.index_select(0, self._stored_T)
            row, kind, head, _ = own_T2KD.stride()
            stores = self._stores[group]
            _native.write_kv(stores, place, own_T2KD.data_ptr(), row, kind, head, isa)
        context = self._context(group, attention.window or 0)
        counts = [context.num_partials(rank) for rank in range(self._num_ranks)]
        threads = torch.get_num_threads()
        width = _native.partial_width(place, isa)
        partials_PHW = torch.empty((counts[self._rank], attention.num_heads, width))
        if len(partials_PHW):
            _native.attend_partials(
                plan,
                context,
                self._rank,
                place,
                q_THD.data_ptr(),
                q_THD.stride(0),
                q_THD.stride(1),
                attention.num_heads,
                partials_PHW.data_ptr(),
                attention.scale,
                attention.softcap or 0.0,
                threads,
                isa,
            )
        everyone = self.owner.collectives.gather_rows(partials_PHW.flatten(1), counts)
        out_THD = torch.empty((plan.num_rows, *heads))
        _native.merge_partials(
            plan,
            context,
            place,
            [own.data_ptr() for own in everyone],
            attention.num_heads,
            out_THD.data_ptr(),
            self._rows.start,
            self._rows.stop,
            threads,
            isa,
            **sinks_argument(sinks_H),
        )
        return out_THD[self._rows.start : self._rows.stop]

    def _gather_rows(self, q_tHD: Tensor, kv_t2KD: Tensor) -> tuple[Tensor, Tensor]:
        """The queries, keys and values of all rows."""
        own = torch.cat((q_tHD.flatten(1), kv_t2KD.flatten(1)), 1)
        rows = torch.cat(self.owner.collectives.gather_rows(own, self._counts))
        width = q_tHD.shape[1] * q_tHD.shape[2]
        q_THD = rows[:, :width].unflatten(1, q_tHD.shape[1:])
        return q_THD, rows[:, width:].unflatten(1, kv_t2KD.shape[1:])

    def _context(self, group: int, window: int) -> _native.ContextPlan:
        key = (group, window)
        if key not in self._contexts:
            self._contexts[key] = _native.ContextPlan(self._plans[group], window, self._num_ranks)
        return self._contexts[key]

    def _plan(
        self, runs: Sequence[Run], tables: Sequence[tuple[tuple[int, ...], int]]
    ) -> _native.AttentionPlan:
        """All rows. Chunks of other ranks have entries that are never read."""
        placed = [
            (run.start, len(run.tokens), *self._chunks(table))
            for run, table in zip(runs, tables, strict=True)
        ]
        return self._checked(placed)

    def _store_plan(
        self, runs: Sequence[Run], tables: Sequence[tuple[tuple[int, ...], int]]
    ) -> _native.AttentionPlan:
        """The rows whose keys this rank stores."""
        placed = [
            (start, stop - start, *self._chunks(table))
            for run, table in zip(runs, tables, strict=True)
            for start, stop in self._own_positions(run)
        ]
        return self._checked(placed)

    def _checked(
        self, placed: list[tuple[int, int, tuple[int, ...], int]]
    ) -> _native.AttentionPlan:
        return _native.AttentionPlan(placed, self.owner.native.cache.num_blocks, CHUNK_TOKENS)

    def _chunks(self, table: tuple[tuple[int, ...], int]) -> tuple[tuple[int, ...], int]:
        """The table by chunk: a block holds one chunk of every rank."""
        blocks, first_place = table
        num = self._num_ranks
        return tuple(block for block in blocks for _ in range(num)), first_place * num

    def _own_positions(self, run: Run) -> list[tuple[int, int]]:
        """Ranges of the run's positions that are in this rank's chunks."""
        end = run.start + len(run.tokens)
        first, last = run.start // CHUNK_TOKENS, (end - 1) // CHUNK_TOKENS
        return [
            (max(run.start, chunk * CHUNK_TOKENS), min(end, (chunk + 1) * CHUNK_TOKENS))
            for chunk in range(first, last + 1)
            if chunk % self._num_ranks == self._rank
        ]

    def _own_spans(self, runs: Sequence[Run]) -> list[tuple[int, int, int]]:
        """First row, start and end of the ranges that this rank stores."""
        spans, first_row = [], 0
        for run in runs:
            for start, stop in self._own_positions(run):
                spans.append((first_row + start - run.start, start, stop))
            first_row += len(run.tokens)
        return spans
