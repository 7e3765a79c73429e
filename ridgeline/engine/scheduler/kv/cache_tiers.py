"""Tiers of the KV cache: evicted blocks go to host memory and to files, and come back when cheaper.

What. A block that the pool reuses is copied to a slot of the memory tier, and from there to storage
(a directory, an object store) by another thread. A sequence whose beginning is there loads it:

    add      What only storage has is read into memory slots by another thread, while the sequence
             waits in the queue. It waits at most as long as computing would take.
    admit    What memory slots have is copied into newly allocated blocks before the step's runs,
             and published in the prefix cache as if it had been computed.

Source. Hierarchical caches as in LMCache (arXiv 2510.09665), SGLang's HiCache and vLLM's offloading
connectors; CachedAttention (Gao et al., USENIX ATC 2024) for conversations.

Invariants.
  * A block is found by the digest of everything before it, tenant included, so a wrong hit is as
    impossible as in the prefix cache. Storage adds a signature of weights and formats.
  * Nothing waits for storage within a step, and no sequence waits longer than computing takes.
  * A load is started only if bytes over the measured bandwidth take less time than computing its
    tokens at the measured rate of prompts; the rest is counted as declined.
  * Second chance: only blocks of a prefix that was hit, of a preempted sequence, or of a sequence
    of at least `min_tokens` are saved, so texts read once do not displace conversations.
  * Long sequences that were never hit are saved as long as evicted blocks return
    (`evicted_returns.py`).

When it loses. Texts that never come back cost a copy per evicted block until `TRIAL_POOLS` times
the pool was saved. Conversations whose first return comes after that are computed once more.
Prompts are computed faster than they are read: small models on GPUs over slow disks, where every
load is declined.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol

import msgspec

from ridgeline.engine.scheduler.kv.block_pool import BlockPool
from ridgeline.engine.scheduler.kv.block_transfer import (
    BlockExports,
    BlockFetch,
    BlockPeers,
    NoExports,
    NoPeers,
    Place,
    content_digest,
)
from ridgeline.engine.scheduler.kv.evicted_returns import EvictedReturns
from ridgeline.engine.scheduler.kv.memory_tier import Key, MemoryTier, block_key
from ridgeline.engine.scheduler.kv.prefix_cache import ComputedPrefix, PrefixCache
from ridgeline.engine.scheduler.kv.tiers import (
    GUESSED_MEMORY_BYTES_S,
    MISSING,
    LoadWait,
    Transfers,
)
from ridgeline.engine.scheduler.plan import StepPlan
from ridgeline.engine.scheduler.sequence import Sequence
from ridgeline.modelspec.cost.kv_layout import KvLayout
from ridgeline.records import KvTransferParams

MIN_TOKENS = 256
"""Length from which a sequence's blocks are saved although none of them was ever hit."""

TRIAL_POOLS = 4
"""Evicted blocks, in sizes of the pool, that are saved although none has come back yet."""

PROMPT_STEP_TOKENS = 32
"""Tokens from which a step counts as one that computes prompts."""

UNMEASURED_WAIT_S = 5.0
"""The longest wait for storage before the time of prompts has been measured."""

_LONG, _PROVEN = 1, 2  # why a block deserves a copy: its sequence is long, or was hit or preempted

Holds = Callable[[int, bytes], bool]


class Rate:
    """A bandwidth in bytes per second: the first guess, then a moving average of measurements."""

    def __init__(self, bytes_s: float, open_s: float = 0.0) -> None:
        self.bytes_s, self.open_s = bytes_s, open_s
        self._measured = False

    def seconds(self, nbytes: float) -> float:
        """Predicted seconds for `nbytes`."""
        return self.open_s + nbytes / self.bytes_s

    def observe(self, nbytes: int, seconds: float) -> None:
        """`nbytes` took `seconds`."""
        if nbytes <= 0:
            return
        own = nbytes / max(seconds, 1e-9)
        self.bytes_s = own if not self._measured else 0.7 * self.bytes_s + 0.3 * own
        self._measured = True


class Storage(Protocol):
    """Tiers below memory. Its methods return at once; threads of its own do the rest."""

    def find(self, key: Key) -> str | None:
        """The tier that has a block; None if none has."""
        ...

    def refresh(self) -> None:
        """Look for what other processes have stored, if the last look is long ago."""
        ...

    def load_s(self, keys: Seq[Key]) -> float:
        """Predicted seconds to read the blocks into memory slots."""
        ...

    def load(self, keys: Seq[Key]) -> Callable[[], bool] | None:
        """Begin to read blocks into memory slots; whether that is over. None if there is no room.

        What cannot be read is not in the memory tier afterwards.
        """
        ...

    def forget(self, keys: Seq[Key]) -> None:
        """Remove blocks, and whatever is stored together with them."""
        ...

    def store(self, blocks: Seq[tuple[Key, int]]) -> None:
        """Write blocks, given with their pinned slots, and unpin these when that is over."""
        ...


class NoStorage:
    """Memory is the only tier."""

    def find(self, key: Key) -> str | None:
        return None

    def refresh(self) -> None:
        pass

    def load_s(self, keys: Seq[Key]) -> float:
        return math.inf

    def load(self, keys: Seq[Key]) -> Callable[[], bool] | None:
        return None

    def forget(self, keys: Seq[Key]) -> None:
        pass

    def store(self, blocks: Seq[tuple[Key, int]]) -> None:
        raise AssertionError("no storage to write to")


class TierTotals(msgspec.Struct):
    """Counts since the engine was opened, by tier where they are dictionaries."""

    hit_tokens: dict[str, int] = {}
    stored_blocks: int = 0
    loaded_blocks: int = 0
    declined_tokens: int = 0
    dropped_blocks: int = 0
    waits: int = 0


class CacheTiers:
    """Decides which blocks are saved and which are loaded.

    `block_bytes` is the size of a block of any group of layers, `memory_rate` the bandwidth between
    pool and memory tier.
    """

    active = True

    def __init__(
        self,
        pool: BlockPool,
        cache: PrefixCache,
        memory: MemoryTier,
        storage: Storage,
        *,
        layout: KvLayout,
        block_bytes: int,
        min_tokens: int = MIN_TOKENS,
    ) -> None:
        self.memory, self.storage = memory, storage
        self.memory_rate, self.block_bytes = Rate(GUESSED_MEMORY_BYTES_S), block_bytes
        self.totals = TierTotals()
        self.exports: BlockExports = NoExports()
        self.peers: BlockPeers = NoPeers()
        self._fetches: dict[int, BlockFetch] = {}  # of sequences that wait to be admitted
        self._pool, self._cache, self._layout = pool, cache, layout
        self._num_full = int(bool(layout.full))
        self._min_tokens = min_tokens
        self._returns = EvictedReturns(TRIAL_POOLS * pool.num_blocks)
        self._prompt_token_s: float | None = None
        self._worth = bytearray(pool.num_blocks)  # blocks that deserve a copy
        self._stores: list[tuple[int, int]] = []
        self._loads: list[tuple[int, int]] = []
        self._stored: list[tuple[Key, int]] = []  # of the plan being made
        self._under_way: list[tuple[Key, int]] = []  # of the plan being run
        self._pinned: dict[Key, int] = {}  # slots that the latest `extend` found
        self._declined: int | None = None  # the sequence that was counted last

    # -- saving

    def save(self, block: int, group: int, digest: bytes) -> None:
        worth, self._worth[block] = self._worth[block], 0
        key = block_key(group, digest)
        if not worth or self.memory.touch(key):
            return
        if worth == _LONG and not self._returns.are_expected:
            self._returns.note_evicted(digest)
            return
        slot = self.memory.reserve()
        if slot is None:
            self.totals.dropped_blocks += 1
        elif self.memory.publish(key, slot, pinned=True):
            self._returns.note_saved()
            self._stores.append((block, slot))
            self._stored.append((key, slot))

    def note_release(self, seq: Sequence, *, resumes: bool = False) -> None:
        if resumes or seq.num_known >= self._min_tokens:
            self._mark(seq.all_blocks, _PROVEN if resumes else _LONG)
        if not resumes:
            self._end_fetch(seq)
            if seq.request.lease:
                self.exports.note_released(seq)

    def note_published(self, seq: Sequence) -> None:
        if seq.request.lease:
            self.exports.note_published(seq)

    def worthy_blocks(self) -> list[tuple[int, Key]]:
        """(block, key) of the published blocks that would be saved if they were evicted now."""
        return [
            (block, block_key(group, digest))
            for block, group, digest in self._cache.entries()
            if self._worth[block]
        ]

    def _mark(self, blocks: Seq[int], why: int) -> None:
        worth, is_published = self._worth, self._pool.is_published
        for block in blocks:
            worth[block] = max(worth[block], why) if is_published(block) else 0

    # -- loading at admission

    def extend(self, seq: Sequence, prefix: ComputedPrefix, now_s: float) -> ComputedPrefix:
        self._mark(prefix.all_blocks, _PROVEN)
        if not len(self.memory):
            return prefix
        self._unpin_found()
        size = self._pool.block_size
        first, end = self._reach(seq, self._in_memory)
        gained = end * size - prefix.num_computed
        if gained <= 0:
            return prefix
        longer = self._prefix(seq, first, end)
        load_s = self.memory_rate.seconds(count_missing(longer) * self.block_bytes)
        if not self._pays(seq, gained, load_s) or not self._pin_missing(seq, longer):
            return prefix
        return longer

    def fill(
        self, seq: Sequence, prefix: ComputedPrefix, now_s: float
    ) -> tuple[ComputedPrefix, list[int]]:
        self._end_fetch(seq)  # what it needs of the blocks that came is pinned by `extend`
        if not count_missing(prefix):
            return prefix, []
        held = prefix.all_blocks
        for block in held:  # so that allocating does not evict them
            self._pool.retain(block)
        tables = [list(table) for _, _, table in self._tables(prefix)]
        for group, place, i in self._missing(prefix):
            digest = seq.digests[place]
            key, block = block_key(group, digest), self._pool.allocate()
            self._loads.append((self._pinned.pop(key), block))
            self._cache.insert(digest, block, now_s, group)
            self._count_hit(key)
            tables[group][i] = block
            held.append(block)
        self._mark(held, _PROVEN)
        full, windows = (tables[0], tables[1:]) if self._num_full else ([], tables)
        return msgspec.structs.replace(prefix, blocks=full, windows=windows), held

    def _tables(self, prefix: ComputedPrefix) -> list[tuple[int, int, list[int]]]:
        """(group, index of the first block, blocks) of every group of layers."""
        tables = [(0, 0, prefix.blocks)] if self._num_full else []
        for group, table in enumerate(prefix.windows, start=self._num_full):
            tables.append((group, prefix.first_place, table))
        return tables

    def _missing(self, prefix: ComputedPrefix) -> list[tuple[int, int, int]]:
        """(group, place in the sequence, index in the table) of every missing block."""
        return [
            (group, start + i, i)
            for group, start, table in self._tables(prefix)
            for i, block in enumerate(table)
            if block == MISSING
        ]

    def _pin_missing(self, seq: Sequence, prefix: ComputedPrefix) -> bool:
        """Keep the slots until `fill`; False if another thread has just taken one."""
        for group, place, _ in self._missing(prefix):
            key = block_key(group, seq.digests[place])
            slot = self.memory.pin(key)
            if slot is None:
                self._unpin_found()
                return False
            self._pinned[key] = slot
        return True

    def _unpin_found(self) -> None:
        if self._pinned:
            self.memory.unpin(self._pinned.values())
            self._pinned = {}

    def _count_hit(self, key: Key) -> None:
        source, hits = self.memory.take_source(key), self.totals.hit_tokens
        self.totals.loaded_blocks += 1
        self._returns.note_loaded()
        # With several groups of layers, a position is in a block of each.
        hits[source] = hits.get(source, 0) + self._pool.block_size // self._layout.num_groups

    # -- loading from storage

    def start_loading(self, seq: Sequence, now_s: float) -> LoadWait | None:
        source = seq.request.kv_source
        if source is not None and (wait := self._start_fetching(seq, source, now_s)) is not None:
            return wait
        if seq.num_prompt_logprobs is not None:  # these need the whole prompt computed
            return None
        self.storage.refresh()
        first, end = self._reach(seq, self._anywhere)
        if end < len(seq.digests):
            self._returns.note_missing(seq.digests[end])
        _, near = self._reach(seq, self._in_memory)
        gained = (end - near) * self._pool.block_size
        if gained <= 0:
            return None
        keys = [
            key
            for group in range(self._layout.num_groups)
            for digest in seq.digests[0 if group < self._num_full else first : end]
            if not self._in_memory(group, digest) and (key := block_key(group, digest))
        ]
        nbytes = len(keys) * self.block_bytes
        load_s = self.storage.load_s(keys) + self.memory_rate.seconds(nbytes)
        if not self._pays(seq, gained, load_s):
            return None
        is_over = self.storage.load(keys)
        if is_over is None:
            self.totals.dropped_blocks += len(keys)
            return None
        compute_s = self._compute_s(gained)
        self.totals.waits += 1
        return LoadWait(is_over, now_s + (UNMEASURED_WAIT_S if compute_s is None else compute_s))

    # -- fetching from the server that computed the prompt

    def _start_fetching(
        self, seq: Sequence, source: KvTransferParams, now_s: float
    ) -> LoadWait | None:
        size = self._pool.block_size
        end = source.num_tokens // size
        if _needs_own_prefill(seq):
            self.peers.decline(source, "unsupported")
            return None
        if end * size != source.num_tokens or source.num_tokens > seq.num_prompt - 1:
            self.peers.decline(source, "content")
            return None
        wanted = self._missing_places(seq, end)
        if not wanted:
            self.peers.decline(source, "")
            return None
        nbytes = len(wanted) * self.block_bytes
        load_s = self.peers.seconds(nbytes) + self.memory_rate.seconds(nbytes)
        num_tokens = len(wanted) * size // self._layout.num_groups
        if not self._pays(seq, num_tokens, load_s):
            self.peers.decline(source, "slower")
            return None
        digest = content_digest(seq.tokens, source.num_tokens)
        fetch = self.peers.fetch(source, digest, wanted)
        if fetch is None:
            return None
        self._fetches[seq.id] = fetch
        self.totals.waits += 1
        return LoadWait(fetch.is_over, now_s + self.peers.timeout_s)

    def _missing_places(self, seq: Sequence, end: int) -> list[tuple[Place, Key]]:
        """What a hit of the first `end` blocks needs and is not here, in the order of places."""
        size, layout = self._pool.block_size, self._layout
        self._cache.extend_digests(seq, end)
        first = layout.first_place(end * size, size) if layout.windowed else 0
        return [
            ((group, place), block_key(group, digest))
            for place, digest in enumerate(seq.digests[:end])
            for group in range(layout.num_groups)
            if (group < self._num_full or place >= first) and not self._in_memory(group, digest)
        ]

    def _end_fetch(self, seq: Sequence) -> None:
        if self._fetches and (fetch := self._fetches.pop(seq.id, None)) is not None:
            fetch.release()

    def forget(self, digests: tuple[bytes, ...]) -> None:
        keys = [
            block_key(group, digest)
            for group in range(self._layout.num_groups)
            for digest in digests
        ]
        for key in keys:
            self.memory.drop(key)
        self.storage.forget(keys)

    # -- transfers

    def take_transfers(self) -> Transfers:
        self._unpin_found()
        stores, self._stores = tuple(self._stores), []
        loads, self._loads = tuple(self._loads), []
        self._under_way, self._stored = self._stored, []
        return stores, loads

    def end_step(self, plan: StepPlan, seconds: float) -> None:
        num_tokens = sum([len(run.tokens) for run in plan.runs])
        if num_tokens >= PROMPT_STEP_TOKENS and seconds > 0:
            own, before = seconds / num_tokens, self._prompt_token_s
            self._prompt_token_s = own if before is None else 0.8 * before + 0.2 * own
        if plan.loads:
            self.memory.unpin(slot for slot, _ in plan.loads)
        if not plan.stores:
            return
        stored, self._under_way = self._under_way, []
        self.totals.stored_blocks += len(stored)
        new = [own for own in stored if self.storage.find(own[0]) is None]
        known = {slot for _, slot in stored} - {slot for _, slot in new}
        self.memory.unpin(known)
        if isinstance(self.storage, NoStorage):
            self.memory.unpin(slot for _, slot in new)
        elif new:
            self.storage.store(new)

    def cancel_transfers(self, plan: StepPlan) -> None:
        self.memory.unpin(slot for slot, _ in plan.loads)
        stored, self._under_way = self._under_way, []
        for key, slot in stored:
            self.memory.unpin([slot])
            self.memory.drop(key)

    # -- how far a sequence's beginning is known

    def _on_device(self, group: int, digest: bytes) -> bool:
        return self._cache.find(group, digest) is not None

    def _in_memory(self, group: int, digest: bytes) -> bool:
        return self._on_device(group, digest) or block_key(group, digest) in self.memory

    def _anywhere(self, group: int, digest: bytes) -> bool:
        return (
            self._in_memory(group, digest)
            or self.storage.find(block_key(group, digest)) is not None
        )

    def _reach(self, seq: Sequence, holds: Holds) -> tuple[int, int]:
        """(first place of the windows, end) of the longest beginning that `holds` everywhere."""
        size = self._pool.block_size
        end = seq.max_hit_tokens // size
        self._cache.extend_digests(seq, end)
        digests = seq.digests
        if self._num_full:
            end = next((i for i in range(end) if not holds(0, digests[i])), end)
        if not self._layout.windowed:
            return 0, end
        groups = range(self._num_full, self._layout.num_groups)
        place = end
        while place > (first := self._layout.first_place(end * size, size)):
            place -= 1
            if not all(holds(group, digests[place]) for group in groups):
                end = place
        return first, end

    def _prefix(self, seq: Sequence, first: int, end: int) -> ComputedPrefix:
        """The first `end` blocks, with `MISSING` for those that are not in the pool."""
        tables = [
            [
                MISSING if (block := self._cache.find(group, digest)) is None else block
                for digest in seq.digests[0 if group < self._num_full else first : end]
            ]
            for group in range(self._layout.num_groups)
        ]
        full, windows = (tables[0], tables[1:]) if self._num_full else ([], tables)
        num_computed = end * self._pool.block_size
        return ComputedPrefix(full, num_computed, windows, first if windows else 0)

    def _compute_s(self, num_tokens: int) -> float | None:
        """Predicted seconds to compute tokens of a prompt; None before the first measurement."""
        return None if self._prompt_token_s is None else num_tokens * self._prompt_token_s

    def _pays(self, seq: Sequence, num_tokens: int, load_s: float) -> bool:
        compute_s = self._compute_s(num_tokens)
        if compute_s is None or load_s < compute_s:
            return True
        if self._declined != seq.id:  # a sequence at the head of the queue is tried in every step
            self._declined = seq.id
            self.totals.declined_tokens += num_tokens
        return False


def _needs_own_prefill(seq: Sequence) -> bool:
    """Whether blocks that another server computed are of no use to the sequence."""
    policy = seq.request.cache
    return (
        seq.num_prompt_logprobs is not None
        or seq.eviction is not None
        or bool(seq.request.adapter)
        or (policy is not None and policy.max_cached_tokens is not None)
    )


def count_missing(prefix: ComputedPrefix) -> int:
    """The number of blocks of a prefix that are not in the pool."""
    return prefix.blocks.count(MISSING) + sum([w.count(MISSING) for w in prefix.windows])
