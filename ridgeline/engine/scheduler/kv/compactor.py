"""Evicts tokens of a sequence by moving those that it keeps into fewer blocks."""

from __future__ import annotations

from ridgeline.engine.scheduler.kv.block_pool import BlockPool
from ridgeline.engine.scheduler.kv.eviction import KvCompaction
from ridgeline.engine.scheduler.kv.prefix_cache import BlockCache
from ridgeline.engine.scheduler.sequence import Sequence


class Compactor:
    """The compactions of the plan being made, by sequence id.

    The blocks that a compaction reads stay taken until the plan is complete, so that nothing else
    in the plan writes to them before it has read them.
    """

    def __init__(self, pool: BlockPool, cache: BlockCache) -> None:
        self._pool, self._cache = pool, cache
        self._planned: dict[int, KvCompaction] = {}
        self._emptied: list[int] = []  # blocks to release once the plan is complete
        self.num_evicted = 0  # tokens, since this was created

    def compact(self, seq: Sequence) -> bool:
        """Evict what is due before the sequence's next token; False if blocks are missing.

        Kept tokens move to blocks of this sequence alone: to its own, except those that others
        share. Blocks that a prefix hit can read are spared while others are idle.
        """
        eviction, pool = seq.eviction, self._pool
        if eviction is None or eviction.is_sliding:
            return True
        dropped = eviction.dropped_at(seq.num_computed)
        if dropped <= seq.num_dropped:
            return True
        num_cached = seq.num_computed - seq.num_dropped
        num_kept = seq.num_computed - dropped
        num_places = pool.num_blocks_for(num_kept)
        sources = seq.blocks[: pool.num_blocks_for(num_cached)]
        reused = [i for i, block in enumerate(sources) if pool.is_private(block)][:num_places]
        num_taken = max(0, num_places - len(reused) - pool.num_idle)
        if num_taken:
            cached = [
                i
                for i, block in enumerate(sources)
                if pool.is_published(block) and pool.ref_count(block) == 1
            ]
            if num_taken > len(cached):
                return False
            for i in cached[:num_taken]:
                self._cache.invalidate(sources[i])
            reused += cached[:num_taken]
        targets = [sources[i] for i in reused] + pool.allocate_many(num_places - len(reused))
        kept = set(reused)
        self._emptied += [block for i, block in enumerate(seq.blocks) if i not in kept]
        seq.blocks, seq.num_dropped = targets, dropped
        self._planned[seq.id] = KvCompaction(
            seq.id,
            seq.state_slot,
            eviction,
            num_cached,
            num_kept,
            tuple(sources),
            tuple(targets),
        )
        self.num_evicted += num_cached - num_kept
        return True

    @property
    def holds_blocks(self) -> bool:
        """Whether blocks come free only when the plan being made is complete."""
        return bool(self._emptied)

    def moves(self, seq: Sequence) -> bool:
        """Whether this plan moves the sequence's keys and values."""
        return seq.id in self._planned

    def cancel(self, seq: Sequence) -> None:
        """The sequence has lost its blocks: nothing of it is moved."""
        self._planned.pop(seq.id, None)

    def take(self) -> tuple[KvCompaction, ...]:
        """The compactions of the plan, which is now complete; releases the blocks they empty."""
        if not self._planned and not self._emptied:
            return ()
        planned = tuple(self._planned.values())
        self._pool.release_all(self._emptied)
        self._planned, self._emptied = {}, []
        return planned
