"""The memory tier: which evicted blocks have a copy in host memory, and in which slot.

The tier numbers slots; the bytes behind them are the engine's (`BlockSlab`). A slot is in one of
four states:

    free       no content
    filled     found by its key, evicted least recently used first
    pinned     filled, and not evicted while a transfer or a write reads it
    reserved   being filled by a thread that loads from storage: found by no key yet

With a lock, every method may be called from any thread.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

Key = bytes
"""The digest of a block, followed by one byte for its group of layers."""


def block_key(group: int, digest: bytes) -> Key:
    """The key of a block outside the prefix cache."""
    return digest + bytes((group,))


class MemoryTier:
    """`num_slots` slots, filled and evicted by recency.

    `lock` guards every access; none is needed where one thread does everything.
    """

    def __init__(self, num_slots: int, lock: AbstractContextManager[object] | None = None) -> None:
        self.num_slots = num_slots
        self._lock = nullcontext() if lock is None else lock
        self._slot_of: OrderedDict[Key, int] = OrderedDict()  # least recently used first
        self._source_of: dict[Key, str] = {}  # the tier a block was loaded from
        self._free = list(range(num_slots - 1, -1, -1))
        self._pins: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, key: Key) -> bool:
        return key in self._slot_of

    def pin(self, key: Key) -> int | None:
        """The slot of a block, which is kept until `unpin`; None if the block is not here."""
        with self._lock:
            slot = self._slot_of.get(key)
            if slot is not None:
                self._slot_of.move_to_end(key)
                self._pins[slot] += 1
            return slot

    def unpin(self, slots: Iterable[int]) -> None:
        """Undo one `pin` of each slot."""
        with self._lock:
            for slot in slots:
                self._pins[slot] -= 1
                if not self._pins[slot]:
                    del self._pins[slot]

    def touch(self, key: Key) -> bool:
        """Mark a block as just used; False if it is not here."""
        with self._lock:
            if key not in self._slot_of:
                return False
            self._slot_of.move_to_end(key)
            return True

    def reserve(self) -> int | None:
        """A slot to fill: a free one, or that of the least recently used block without a pin."""
        with self._lock:
            if self._free:
                return self._free.pop()
            key = next((k for k, slot in self._slot_of.items() if slot not in self._pins), None)
            if key is None:
                return None
            self._source_of.pop(key, None)
            return self._slot_of.pop(key)

    def publish(self, key: Key, slot: int, source: str = "memory", *, pinned: bool = False) -> bool:
        """Make a reserved slot findable; False, and the slot is free, if the block is here.

        `source` is the tier that the content was loaded from. With `pinned`, `unpin` it later.
        """
        with self._lock:
            if key in self._slot_of:
                self._free.append(slot)
                return False
            self._slot_of[key] = slot
            self._source_of[key] = source
            if pinned:
                self._pins[slot] += 1
            return True

    def give_back(self, slot: int) -> None:
        """Free a reserved slot that was not filled."""
        with self._lock:
            self._free.append(slot)

    def drop(self, key: Key) -> None:
        """Forget a block; one that is pinned stays."""
        with self._lock:
            slot = self._slot_of.get(key)
            if slot is None or slot in self._pins:
                return
            del self._slot_of[key]
            self._source_of.pop(key, None)
            self._free.append(slot)

    def take_source(self, key: Key) -> str:
        """The tier a block was loaded from, the first time; "memory" from then on."""
        with self._lock:
            source = self._source_of.get(key, "memory")
            if key in self._slot_of:
                self._source_of[key] = "memory"
            return source
