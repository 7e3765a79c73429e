"""Which replica has seen which prefix, within bounds.

A prefix is a list of block ids; the id at one depth stands for all blocks up to it. Each replica
keeps its most recently used blocks, as its own cache does: the rest is forgotten.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection

MAX_BLOCKS = 1 << 16
"""Blocks remembered per replica: about 10 MB."""

_Block = tuple[int, int]  # depth, id


class PrefixIndex:
    """Remembers up to `max_blocks` blocks per replica."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._holders: dict[_Block, dict[int, None]] = {}
        self._blocks: dict[int, OrderedDict[_Block, None]] = {}

    def num_blocks(self, replica: int) -> int:
        """How many blocks the replica is known to have seen."""
        return len(self._blocks.get(replica, ()))

    def longest(self, prefix: tuple[int, ...], active: Collection[int]) -> int | None:
        """The active replica with the longest prefix, and of several the one that saw it last."""
        for depth in range(len(prefix) - 1, -1, -1):
            for replica in reversed(self._holders.get((depth, prefix[depth]), {})):
                if replica in active:
                    return replica
        return None

    def num_matched(self, prefix: tuple[int, ...], replica: int) -> int:
        """Leading blocks of `prefix` that the replica has seen."""
        own = self._blocks.get(replica)
        if not own:
            return 0
        # a block is there only with all before it: `add` keeps heads last
        depths = range(len(prefix))
        return bisect_left(depths, True, key=lambda depth: (depth, prefix[depth]) not in own)

    def add(self, prefix: tuple[int, ...], replica: int) -> None:
        """The replica gets a prompt with this prefix."""
        own = self._blocks.setdefault(replica, OrderedDict())
        for block in reversed(list(enumerate(prefix))):  # a head outlives its tails
            if block in own:
                own.move_to_end(block)
            else:
                own[block] = None
            holders = self._holders.get(block)
            if holders is None:
                self._holders[block] = {replica: None}
            else:
                holders[replica] = None
        while len(own) > self._max_blocks:
            self._forget(own.popitem(last=False)[0], replica)

    def remove(self, replica: int) -> None:
        """The replica lost its cache."""
        for block in self._blocks.pop(replica, ()):
            self._forget(block, replica)

    def _forget(self, block: _Block, replica: int) -> None:
        holders = self._holders[block]
        del holders[replica]
        if not holders:
            del self._holders[block]
