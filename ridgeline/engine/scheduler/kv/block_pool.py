"""The pool of KV blocks: who owns which block, and in which order idle blocks are given away.

A block is a fixed number of consecutive token positions in the KV cache (PagedAttention, Kwon et
al. 2023). The pool hands out block numbers only; the memory behind them belongs to the runner.

    owned    refs > 0                      in the table of at least one sequence
    cached   refs == 0, content published  readable again by a prefix hit, until it is given away
    free     refs == 0, content worthless

Idle (free and cached) blocks form one doubly linked list, threaded through two preallocated integer
lists, so that taking the head, appending and removing from the middle are each O(1) and allocate
nothing. Its order is the eviction order: worthless blocks at the head, then cached ones, least
recently released first. Tables are released back to front, so that of one sequence the tail is
evicted before the head: a prefix without its beginning can never be hit.

Blocks that were never given away lie between the worthless ones that came back and the cached ones,
in ascending order: the highest number given so far says how far the memory behind the pool is in
use (`tell_reach`).

Invariants: owned + cached + free == num_blocks; a block is in the list exactly when refs == 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ridgeline.errors import BadInput


def _nobody(_block: int) -> None:
    """The eviction listener of a pool without a prefix cache."""


class BlockPool:
    """`num_blocks` blocks of `block_size` positions each; every operation on one block is O(1)."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise BadInput(f"{name} must be positive", value=value, limit=">= 1")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.on_evict: Callable[[int], None] = _nobody
        self._mark = num_blocks  # the first block that `_on_reach` waits for: none
        self._on_reach: Callable[[int], int]  # since `tell_reach`
        self._refs = [0] * num_blocks
        self._published = bytearray(num_blocks)
        self._end = num_blocks  # the list's head and tail in one sentinel entry
        self._next: list[int] = [*range(1, num_blocks + 1), 0]
        self._prev: list[int] = [num_blocks, *range(num_blocks)]
        self._num_idle = num_blocks
        self._num_cached = 0

    @property
    def num_idle(self) -> int:
        """Blocks that `alloc` can still give: free and cached ones."""
        return self._num_idle

    @property
    def num_cached(self) -> int:
        return self._num_cached

    @property
    def num_free(self) -> int:
        return self._num_idle - self._num_cached

    @property
    def num_owned(self) -> int:
        return self.num_blocks - self._num_idle

    def refs(self, block: int) -> int:
        """How many owners the block has."""
        return self._refs[block]

    def is_published(self, block: int) -> bool:
        return bool(self._published[block])

    def is_private(self, block: int) -> bool:
        """One owner, and nobody can hit it: it may be written."""
        return self._refs[block] == 1 and not self._published[block]

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks `num_tokens` positions take."""
        return -(-num_tokens // self.block_size)

    def tell_reach(self, listener: Callable[[int], int]) -> None:
        """Have `listener` called with 0 now, then with the highest block given away so far, each
        time as it reaches the block number that the listener returned.
        """
        self._on_reach, self._mark = listener, listener(0)

    def alloc(self) -> int:
        """Take the idle block that is worth least; its published content, if any, is forgotten."""
        assert self._num_idle, "alloc from an exhausted pool: reserve first"
        block = self._next[self._end]
        if self._published[block]:
            self.on_evict(block)
            self._published[block] = 0
            self._num_cached -= 1
        self._unlink(block)
        self._refs[block] = 1
        if block >= self._mark:
            self._mark = self._on_reach(block)
        return block

    def alloc_many(self, count: int) -> list[int]:
        """As `count` calls of `alloc`, in one walk along the list."""
        assert count <= self._num_idle, "alloc from an exhausted pool: reserve first"
        end, after, refs, published = self._end, self._next, self._refs, self._published
        taken, block = [], after[end]
        for _ in range(count):
            if published[block]:
                self.on_evict(block)
                published[block] = 0
                self._num_cached -= 1
            refs[block] = 1
            taken.append(block)
            block = after[block]
        after[end] = block
        self._prev[block] = end
        self._num_idle -= count
        if taken and self._mark < self.num_blocks and (last := max(taken)) >= self._mark:
            self._mark = self._on_reach(last)
        return taken

    def retain(self, block: int) -> None:
        """One owner more. A cached block comes back to life."""
        if self._refs[block] == 0:
            self._num_cached -= self._published[block]
            self._unlink(block)
        self._refs[block] += 1

    def release(self, block: int) -> None:
        """One owner less; the last one puts the block back into the list."""
        assert self._refs[block] > 0, f"block {block} released more often than it was taken"
        self._refs[block] -= 1
        if self._refs[block] == 0:
            self._num_cached += self._published[block]
            self._link(block, at_tail=bool(self._published[block]))

    def release_all(self, blocks: Sequence[int]) -> None:
        """Release a table back to front, so that its tail is evicted first."""
        refs, published, end = self._refs, self._published, self._end
        before, after = self._prev, self._next
        first, num_freed = after[end], 0
        for block in reversed(blocks):
            if refs[block] != 1 or published[block]:
                self.release(block)
                first = after[end]
                continue
            refs[block] = 0  # as `release` does for most blocks, without its calls
            after[end], after[block] = block, first
            before[first], before[block] = block, end
            first = block
            num_freed += 1
        self._num_idle += num_freed

    def publish(self, block: int) -> None:
        """Mark an owned block's content as readable by others; it must not be written any more."""
        assert self._refs[block] > 0, f"block {block} published without an owner"
        self._published[block] = 1

    def unpublish(self, block: int) -> None:
        """Take the mark back; an idle block moves to the head of the list, to be given away
        first."""
        if self._published[block] and self._refs[block] == 0:
            self._num_cached -= 1
            self._unlink(block)
            self._link(block, at_tail=False)
        self._published[block] = 0

    def idle_blocks(self) -> list[int]:
        """The list in eviction order: for tests and for looking at, O(num_blocks)."""
        found, block = [], self._next[self._end]
        while block != self._end:
            found.append(block)
            block = self._next[block]
        return found

    def _link(self, block: int, *, at_tail: bool) -> None:
        before = self._prev[self._end] if at_tail else self._end
        after = self._next[before]
        self._next[before] = self._prev[after] = block
        self._prev[block], self._next[block] = before, after
        self._num_idle += 1

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before], self._prev[after] = after, before
        self._num_idle -= 1
