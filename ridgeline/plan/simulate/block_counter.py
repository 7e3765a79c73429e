"""A block pool that only counts, for simulations without a prefix cache."""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.engine.scheduler.kv.block_pool import BlockPool
from ridgeline.errors import CannotRun


class CountingBlockPool(BlockPool):
    """A `BlockPool` in which every block is number 0; it answers the same about block counts.

    It cannot publish or share blocks, and does not support background requests, whose blocks the
    scheduler looks at one by one.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(1, block_size)
        self.num_blocks = self._num_idle = num_blocks

    def is_private(self, block: int) -> bool:
        return True

    def allocate(self) -> int:
        assert self._num_idle, "allocate from an exhausted pool: reserve first"
        self._num_idle -= 1
        return 0

    def allocate_many(self, count: int) -> list[int]:
        assert count <= self._num_idle, "allocate from an exhausted pool: reserve first"
        self._num_idle -= count
        return [0] * count

    def release(self, block: int) -> None:
        self._num_idle += 1

    def release_all(self, blocks: Sequence[int]) -> None:
        self._num_idle += len(blocks)

    def ref_count(self, block: int) -> int:
        return 1

    def retain(self, block: int) -> None:
        raise CannotRun("a CountingBlockPool cannot share blocks")

    def publish(self, block: int) -> None:
        raise CannotRun("a CountingBlockPool cannot publish blocks")
