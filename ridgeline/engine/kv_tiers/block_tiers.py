"""Builds the tiers of an engine, moves their bytes, and counts.

Absence is `NoBlockTiers`: the engine does the same with and without.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.config import ResolvedSettings
from ridgeline.engine.kv_tiers.block_slab import BlockSlab, bytes_per_block
from ridgeline.engine.kv_tiers.directory import ExtentDirectory
from ridgeline.engine.kv_tiers.extent_tier import ExtentTier
from ridgeline.engine.kv_tiers.remote import RemoteExtents
from ridgeline.engine.kv_tiers.signature import cache_signature
from ridgeline.engine.kv_tiers.storage import TieredStorage
from ridgeline.engine.scheduler.kv.block_pool import BlockPool
from ridgeline.engine.scheduler.kv.cache_tiers import CacheTiers, NoStorage, Rate
from ridgeline.engine.scheduler.kv.memory_tier import MemoryTier
from ridgeline.engine.scheduler.kv.prefix_cache import PrefixCache
from ridgeline.engine.scheduler.kv.tiers import (
    DIRECTORY_BYTES,
    GUESSED_DISK,
    GUESSED_MEMORY_BYTES_S,
    GUESSED_REMOTE,
    MIN_SLOTS,
    STAGING_BYTES,
)
from ridgeline.engine.scheduler.plan import StepPlan
from ridgeline.engine.scheduler.scheduler import Scheduler
from ridgeline.errors import DoesNotFit
from ridgeline.hardware import system

_LOG = logging.getLogger(__name__)
CLOSE_S = 10.0
"""The longest time that closing an engine spends on writing its cache to storage."""

HANDOVER_BYTES = 512 << 20
"""Memory through which blocks pass between servers where no memory tier was configured."""

MakeRows = Callable[[int, int], "npt.NDArray[np.uint8] | None"]
"""The memory of a number of slots of a number of bytes; None: allocate it."""

TIERS = ("memory", "disk", "remote", "peer")


class BlockTiers(Protocol):
    """The tiers as the engine uses them."""

    def on_loaded(self, wake: Callable[[], None]) -> None:
        """Call `wake`, from any thread, whenever a load from storage is over."""
        ...

    def transfer(self, plan: StepPlan) -> None:
        """Move what the plan stores and loads, before its runs."""
        ...

    def counters(self) -> dict[str, float]:
        """Totals and levels by tier: `kv_tier_NAME/TIER`, and `kv_tier_NAME`."""
        ...

    def describe(self) -> str:
        """The tiers and their sizes."""
        ...

    def close(self) -> None:
        """Write what deserves to outlive the engine, and stop."""
        ...


class NoBlockTiers:
    """What is evicted from the KV cache is computed again."""

    def on_loaded(self, wake: Callable[[], None]) -> None:
        pass

    def transfer(self, plan: StepPlan) -> None:
        assert not plan.stores and not plan.loads

    def counters(self) -> dict[str, float]:
        return {}

    def describe(self) -> str:
        return "none"

    def close(self) -> None:
        pass


class EngineBlockTiers:
    """Memory slots, and storage below them if there is any."""

    def __init__(self, tiers: CacheTiers, slab: BlockSlab, storage: TieredStorage | None) -> None:
        self.tiers, self.slab, self._storage = tiers, slab, storage

    def on_loaded(self, wake: Callable[[], None]) -> None:
        if self._storage is not None:
            self._storage.on_loaded = wake

    def transfer(self, plan: StepPlan) -> None:
        if plan.stores or plan.loads:
            self.slab.transfer(plan.stores, plan.loads)

    def counters(self) -> dict[str, float]:
        totals, size = self.tiers.totals, self.slab.block_bytes
        values = {f"kv_tier_hit_tokens/{name}": 0.0 for name in TIERS}
        values |= {f"kv_tier_hit_tokens/{k}": float(n) for k, n in totals.hit_tokens.items()}
        values |= {
            "kv_tier_stores/memory": float(totals.stored_blocks),
            "kv_tier_store_bytes/memory": float(totals.stored_blocks * size),
            "kv_tier_loads/memory": float(totals.loaded_blocks),
            "kv_tier_load_bytes/memory": float(totals.loaded_blocks * size),
            "kv_tier_bytes/memory": float(len(self.tiers.memory) * size),
            "kv_tier_bandwidth/memory": self.tiers.memory_rate.bytes_s,
            "kv_tier_declined_tokens": float(totals.declined_tokens),
            "kv_tier_waits": float(totals.waits),
            "kv_tier_dropped_blocks": float(totals.dropped_blocks),
        }
        if self._storage is None:
            return values
        values["kv_tier_dropped_blocks"] += self._storage.num_dropped
        for tier in self._storage.tiers:
            counts = tier.counts
            values |= {
                f"kv_tier_stores/{tier.name}": float(counts.stores),
                f"kv_tier_store_bytes/{tier.name}": float(counts.store_bytes),
                f"kv_tier_loads/{tier.name}": float(counts.loads),
                f"kv_tier_load_bytes/{tier.name}": float(counts.load_bytes),
                f"kv_tier_errors/{tier.name}": float(counts.errors),
                f"kv_tier_bytes/{tier.name}": float(tier.num_bytes),
                f"kv_tier_bandwidth/{tier.name}": tier.rate.bytes_s,
            }
        return values

    def describe(self) -> str:
        names = [f"memory ({self.tiers.memory.num_slots} blocks)"]
        if self._storage is not None:
            names += [f"{tier.name} ({len(tier)} blocks found)" for tier in self._storage.tiers]
        return ", ".join(names)

    def close(self) -> None:
        if self._storage is None:
            return
        deadline_s = time.monotonic() + CLOSE_S
        try:
            self._save_cached(self._storage, deadline_s)
        except Exception:
            _LOG.exception("the KV cache could not be written to storage")
        self._storage.close(max(0.0, deadline_s - time.monotonic()))

    def _save_cached(self, storage: TieredStorage, deadline_s: float) -> None:
        """Write the cached blocks that would be saved if they were evicted now."""
        memory, batch = self.tiers.memory, 32
        new = [own for own in self.tiers.worthy_blocks() if storage.find(own[1]) is None]
        while new and time.monotonic() < deadline_s:
            part, new = new[:batch], new[batch:]
            stores, keys = [], []
            for block, key in part:
                if key in memory or (slot := memory.reserve()) is None:
                    continue
                memory.publish(key, slot, pinned=True)
                stores.append((block, slot))
                keys.append((key, slot))
            if not stores:
                time.sleep(0.01)  # every slot waits to be written
                new += [own for own in part if own[1] not in memory]
                continue
            self.slab.transfer(stores, ())
            storage.store(keys)
            while storage.is_busy and time.monotonic() < deadline_s:
                time.sleep(0.005)


def _own_memory(num_slots: int, block_bytes: int) -> None:
    """Allocate nothing: no other process reads the slots."""


def build_block_tiers(
    resolved: ResolvedSettings, scheduler: Scheduler, kv: KvCache, make_rows: MakeRows = _own_memory
) -> NoBlockTiers | EngineBlockTiers:
    """The tiers that the settings name, below the scheduler's prefix cache.

    `make_rows` may supply the memory of the slots. Raises CannotRun or DoesNotFit.
    """
    if not has_tiers(resolved) or not isinstance(scheduler.cache, PrefixCache):
        return NoBlockTiers()
    block_bytes = bytes_per_block(kv)
    moves = resolved.disaggregation_mode != "none"
    num_bytes = resolved.kv_tier_memory or (HANDOVER_BYTES if moves else STAGING_BYTES)
    _check_memory(num_bytes)
    memory = MemoryTier(max(MIN_SLOTS, num_bytes // block_bytes), threading.Lock())
    rate = Rate(GUESSED_MEMORY_BYTES_S)
    slab = BlockSlab(kv, memory.num_slots, rate, make_rows(memory.num_slots, block_bytes))
    stored = _extent_tiers(resolved, kv, block_bytes)
    storage = TieredStorage(memory, slab, stored) if stored else None
    tiers = attach(scheduler.pool, scheduler.cache, memory, storage, kv, rate)
    return EngineBlockTiers(tiers, slab, storage)


def attach(
    pool: BlockPool,
    cache: PrefixCache,
    memory: MemoryTier,
    storage: TieredStorage | None,
    kv: KvCache,
    rate: Rate,
) -> CacheTiers:
    """Put the tiers below a prefix cache."""
    tiers = CacheTiers(
        pool,
        cache,
        memory,
        NoStorage() if storage is None else storage,
        layout=kv.layout,
        block_bytes=bytes_per_block(kv),
    )
    tiers.memory_rate = rate
    cache.tiers = tiers
    return tiers


def has_tiers(resolved: ResolvedSettings) -> bool:
    """Whether any tier was configured, or blocks pass through one on their way."""
    tiers = resolved.kv_tier_memory or resolved.kv_tier_dir or resolved.kv_tier_url
    return bool(tiers) or resolved.disaggregation_mode != "none"


def _extent_tiers(resolved: ResolvedSettings, kv: KvCache, block_bytes: int) -> list[ExtentTier]:
    folder, tiers = resolved.kv_tier_dir, []
    if folder is None and resolved.kv_tier_url is None:
        return []
    directory = None if folder is None else ExtentDirectory(Path(folder))
    signature = cache_signature(resolved, kv, None if directory is None else directory.root)
    if directory is not None:
        tiers.append(
            ExtentTier(
                "disk",
                directory,
                signature,
                block_bytes,
                max_bytes=resolved.kv_tier_size or DIRECTORY_BYTES,
                rate=Rate(*GUESSED_DISK),
            )
        )
    if resolved.kv_tier_url is not None:
        files = RemoteExtents(resolved.kv_tier_url)
        rate = Rate(*GUESSED_REMOTE)
        tiers.append(ExtentTier("remote", files, signature, block_bytes, max_bytes=None, rate=rate))
    return tiers


def _check_memory(num_bytes: int) -> None:
    available = system.memory().available_bytes
    if num_bytes > available:
        raise DoesNotFit(
            "the memory tier of the KV cache does not fit into memory",
            value=f"--kv-tier-memory {num_bytes:,} bytes",
            limit=f"{available:,} bytes available",
            fix="use a smaller --kv-tier-memory",
        )
