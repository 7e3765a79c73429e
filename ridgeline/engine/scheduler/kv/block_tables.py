"""Block tables: sharing blocks by reference, growing, and copy-on-write.

    leader   [ 4 | 9 | 2 ]        a prompt of 40 tokens, block size 16: block 2 is half full
    child    [ 4 | 9 | 2 ]        forked: the same blocks with one more reference each
    child    [ 4 | 9 | 7 ]        before its first write, block 2 is copied to block 7

Rule: a sequence writes to a block only if it is the sole owner and no prefix hit can read the
block. Otherwise the block is copied first (if it has other owners), or its cache entry is
invalidated (if it is published but has no other owner).

The copies of a step may be performed in any order or all at once, because no block is both read and
written by them. A copy from a block that is itself the target of a copy is redirected to the
original source, and sources are pinned until the plan is complete, so they cannot be handed to
another sequence in between. The last sharer may write to the source in place: copies come before
all runs.

Layers with a window (`KvLayout`) have separate tables, which slide: before a sequence computes
on, they give back the blocks that no later token can see.

    full     [ 4 | 9 | 2 | 6 | 8 ]    every position
    window           [ 5 | 1 | 3 ]    first_place 2: places 0 and 1 have been given back

While a prompt is computed, a windowed table holds the window and the largest step, so that each
step takes as many blocks as it gives back, and no prompt waits for blocks half-way.

A sequence that evicts keys and values (`SequenceEviction`) has a table without the blocks that it
dropped. One that slides holds its budget and the largest step, in the same way.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from ridgeline.engine.scheduler.kv.block_pool import BlockPool
from ridgeline.engine.scheduler.kv.compactor import Compactor
from ridgeline.engine.scheduler.kv.prefix_cache import BlockCache, ComputedPrefix
from ridgeline.engine.scheduler.sequence import Sequence
from ridgeline.modelspec.cost.kv_layout import ONE_GROUP, KvLayout

Table = tuple[list[int], int]
"""Blocks, and the index of the first of them: 0 for the table of layers that see everything."""


class UnusedTables(msgspec.Struct, frozen=True):
    """Block tables of several sequences on an idle cache, to measure steps without a scheduler.

    Sequence i has `num_places` blocks of every group, which no other one has.
    """

    layout: KvLayout
    num_places: int

    def of(self, i: int) -> dict[str, Any]:
        """The `blocks` and `windows` of a `Run` or `DraftContext` of sequence i."""
        num, first = self.num_places, i * self.num_places * self.layout.num_groups
        tables = [
            tuple(range(first + j * num, first + (j + 1) * num))
            for j in range(self.layout.num_groups)
        ]
        if self.layout.full:
            return {"blocks": tables[0], "windows": tuple(tables[1:])}
        return {"blocks": (), "windows": tuple(tables)}


class BlockTables:
    """Makes every change to a sequence's block tables.

    `max_run_tokens` is the most tokens that a step feeds of one sequence.
    """

    def __init__(
        self,
        pool: BlockPool,
        cache: BlockCache,
        layout: KvLayout = ONE_GROUP,
        max_run_tokens: int = 1,
    ) -> None:
        self._pool, self._cache, self._layout = pool, cache, layout
        self._copied_from: dict[int, int] = {}  # target -> source, of the plan being made
        self._pins: Counter[int] = Counter()  # references the plan holds on sources
        self._num_windowed, self._max_run_tokens = len(layout.windowed), max_run_tokens
        self.compactor = Compactor(pool, cache)
        self._max_places = (
            layout.max_window_places(max_run_tokens, pool.block_size) if layout.windowed else 0
        )

    @property
    def block_size(self) -> int:
        return self._pool.block_size

    @property
    def num_groups(self) -> int:
        """Blocks that `block_size` more positions take, one for each group of layers."""
        return self._layout.num_groups

    def adopt_prefix(self, seq: Sequence, prefix: ComputedPrefix, now_s: float) -> None:
        """Start `seq`, which has no blocks, from blocks that hold its first tokens."""
        assert not seq.blocks and not any(seq.windows) and prefix.num_computed < seq.num_known
        for block in prefix.all_blocks:
            self._pool.retain(block)
        self._cache.touch(prefix.all_blocks, now_s)
        seq.blocks, seq.num_computed = list(prefix.blocks), prefix.num_computed
        if self._num_windowed:
            seq.windows = [list(table) for table in prefix.windows]
            seq.first_place = prefix.first_place
        seq.num_published = prefix.num_computed // self._pool.block_size

    def shared_prefix(self, source: Sequence, num_known: int) -> ComputedPrefix | None:
        """The blocks of `source` from which its first `num_known` tokens can be continued.

        None if layers with a window have given back blocks that this takes.
        """
        num_computed, num_blocks = num_known - 1, self._pool.num_blocks_for(num_known)
        first = source.first_place
        if self._num_windowed and first > self._layout.first_place(num_computed, self.block_size):
            return None
        windows = [table[: num_blocks - first] for table in source.windows]
        return ComputedPrefix(source.blocks[:num_blocks], num_computed, windows, first)

    def num_blocks_needed(self, seq: Sequence, prefix: ComputedPrefix) -> int:
        """Idle blocks it takes to adopt `prefix` and make all known positions writable.

        Positions that layers with a window, or a sequence that evicts, compute later need none yet.
        """
        blocks, num_places = prefix.all_blocks, self._end_place(seq)
        # The last block is copied on write if its owner has computed more than the prefix.
        is_partial = prefix.num_computed < prefix.end_place * self._pool.block_size
        needed = num_places * bool(self._layout.full)
        if self._num_windowed:
            end = min(num_places, prefix.first_place + self._max_places)
            needed += (end - prefix.first_place) * self._num_windowed
        revived = sum(not self._pool.ref_count(block) for block in blocks)
        return needed - len(blocks) + is_partial * self.num_groups + revived

    def reserve_known(self, seq: Sequence) -> bool:
        """Blocks for all known tokens, as far as windowed and sliding tables hold them at once.

        Changes nothing if there are not enough idle blocks.
        """
        if self._num_windowed:
            return self._reserve_tables(seq, seq.num_computed, seq.num_known)
        is_sliding = seq.eviction is not None and seq.eviction.is_sliding
        return self.reserve(seq, 1 if is_sliding else seq.num_feedable)

    def reserve(self, seq: Sequence, num_tokens: int) -> bool:
        """Make the next `num_tokens` positions writable; changes nothing if not all can be.

        Layers with a window first give back what none of these positions sees, and so does a
        sequence that slides.
        """
        if self._num_windowed:
            end = seq.num_computed + num_tokens
            return self._reserve_tables(seq, end, end)
        first = 0
        if seq.eviction is not None:
            self._slide_over_dropped(seq)
            first = seq.num_dropped // self._pool.block_size
        pool, blocks = self._pool, seq.blocks
        place = seq.num_computed // pool.block_size - first
        if num_tokens == 1 and place < len(blocks) and pool.is_private(blocks[place]):
            return True  # nearly every decode: there is room in a private block
        end = pool.num_blocks_for(seq.num_computed + num_tokens)
        if seq.eviction is not None:
            end = max(end, self._end_place(seq))
        num_more = end - first - len(blocks)
        shared = self._shared(seq, (blocks, first), end)
        if pool.num_idle < max(num_more, 0) + len(shared):
            return False
        self._copy_on_write(blocks, shared)
        if num_more > 0:
            blocks += pool.allocate_many(num_more)
        return True

    def _reserve_tables(self, seq: Sequence, end: int, full_end: int) -> bool:
        """Make positions up to `end` writable, in the table that keeps all up to `full_end`."""
        self._slide(seq)
        pool = self._pool
        place = seq.num_computed // pool.block_size
        if end - seq.num_computed == 1 and self._is_writable(seq, place):
            return True
        ahead = min(pool.num_blocks_for(seq.num_known), seq.first_place + self._max_places)
        window_end = max(pool.num_blocks_for(end), ahead)
        ends = [pool.num_blocks_for(full_end)] * bool(self._layout.full)
        ends += [window_end] * self._num_windowed
        tables = self._tables(seq)
        shared = [
            self._shared(seq, table, table_end)
            for table, table_end in zip(tables, ends, strict=True)
        ]
        num_more = [
            max(0, table_end - start - len(blocks))
            for (blocks, start), table_end in zip(tables, ends, strict=True)
        ]
        if pool.num_idle < sum(num_more) + sum(map(len, shared)):
            return False
        for (blocks, _), own_shared, count in zip(tables, shared, num_more, strict=True):
            self._copy_on_write(blocks, own_shared)
            blocks += pool.allocate_many(count)
        return True

    def _slide(self, seq: Sequence) -> None:
        """Give back the blocks of windowed tables that no pending token can see."""
        if not seq.windows:
            seq.windows = [[] for _ in range(self._num_windowed)]
        first = self._layout.first_place(seq.num_computed, self._pool.block_size)
        num_passed = first - seq.first_place
        if num_passed <= 0:
            return
        for table in seq.windows:
            self._pool.release_all(table[:num_passed])
            del table[:num_passed]
        seq.first_place = first

    def _slide_over_dropped(self, seq: Sequence) -> None:
        """Give back the blocks that the next query of a sliding sequence does not see."""
        eviction = seq.eviction
        if eviction is None or not eviction.is_sliding:
            return
        dropped = eviction.dropped_at(seq.num_computed)
        num_passed = (dropped - seq.num_dropped) // self.block_size
        if num_passed > 0:
            sinks = eviction.sinks // self.block_size
            self._pool.release_all(seq.blocks[sinks : sinks + num_passed])
            del seq.blocks[sinks : sinks + num_passed]
            seq.num_dropped = dropped

    def _end_place(self, seq: Sequence) -> int:
        """Places of the known tokens, as far as a sequence that evicts holds them at once."""
        pool, eviction = self._pool, seq.eviction
        if eviction is None:
            return pool.num_blocks_for(seq.num_known)
        if not eviction.is_sliding:
            return pool.num_blocks_for(seq.num_computed + seq.num_feedable)
        held = pool.num_blocks_for(eviction.max_held(seq.num_known, self._max_run_tokens))
        return min(pool.num_blocks_for(seq.num_known), seq.num_dropped // self.block_size + held)

    def _is_writable(self, seq: Sequence, place: int) -> bool:
        """Whether every group has a private block at a place."""
        pool, within = self._pool, place - seq.first_place
        if self._layout.full and not (
            place < len(seq.blocks) and pool.is_private(seq.blocks[place])
        ):
            return False
        return all(within < len(table) and pool.is_private(table[within]) for table in seq.windows)

    def _tables(self, seq: Sequence) -> list[Table]:
        """The tables of every group, in the order of `KvLayout.groups`."""
        full = [(seq.blocks, seq.num_dropped // self.block_size)] if self._layout.full else []
        return [*full, *[(table, seq.first_place) for table in seq.windows]]

    def release(self, seq: Sequence, now_s: float) -> None:
        """Return all blocks of a sequence."""
        self.compactor.cancel(seq)
        for table in (seq.blocks, *seq.windows):
            self._cache.touch(table, now_s)
            self._pool.release_all(table)
        seq.blocks, seq.windows, seq.first_place, seq.num_dropped = [], [], 0, 0

    def trim(self, seq: Sequence) -> None:
        """Return the blocks after the known tokens, which held rejected drafts."""
        num_blocks = self._pool.num_blocks_for(seq.num_known)
        for table, first in self._tables(seq):
            while first + len(table) > num_blocks:
                self._pool.release(table.pop())

    def num_missing_blocks(self, seq: Sequence, num_tokens: int) -> int:
        """Blocks to allocate before the next `num_tokens` positions have one."""
        end = self._pool.num_blocks_for(seq.num_computed + num_tokens)
        return sum([max(0, end - first - len(table)) for table, first in self._tables(seq)])

    def num_branch_blocks(self, seq: Sequence, num_tokens: int) -> int:
        """The number of blocks that `allocate_branch` takes."""
        return self.num_groups * self._num_branch_places(seq, num_tokens)

    def allocate_branch(self, seq: Sequence, num_tokens: int) -> list[list[int]]:
        """Private blocks for an alternative to the next `num_tokens` positions of `seq`, by group.

        The computed part of the first block is copied. The pool must have enough idle blocks.
        """
        num_places = self._num_branch_places(seq, num_tokens)
        place, inside = divmod(seq.num_computed, self.block_size)
        branch = []
        for table, first in self._tables(seq):
            blocks = self._pool.allocate_many(num_places)
            if inside:
                self._record_copy(table[place - first], blocks[0])
            branch.append(blocks)
        return branch

    def branch_tables(
        self, seq: Sequence, branch: list[list[int]]
    ) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
        """The sequence's `blocks` and `windows` with a branch in place of what follows."""
        place = seq.num_computed // self.block_size
        tables = [
            (*table[: place - first], *blocks)
            for (table, first), blocks in zip(self._tables(seq), branch, strict=True)
        ]
        return (tables[0], tuple(tables[1:])) if self._layout.full else ((), tuple(tables))

    def accept_branch(self, seq: Sequence, branch: list[list[int]]) -> None:
        """Replace the sequence's own blocks with those of a branch."""
        place = seq.num_computed // self.block_size
        for (table, first), blocks in zip(self._tables(seq), branch, strict=True):
            self._pool.release_all(table[place - first :])
            table[place - first :] = blocks

    def release_branch(self, branch: list[list[int]]) -> None:
        """Return the blocks of a rejected branch."""
        for blocks in branch:
            self._pool.release_all(blocks)

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """The (from, to) copies of the plan, which is now complete; unpins their sources."""
        if not self._copied_from:
            return ()
        copies = tuple((source, target) for target, source in self._copied_from.items())
        self._pool.release_all(list(self._pins.elements()))
        self._copied_from = {}
        self._pins.clear()
        return copies

    def _num_branch_places(self, seq: Sequence, num_tokens: int) -> int:
        end = seq.num_computed + num_tokens
        return self._pool.num_blocks_for(end) - seq.num_computed // self.block_size

    def _shared(self, seq: Sequence, table: Table, end: int) -> list[int]:
        """Indices in the table of the blocks to copy before writing the places up to `end`."""
        pool, shared = self._pool, []
        blocks, first = table
        place = seq.num_computed // pool.block_size
        for i in range(place - first, min(end - first, len(blocks))):
            block = blocks[i]
            if pool.ref_count(block) - self._pins.get(block, 0) > 1:
                shared.append(i)
            elif pool.is_published(block):
                self._cache.invalidate(block)
        return shared

    def _copy_on_write(self, blocks: list[int], shared: list[int]) -> None:
        """Replace the shared blocks of a table, given as indices, with private copies."""
        for i in shared:
            source, target = blocks[i], self._pool.allocate()
            self._record_copy(source, target)
            self._pool.release(source)
            blocks[i] = target

    def _record_copy(self, source: int, target: int) -> None:
        source = self._copied_from.get(source, source)
        self._pool.retain(source)
        self._pins[source] += 1
        self._copied_from[target] = source
