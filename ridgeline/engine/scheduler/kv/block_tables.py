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
"""

from __future__ import annotations

from collections import Counter

from ridgeline.engine.scheduler.kv.block_pool import BlockPool
from ridgeline.engine.scheduler.kv.prefix_cache import BlockCache
from ridgeline.engine.scheduler.sequence import Sequence


class BlockTables:
    """Makes every change to a sequence's block table."""

    def __init__(self, pool: BlockPool, cache: BlockCache) -> None:
        self._pool, self._cache = pool, cache
        self._copied_from: dict[int, int] = {}  # target -> source, of the plan being made
        self._pins: Counter[int] = Counter()  # references the plan holds on sources

    @property
    def block_size(self) -> int:
        return self._pool.block_size

    def adopt_prefix(
        self, seq: Sequence, blocks: list[int], num_computed: int, now_s: float
    ) -> None:
        """Start `seq`, which has no blocks, from `blocks` that hold its first tokens."""
        assert not seq.blocks and num_computed < seq.num_known
        for block in blocks:
            self._pool.retain(block)
        self._cache.touch(blocks, now_s)
        seq.blocks, seq.num_computed = list(blocks), num_computed
        seq.num_published = num_computed // self._pool.block_size

    def num_blocks_needed(self, num_known: int, blocks: list[int], num_computed: int) -> int:
        """Idle blocks it takes to adopt `blocks` and make all `num_known` positions writable."""
        partial = num_computed < len(blocks) * self._pool.block_size  # copied on write
        revived = sum(not self._pool.ref_count(block) for block in blocks)
        return self._pool.num_blocks_for(num_known) - len(blocks) + partial + revived

    def reserve(self, seq: Sequence, num_tokens: int) -> bool:
        """Make the next `num_tokens` positions writable; changes nothing if not all can be."""
        pool, blocks = self._pool, seq.blocks
        place = seq.num_computed // pool.block_size
        if num_tokens == 1 and place < len(blocks) and pool.is_private(blocks[place]):
            return True  # nearly every decode: there is room in a private block
        num_blocks = pool.num_blocks_for(seq.num_computed + num_tokens)
        num_more = num_blocks - len(blocks)
        shared = self._shared(seq, num_blocks)
        if pool.num_idle < max(num_more, 0) + len(shared):
            return False
        for i in shared:
            source, target = blocks[i], pool.allocate()
            self._record_copy(source, target)
            pool.release(source)
            blocks[i] = target
        if num_more > 0:
            blocks += pool.allocate_many(num_more)
        return True

    def release(self, seq: Sequence, now_s: float) -> None:
        """Return all blocks of a sequence."""
        self._cache.touch(seq.blocks, now_s)
        self._pool.release_all(seq.blocks)
        seq.blocks = []

    def trim(self, seq: Sequence) -> None:
        """Return the blocks after the known tokens, which held rejected drafts."""
        num_blocks = self._pool.num_blocks_for(seq.num_known)
        while len(seq.blocks) > num_blocks:
            self._pool.release(seq.blocks.pop())

    def num_missing_blocks(self, seq: Sequence, num_tokens: int) -> int:
        """Blocks to allocate before the next `num_tokens` positions have one."""
        return max(0, self._pool.num_blocks_for(seq.num_computed + num_tokens) - len(seq.blocks))

    def num_branch_blocks(self, seq: Sequence, num_tokens: int) -> int:
        """The number of blocks that `allocate_branch` takes."""
        end = seq.num_computed + num_tokens
        return self._pool.num_blocks_for(end) - seq.num_computed // self.block_size

    def allocate_branch(self, seq: Sequence, num_tokens: int) -> list[int]:
        """Private blocks for an alternative to the next `num_tokens` positions of `seq`.

        The computed part of the first block is copied. The pool must have enough idle blocks.
        """
        blocks = self._pool.allocate_many(self.num_branch_blocks(seq, num_tokens))
        place, inside = divmod(seq.num_computed, self.block_size)
        if inside:
            self._record_copy(seq.blocks[place], blocks[0])
        return blocks

    def accept_branch(self, seq: Sequence, blocks: list[int]) -> None:
        """Replace the sequence's own blocks with those of a branch."""
        place = seq.num_computed // self.block_size
        self._pool.release_all(seq.blocks[place:])
        seq.blocks[place:] = blocks

    def release_branch(self, blocks: list[int]) -> None:
        """Return the blocks of a rejected branch."""
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

    def _shared(self, seq: Sequence, num_blocks: int) -> list[int]:
        """Indices of the blocks to copy before writing, from the first unwritten position on."""
        pool, shared = self._pool, []
        for i in range(seq.num_computed // pool.block_size, min(num_blocks, len(seq.blocks))):
            block = seq.blocks[i]
            if pool.ref_count(block) - self._pins.get(block, 0) > 1:
                shared.append(i)
            elif pool.is_published(block):
                self._cache.invalidate(block)
        return shared

    def _record_copy(self, source: int, target: int) -> None:
        source = self._copied_from.get(source, source)
        self._pool.retain(source)
        self._pins[source] += 1
        self._copied_from[target] = source
