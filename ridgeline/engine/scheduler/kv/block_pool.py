"""The pool of KV cache blocks: who owns which block, and in which order idle blocks are reused.

A block holds the keys and values of a fixed number of consecutive token positions (PagedAttention,
Kwon et al. 2023). The pool hands out block numbers only; the memory behind them is the runner's.

    owned    ref_count > 0                     in the block table of at least one sequence
    cached   ref_count == 0, published         readable by a prefix hit until it is reused
    free     ref_count == 0, not published     content is worthless

Idle (free and cached) blocks form one doubly linked list threaded through two preallocated integer
lists, so taking the head, appending, and removing from the middle are each O(1) and allocate
nothing. The order of the list is the eviction order: worthless blocks first, then cached ones,
least recently released first. Block tables are released back to front, so that a sequence's tail is
evicted before its head: a prefix without its beginning can never be hit.

Blocks that were never used are placed between the worthless blocks that came back and the cached
ones, in ascending order. The highest number handed out so far therefore shows how far the memory
behind the pool is in use (`watch_high_water`).

Invariants: owned + cached + free == num_blocks; a block is in the list exactly if ref_count == 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ridgeline.errors import BadInput


def _ignore(_block: int) -> None:
    """The eviction listener of a pool without a prefix cache."""


class BlockPool:
    """`num_blocks` blocks of `block_size` positions; every operation on a single block is O(1).

    `on_evict` is called with a published block before its content is lost.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise BadInput(f"{name} must be positive", value=value, limit=">= 1")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.on_evict: Callable[[int], None] = _ignore
        self._mark = num_blocks  # the first block that `_on_high_water` is due for: none
        self._on_high_water: Callable[[int], int]  # set by `watch_high_water`
        self._refs = [0] * num_blocks
        self._published = bytearray(num_blocks)
        self._pinned: set[int] = set()
        self._end = num_blocks  # one sentinel entry is both head and tail of the list
        self._next: list[int] = [*range(1, num_blocks + 1), 0]
        self._prev: list[int] = [num_blocks, *range(num_blocks)]
        self._num_idle = num_blocks
        self._num_cached = 0

    @property
    def num_idle(self) -> int:
        """Blocks that `allocate` can still hand out: free and cached ones."""
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

    def ref_count(self, block: int) -> int:
        """The number of owners of a block."""
        return self._refs[block]

    def is_published(self, block: int) -> bool:
        """True if a prefix hit may read the block."""
        return bool(self._published[block])

    def is_private(self, block: int) -> bool:
        """True if the block has one owner and no prefix hit can read it: it may be written."""
        return self._refs[block] == 1 and not self._published[block]

    def num_blocks_for(self, num_tokens: int) -> int:
        """The number of blocks that hold `num_tokens` positions."""
        return -(-num_tokens // self.block_size)

    def watch_high_water(self, listener: Callable[[int], int]) -> None:
        """Report to `listener` how far the pool is in use.

        It is called with 0 now, and returns the block number at which to call it again. It is then
        called with the highest block handed out so far.
        """
        self._on_high_water, self._mark = listener, listener(0)

    def allocate(self) -> int:
        """Take the least valuable idle block; its published content, if any, is lost."""
        assert self._num_idle, "allocate from an exhausted pool: reserve first"
        if self._pinned:
            self._pass_pinned(1)
        block = self._next[self._end]
        if self._published[block]:
            self.on_evict(block)
            self._published[block] = 0
            self._num_cached -= 1
        self._unlink(block)
        self._refs[block] = 1
        if block >= self._mark:
            self._mark = self._on_high_water(block)
        return block

    def allocate_many(self, count: int) -> list[int]:
        """The same as `count` calls of `allocate`, in one walk along the list."""
        assert count <= self._num_idle, "allocate from an exhausted pool: reserve first"
        if self._pinned:
            self._pass_pinned(count)
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
            self._mark = self._on_high_water(last)
        return taken

    def retain(self, block: int) -> None:
        """Add an owner. A cached block leaves the idle list."""
        if self._refs[block] == 0:
            self._num_cached -= self._published[block]
            self._unlink(block)
        self._refs[block] += 1

    def release(self, block: int) -> None:
        """Drop an owner; a block without owners returns to the idle list."""
        assert self._refs[block] > 0, f"block {block} released more often than it was taken"
        self._refs[block] -= 1
        if self._refs[block] == 0:
            self._num_cached += self._published[block]
            self._link(block, at_tail=bool(self._published[block]))

    def release_all(self, blocks: Sequence[int]) -> None:
        """Release a block table back to front, so that its tail is evicted first."""
        refs, published, end = self._refs, self._published, self._end
        before, after = self._prev, self._next
        first, num_freed = after[end], 0
        for block in reversed(blocks):
            if refs[block] != 1 or published[block]:
                self.release(block)
                first = after[end]
                continue
            # Nearly every block: `release` inlined.
            refs[block] = 0
            after[end], after[block] = block, first
            before[first], before[block] = block, end
            first = block
            num_freed += 1
        self._num_idle += num_freed

    def publish(self, block: int) -> None:
        """Make an owned block readable by prefix hits; it must not be written any more."""
        assert self._refs[block] > 0, f"block {block} published without an owner"
        self._published[block] = 1

    def unpublish(self, block: int) -> None:
        """Undo `publish`; an idle block moves to the head of the list, to be reused first."""
        if self._published[block] and self._refs[block] == 0:
            self._num_cached -= 1
            self._unlink(block)
            self._link(block, at_tail=False)
        self._published[block] = 0

    def pin(self, block: int) -> None:
        """Evict the block after all that are not pinned."""
        self._pinned.add(block)

    def unpin(self, block: int) -> None:
        """Undo `pin`."""
        self._pinned.discard(block)

    def _pass_pinned(self, count: int) -> None:
        """Move pinned blocks away from the head, until `count` others or all have passed."""
        block, num_others, num_pinned = self._next[self._end], 0, 0
        pinned_idle = sum([not self._refs[own] for own in self._pinned])
        while num_others < count and num_pinned < pinned_idle:
            following = self._next[block]
            if block in self._pinned:
                self._unlink(block)
                self._link(block, at_tail=True)
                num_pinned += 1
            else:
                num_others += 1
            block = following

    def idle_blocks(self) -> list[int]:
        """The idle list in eviction order, in O(num_blocks): for tests and debugging."""
        blocks, block = [], self._next[self._end]
        while block != self._end:
            blocks.append(block)
            block = self._next[block]
        return blocks

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
