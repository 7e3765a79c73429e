"""Tiers of the KV cache on a virtual clock: the engine's decisions, with modelled transfers.

`CacheTiers` decides what is saved, loaded and declined, as in the engine. What the engine's threads
do is modelled: copies between pool and memory take part of the step that they belong to, loads from
files end after their bytes over the bandwidth, one after another. Writes to files take no time.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec

from ridgeline.engine.scheduler.kv.cache_tiers import CacheTiers, NoStorage, Rate, TierTotals
from ridgeline.engine.scheduler.kv.memory_tier import Key, MemoryTier
from ridgeline.engine.scheduler.kv.prefix_cache import PrefixCache
from ridgeline.engine.scheduler.kv.tiers import (
    DIRECTORY_BYTES,
    GUESSED_DISK,
    GUESSED_MEMORY_BYTES_S,
    MIN_SLOTS,
    STAGING_BYTES,
)
from ridgeline.engine.scheduler.plan import StepPlan
from ridgeline.engine.scheduler.scheduler import Scheduler


class TierSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes in bytes and bandwidths in bytes per second of the tiers below one prefix cache.

    `memory_bytes` None: blocks only pass through memory, as in the engine. `file_bytes` None: there
    are no files.
    """

    memory_bytes: int | None = None
    file_bytes: int | None = None
    memory_bytes_s: float = GUESSED_MEMORY_BYTES_S
    file_bytes_s: float = GUESSED_DISK[0]

    @property
    def exist(self) -> bool:
        """Whether there is any tier."""
        return self.memory_bytes is not None or self.file_bytes is not None


def tier_sizes(
    memory_bytes: int | None,
    directory_bytes: int | None,
    has_directory: bool,
    rates: tuple[float | None, float | None] = (None, None),
) -> TierSizes:
    """The tiers that an engine's settings describe; `rates` of memory and files where known."""
    memory_bytes_s, file_bytes_s = rates
    return TierSizes(
        memory_bytes=memory_bytes,
        file_bytes=(directory_bytes or DIRECTORY_BYTES) if has_directory else None,
        memory_bytes_s=memory_bytes_s or GUESSED_MEMORY_BYTES_S,
        file_bytes_s=file_bytes_s or GUESSED_DISK[0],
    )


class SimulatedFiles:
    """Storage that holds the keys of `max_blocks` blocks, least recently written evicted first.

    `advance` moves its clock; loads end in between.
    """

    name = "disk"

    def __init__(self, memory: MemoryTier, max_blocks: int, block_bytes: int, rate: Rate) -> None:
        self._memory, self._max_blocks, self._block_bytes = memory, max_blocks, block_bytes
        self._rate, self._now_s, self._idle_s = rate, 0.0, 0.0
        self._stored: OrderedDict[Key, None] = OrderedDict()
        self._loads: list[tuple[float, tuple[Key, ...]]] = []  # a heap
        self._num_reserved = 0

    def find(self, key: Key) -> str | None:
        return self.name if key in self._stored else None

    def refresh(self) -> None:
        pass

    def load_s(self, keys: Sequence[Key]) -> float:
        return self._rate.seconds(len(keys) * self._block_bytes)

    def load(self, keys: Sequence[Key]) -> Callable[[], bool] | None:
        if self._num_reserved + len(keys) > self._memory.num_slots // 2:
            return None
        self._num_reserved += len(keys)
        end_s = self._idle_s = max(self._now_s, self._idle_s) + self.load_s(keys)
        heapq.heappush(self._loads, (end_s, tuple(keys)))
        return lambda: end_s <= self._now_s

    def forget(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self._stored.pop(key, None)

    def store(self, blocks: Sequence[tuple[Key, int]]) -> None:
        for key, _ in blocks:
            self._stored[key] = None
        while len(self._stored) > self._max_blocks:
            self._stored.popitem(last=False)
        self._memory.unpin(slot for _, slot in blocks)

    def advance(self, now_s: float) -> None:
        """Move the clock, and put into memory what has been read by then."""
        self._now_s = max(self._now_s, now_s)
        while self._loads and self._loads[0][0] <= self._now_s:
            _, keys = heapq.heappop(self._loads)
            self._num_reserved -= len(keys)
            for key in keys:
                slot = None if key in self._memory else self._memory.reserve()
                if slot is not None:
                    self._memory.publish(key, slot, self.name)

    @property
    def next_end_s(self) -> float:
        """When the next load ends; inf if none is under way."""
        return self._loads[0][0] if self._loads else math.inf


class TierClock:
    """What a simulation does for the tiers of its scheduler; without tiers, nothing.

    Call `advance` before anything else at a new time. Wake at `next_end_s`, and add `transfer_s` to
    the time of a step.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        tiers = scheduler.cache.tiers
        self._tiers = tiers if isinstance(tiers, CacheTiers) else None
        files = None if self._tiers is None else self._tiers.storage
        self._files = files if isinstance(files, SimulatedFiles) else None

    def advance(self, now_s: float) -> None:
        """End the loads that are over by `now_s`."""
        if self._files is not None:
            self._files.advance(now_s)

    @property
    def next_end_s(self) -> float:
        """When the next load from files ends; inf without one."""
        return math.inf if self._files is None else self._files.next_end_s

    def transfer_s(self, plan: StepPlan) -> float:
        """Seconds that the plan's copies to and from memory take."""
        num_blocks = len(plan.stores) + len(plan.loads)
        if self._tiers is None or not num_blocks:
            return 0.0
        return self._tiers.memory_rate.seconds(num_blocks * self._tiers.block_bytes)


def add_totals(one: TierTotals, other: TierTotals) -> TierTotals:
    """The sum of two engines' counts."""
    names = one.hit_tokens | other.hit_tokens
    hits = {
        name: one.hit_tokens.get(name, 0) + other.hit_tokens.get(name, 0) for name in sorted(names)
    }
    return TierTotals(
        hit_tokens=hits,
        stored_blocks=one.stored_blocks + other.stored_blocks,
        loaded_blocks=one.loaded_blocks + other.loaded_blocks,
        declined_tokens=one.declined_tokens + other.declined_tokens,
        dropped_blocks=one.dropped_blocks + other.dropped_blocks,
        waits=one.waits + other.waits,
    )


def add_tiers(scheduler: Scheduler, sizes: TierSizes, block_bytes: int) -> None:
    """Put simulated tiers below the scheduler's prefix cache, if it has one."""
    cache = scheduler.cache
    if not sizes.exist or not isinstance(cache, PrefixCache):
        return
    num_bytes = sizes.memory_bytes or STAGING_BYTES
    memory = MemoryTier(max(MIN_SLOTS, num_bytes // block_bytes))
    files = None
    if sizes.file_bytes is not None:
        rate = Rate(sizes.file_bytes_s, GUESSED_DISK[1])
        files = SimulatedFiles(memory, sizes.file_bytes // block_bytes, block_bytes, rate)
    tiers = CacheTiers(
        scheduler.pool,
        cache,
        memory,
        NoStorage() if files is None else files,
        layout=scheduler.limits.kv_layout,
        block_bytes=block_bytes,
    )
    tiers.memory_rate = Rate(sizes.memory_bytes_s)
    cache.tiers = tiers
