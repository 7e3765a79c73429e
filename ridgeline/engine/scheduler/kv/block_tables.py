"""Block tables: sharing by reference, growing, and copying before a shared block is written.

    leader   [ 4 | 9 | 2 ]        prompt of 40 tokens, block size 16: block 2 is half full
    child    [ 4 | 9 | 2 ]        forked: the same blocks, one reference more each
    child    [ 4 | 9 | 7 ]        before its first write: 2 is copied to 7

Rule: a sequence writes a block only when it is the sole owner and nobody can hit it. Otherwise the
block is copied first (owners besides it), or its cache entry is forgotten (published, but sole
owner).

A step's copies may be done in any order or at once: no block is both read and written by them. A
copy from a block that is itself a copy's destination is redirected to the origin, and an origin is
pinned until the plan is complete, so that it cannot be given to another sequence meanwhile. The
last sharer writes the origin in place: copies come before all runs.
"""

from __future__ import annotations

from collections import Counter

from ridgeline.engine.scheduler.kv.block_pool import BlockPool
from ridgeline.engine.scheduler.kv.prefix_cache import BlockCache
from ridgeline.engine.scheduler.sequence import Sequence


class BlockTables:
    """Every change of a sequence's block table goes through here."""

    def __init__(self, pool: BlockPool, cache: BlockCache) -> None:
        self._pool, self._cache = pool, cache
        self._copied_from: dict[int, int] = {}  # destination -> origin, of the plan being made
        self._pins: Counter[int] = Counter()  # references that the plan holds on origins

    def adopt(self, seq: Sequence, blocks: list[int], computed: int, now_s: float) -> None:
        """Begin `seq`, which has no blocks, with the first `computed` tokens found in `blocks`."""
        assert not seq.blocks and computed < seq.known
        for block in blocks:
            self._pool.retain(block)
        self._cache.touch(blocks, now_s)
        seq.blocks, seq.computed = list(blocks), computed
        seq.num_published = computed // self._pool.block_size

    def num_needed(self, known: int, blocks: list[int], computed: int) -> int:
        """Idle blocks it takes to adopt `blocks` and have room for `known` tokens of one's own."""
        partial = computed < len(blocks) * self._pool.block_size
        revived = sum(not self._pool.refs(block) for block in blocks)
        return self._pool.blocks_for(known) - len(blocks) + partial + revived

    def reserve(self, seq: Sequence, num_tokens: int) -> bool:
        """Make the next `num_tokens` positions writable: all of them, or nothing is changed."""
        pool, blocks = self._pool, seq.blocks
        place = seq.computed // pool.block_size
        if num_tokens == 1 and place < len(blocks) and pool.is_private(blocks[place]):
            return True  # nearly always: a place is left in a block that only `seq` can see
        num_blocks = pool.blocks_for(seq.computed + num_tokens)
        num_more = num_blocks - len(blocks)
        shared = self._shared(seq, num_blocks)
        if pool.num_idle < max(num_more, 0) + len(shared):
            return False
        for i in shared:
            blocks[i] = self._copy(blocks[i])
        if num_more > 0:
            blocks += pool.alloc_many(num_more)
        return True

    def release(self, seq: Sequence, now_s: float) -> None:
        """Give every block back."""
        self._cache.touch(seq.blocks, now_s)
        self._pool.release_all(seq.blocks)
        seq.blocks = []

    def trim(self, seq: Sequence) -> None:
        """Give back the blocks behind the known tokens: where rejected drafts stood."""
        num_blocks = self._pool.blocks_for(seq.known)
        while len(seq.blocks) > num_blocks:
            self._pool.release(seq.blocks.pop())

    @property
    def block_size(self) -> int:
        return self._pool.block_size

    def num_of_branch(self, seq: Sequence, num_tokens: int) -> int:
        """Blocks of `branch`."""
        return self._pool.blocks_for(seq.computed + num_tokens) - seq.computed // self.block_size

    def branch(self, seq: Sequence, num_tokens: int) -> list[int]:
        """Private blocks in which the next `num_tokens` positions have a place of their own; what
        is known of the first of them is copied. There must be as many idle ones."""
        fresh = self._pool.alloc_many(self.num_of_branch(seq, num_tokens))
        place, inside = divmod(seq.computed, self.block_size)
        if inside:
            self._note_copy(seq.blocks[place], fresh[0])
        return fresh

    def graft(self, seq: Sequence, fresh: list[int]) -> None:
        """A branch's blocks take the place of the sequence's own."""
        place = seq.computed // self.block_size
        self._pool.release_all(seq.blocks[place:])
        seq.blocks[place:] = fresh

    def cut(self, fresh: list[int]) -> None:
        """Give a branch's blocks back."""
        self._pool.release_all(fresh)

    def num_missing(self, seq: Sequence, num_tokens: int) -> int:
        """Blocks to be allocated before the next `num_tokens` positions have a place."""
        return max(0, self._pool.blocks_for(seq.computed + num_tokens) - len(seq.blocks))

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """The (from, to) copies of the plan that is now complete."""
        if not self._copied_from:
            return ()
        copies = tuple((origin, to) for to, origin in self._copied_from.items())
        self._pool.release_all(list(self._pins.elements()))
        self._copied_from = {}
        self._pins.clear()
        return copies

    def _shared(self, seq: Sequence, num_blocks: int) -> list[int]:
        """Which of the first `num_blocks` places, from the first unwritten position on, others own
        too."""
        pool, shared = self._pool, []
        for i in range(seq.computed // pool.block_size, min(num_blocks, len(seq.blocks))):
            block = seq.blocks[i]
            if pool.refs(block) - self._pins.get(block, 0) > 1:
                shared.append(i)
            elif pool.is_published(block):
                self._cache.forget(block)
        return shared

    def _copy(self, block: int) -> int:
        """A private copy of `block`; the sequence's reference to it is dropped."""
        to = self._pool.alloc()
        self._note_copy(block, to)
        self._pool.release(block)
        return to

    def _note_copy(self, block: int, to: int) -> None:
        origin = self._copied_from.get(block, block)
        self._pool.retain(origin)
        self._pins[origin] += 1
        self._copied_from[to] = origin
