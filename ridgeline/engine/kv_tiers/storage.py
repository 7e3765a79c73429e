"""Moves blocks between memory slots and storage, on separate threads.

    engine thread    store(keys, pinned slots) ──queue──▶ writer ──▶ every tier, one extent a burst
                     load(keys) ─────────────────queue──▶ reader ──▶ reserved slots ──▶ published

The queue of writes is bounded in bytes: what does not fit is dropped, and never delays a step.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from ridgeline.engine.kv_tiers.block_slab import BlockSlab
from ridgeline.engine.kv_tiers.extent_tier import ExtentTier
from ridgeline.engine.scheduler.kv.memory_tier import Key, MemoryTier

_LOG = logging.getLogger(__name__)
EXTENT_BYTES = 8 << 20
"""Bytes of blocks in one extent, roughly: large reads are faster, small ones waste less."""

NUM_READERS = 2


class TieredStorage:
    """The tiers below memory, fastest first.

    `on_loaded` is called by a reader thread after each load.
    """

    def __init__(self, memory: MemoryTier, slab: BlockSlab, tiers: Sequence[ExtentTier]) -> None:
        self.tiers, self.on_loaded = tuple(tiers), _ignore
        self.num_dropped = 0
        self._memory, self._slab = memory, slab
        self._per_extent = max(1, EXTENT_BYTES // slab.block_bytes)
        # Half of the slots at most wait to be written, so that the other half can be used.
        self._max_queued = max(1, memory.num_slots // 2)
        self._lock = threading.Lock()
        self._queued: list[tuple[Key, int]] = []
        self._num_reserved = 0
        self._writer = ThreadPoolExecutor(1, "ridgeline-kv-write")
        self._reader = ThreadPoolExecutor(NUM_READERS, "ridgeline-kv-read")
        self._writes: Future[None] | None = None
        self._refreshing = False
        for tier in self.tiers:
            tier.refresh()

    def find(self, key: Key) -> str | None:
        return next((tier.name for tier in self.tiers if key in tier), None)

    def load_s(self, keys: Sequence[Key]) -> float:
        seconds = 0.0
        for tier, own in self._by_tier(keys):
            seconds += tier.rate.seconds(len(own) * self._slab.block_bytes)
        return seconds

    def load(self, keys: Sequence[Key]) -> Callable[[], bool] | None:
        with self._lock:
            if self._num_reserved + len(keys) > self._memory.num_slots // 2:
                return None
            self._num_reserved += len(keys)
        loads = [
            self._reader.submit(self._read, tier, own[i : i + self._per_extent])
            for tier, own in self._by_tier(keys)
            for i in range(0, len(own), self._per_extent)
        ]
        num_left = len(keys) - sum(len(own) for _, own in self._by_tier(keys))
        self._release(num_left)
        return lambda: all(load.done() for load in loads)

    def store(self, blocks: Sequence[tuple[Key, int]]) -> None:
        with self._lock:
            room = self._max_queued - len(self._queued)
            kept, dropped = blocks[: max(0, room)], blocks[max(0, room) :]
            self._queued += kept
            self.num_dropped += len(dropped)
            if self._writes is None and self._queued:
                self._writes = self._writer.submit(self._write_queued)
        self._memory.unpin(slot for _, slot in dropped)

    def forget(self, keys: Sequence[Key]) -> None:
        for tier in self.tiers:
            self._reader.submit(tier.forget, keys)

    def refresh(self) -> None:
        if self._refreshing or not any(tier.is_stale for tier in self.tiers):
            return
        self._refreshing = True
        self._reader.submit(self._refresh)

    @property
    def is_busy(self) -> bool:
        """Whether blocks wait to be written, or are being written."""
        return self._writes is not None

    def close(self, timeout_s: float) -> None:
        """Write what is queued, for `timeout_s` at most, and stop the threads."""
        with self._lock:
            writes = self._writes
        if writes is not None:
            wait([writes], timeout_s)
        self._writer.shutdown(wait=False, cancel_futures=True)
        self._reader.shutdown(wait=False, cancel_futures=True)

    # -- on the threads

    def _by_tier(self, keys: Sequence[Key]) -> list[tuple[ExtentTier, list[Key]]]:
        """The blocks that each tier is asked for: the first one that has them."""
        parts: list[tuple[ExtentTier, list[Key]]] = []
        left = list(keys)
        for tier in self.tiers:
            if own := [key for key in left if key in tier]:
                parts.append((tier, own))
                left = [key for key in left if key not in tier]
        return parts

    def _read(self, tier: ExtentTier, keys: Sequence[Key]) -> None:
        slots: dict[Key, int] = {}
        try:
            for key in keys:
                slot = None if key in self._memory else self._memory.reserve()
                if slot is not None:
                    slots[key] = slot
            intact = tier.read(list(slots), lambda key: self._slab.row(slots[key]))
            for key in list(slots):
                slot = slots.pop(key)
                if key in intact:
                    self._memory.publish(key, slot, tier.name)
                else:
                    self._memory.give_back(slot)
        except Exception:
            _LOG.exception("a load from the KV tier %s failed", tier.name)
            for slot in slots.values():
                self._memory.give_back(slot)
        finally:
            self._release(len(keys))
            self.on_loaded()

    def _release(self, num_slots: int) -> None:
        with self._lock:
            self._num_reserved -= num_slots

    def _write_queued(self) -> None:
        while True:
            with self._lock:
                blocks, self._queued = (
                    self._queued[: self._per_extent],
                    self._queued[self._per_extent :],
                )
                if not blocks:
                    self._writes = None
                    return
            try:
                self._write(blocks)
            except Exception:
                _LOG.exception("a write to the KV tiers failed")
            finally:
                self._memory.unpin(slot for _, slot in blocks)

    def _write(self, blocks: Sequence[tuple[Key, int]]) -> None:
        for tier in self.tiers:
            new = [(key, slot) for key, slot in blocks if key not in tier]
            if new:
                rows = [self._slab.row(slot) for _, slot in new]
                tier.write([key for key, _ in new], rows)

    def _refresh(self) -> None:
        try:
            for tier in self.tiers:
                if tier.is_stale:
                    tier.refresh()
        finally:
            self._refreshing = False


def _ignore() -> None:
    """No request waits for the result."""
