"""Prefix cache: reuses what another sequence with the same beginning has already computed.

What. Every full block of a sequence has a digest: BLAKE2b-256 over its parent's digest and its own
token ids. The chain starts from the tenant's name and the adapter's id. Equal digests therefore
mean equal tokens, an equal beginning, the same tenant and the same adapter, so a dictionary from
digest to block finds the longest known beginning with one lookup per block. The digest is long
enough to rule out collisions, accidental or forged: a wrong hit would show one user another user's
text.

Source. Automatic prefix caching in vLLM (hash chain per full block, LRU through the free list). The
radix tree of SGLang matches beginnings to the token, at the price of a second data structure.

Invariants.
  * A block is published only once it is full and entirely computed, and is never written again.
  * At most num_known - 1 tokens are hit: the last token must be computed to obtain its logits.
  * Tenants never share blocks, because their chains start differently.
  * Cached blocks cost nothing: they stay in the pool's idle list and are reused, least recently
    released first. `ttl_s` additionally drops what has not been used for that long (time is an
    argument).
  * Nothing is published that KV eviction has changed: a sequence that evicts offers the tokens
    that it computed with everything before them, and is hit by what it would compute the same.
  * Groups of layers have separate blocks (`KvLayout`). Those with a window only need the blocks
    of the last window before the end of the hit: a hit ends where every group has what it needs.

When it loses. Prompts that do not share a beginning of at least one block: hashing costs about 1 µs
per block and gains nothing. A hit shortens the step; it does not make the sequence's own memory any
smaller.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from collections.abc import Sequence as Seq
from hashlib import blake2b
from itertools import chain
from typing import Protocol

import msgspec

from ridgeline.engine.scheduler.kv.block_pool import BlockPool
from ridgeline.engine.scheduler.kv.prefix_pins import PrefixPins
from ridgeline.engine.scheduler.kv.tiers import MISSING, NoTiers, Tiers
from ridgeline.engine.scheduler.sequence import Sequence
from ridgeline.errors import BadInput
from ridgeline.modelspec.cost.kv_layout import ONE_GROUP, KvLayout

DIGEST_BYTES = 32


def root_digest(tenant: str) -> bytes:
    """The digest a tenant's chains start from."""
    salt = tenant.encode("utf-8", "surrogatepass")
    return blake2b(salt, digest_size=DIGEST_BYTES, person=b"ridgeline-root").digest()


def block_digest(parent: bytes, tokens: Seq[int]) -> bytes:
    """The digest of a full block that follows `parent`."""
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=DIGEST_BYTES).digest()


class ComputedPrefix(msgspec.Struct, frozen=True):
    """Blocks that already hold a sequence's first `num_computed` tokens.

    `windows` are those of each windowed group of layers, from index `first_place` of its table on;
    () where there are none. `MISSING` stands for a block that a lower tier has (`Tiers.fill`).
    """

    blocks: list[int] = []
    num_computed: int = 0
    windows: list[list[int]] = []
    first_place: int = 0

    @property
    def all_blocks(self) -> list[int]:
        """The blocks of every group that are in the pool."""
        blocks = chain(self.blocks, *self.windows)
        return [block for block in blocks if block != MISSING]

    @property
    def end_place(self) -> int:
        """Index in the block tables of the place after the last block."""
        return self.first_place + len(self.windows[0]) if self.windows else len(self.blocks)


class BlockCache(Protocol):
    """What the scheduler needs from a prefix cache. Instants are seconds on the caller's clock."""

    queried_tokens: int
    hit_tokens: int
    tiers: Tiers

    @property
    def expires(self) -> bool:
        """Whether entries have a time to live."""

    def match(self, seq: Sequence, now_s: float) -> ComputedPrefix:
        """The longest cached beginning of `seq`; the caller retains its blocks."""

    def record_lookup(self, queried: int, hit: int) -> None:
        """Count a lookup whose result was used, in tokens."""

    def publish(self, seq: Sequence, now_s: float) -> None:
        """Offer the full, computed blocks of `seq` that have not been offered yet."""

    def touch(self, blocks: Seq[int], now_s: float) -> None:
        """Note that the blocks were in use until now: their time to live starts again."""

    def invalidate(self, block: int) -> None:
        """Drop the block's entry, because its owner is about to write to it."""

    def expire(self, now_s: float) -> None:
        """Drop the entries whose time to live is over."""

    def clear(self) -> None:
        """Drop every entry."""

    def pin(self, seq: Sequence, now_s: float) -> int:
        """Pin what the request of `seq` names; the number of its prompt tokens that are pinned."""

    def forget(self, account: str, seq: Sequence) -> int:
        """Drop the blocks of a prompt, and the account's pins on them; the number of tokens."""


class NoPrefixCache:
    """Caches nothing."""

    expires = False

    def __init__(self) -> None:
        self.queried_tokens = self.hit_tokens = 0
        self.tiers: Tiers = NoTiers()

    def match(self, seq: Sequence, now_s: float) -> ComputedPrefix:
        return ComputedPrefix()

    def record_lookup(self, queried: int, hit: int) -> None:
        pass

    def publish(self, seq: Sequence, now_s: float) -> None:
        pass

    def touch(self, blocks: Seq[int], now_s: float) -> None:
        pass

    def invalidate(self, block: int) -> None:
        pass

    def expire(self, now_s: float) -> None:
        pass

    def clear(self) -> None:
        pass

    def pin(self, seq: Sequence, now_s: float) -> int:
        return 0

    def forget(self, account: str, seq: Sequence) -> int:
        return 0


class PrefixCache:
    """Published blocks by digest, on top of the idle list of `pool`.

    `ttl_s` is the time in seconds after which an unused entry is dropped; None keeps entries until
    their block is reused.
    """

    def __init__(
        self, pool: BlockPool, ttl_s: float | None = None, layout: KvLayout = ONE_GROUP
    ) -> None:
        if ttl_s is not None and not ttl_s > 0:
            raise BadInput(
                "the prefix cache's time to live must be positive", value=ttl_s, limit="> 0 s"
            )
        self.queried_tokens = self.hit_tokens = 0
        self.tiers: Tiers = NoTiers()
        self._pool, self._ttl_s = pool, math.inf if ttl_s is None else ttl_s
        self._layout, self._num_full = layout, int(bool(layout.full))
        # By group, in the order of `KvLayout.groups`.
        self._block_of: list[dict[bytes, int]] = [{} for _ in range(layout.num_groups)]
        self._entry_of: dict[int, tuple[int, bytes]] = {}  # block -> group and digest
        self._used_s: OrderedDict[int, float] = OrderedDict()  # block -> last use, oldest first
        self.pins = PrefixPins(0)
        pool.on_evict = self._evict

    def __len__(self) -> int:
        return len(self._entry_of)

    @property
    def expires(self) -> bool:
        return self._ttl_s < math.inf

    def match(self, seq: Sequence, now_s: float) -> ComputedPrefix:
        size = self._pool.block_size
        num_blocks = seq.max_hit_tokens // size
        self.extend_digests(seq, num_blocks)
        self.expire(now_s)
        blocks: list[int] = []
        if self._num_full:
            for digest in seq.digests[:num_blocks]:
                block = self._block_of[0].get(digest)
                if block is None:
                    break
                blocks.append(block)
            num_blocks = len(blocks)
        if not self._layout.windowed:
            return ComputedPrefix(blocks, num_blocks * size)
        first, end = self._match_windows(seq, num_blocks)
        groups = self._block_of[self._num_full :]
        windows = [[group[digest] for digest in seq.digests[first:end]] for group in groups]
        return ComputedPrefix(blocks[:end], end * size, windows, first)

    def _match_windows(self, seq: Sequence, end: int) -> tuple[int, int]:
        """(first place, end) of the last window that all windowed groups have, up to `end`.

        Searches backwards, and moves the end to each block that is missing.
        """
        size, groups = self._pool.block_size, self._block_of[self._num_full :]
        place = end
        while place > (first := self._layout.first_place(end * size, size)):
            place -= 1
            digest = seq.digests[place]
            if not all(digest in group for group in groups):
                end = place
        return first, end

    def find(self, group: int, digest: bytes) -> int | None:
        """The block that holds some content of a group of layers; None if there is none."""
        return self._block_of[group].get(digest)

    def entries(self) -> list[tuple[int, int, bytes]]:
        """(block, group, digest) of every published block."""
        return [(block, *entry) for block, entry in self._entry_of.items()]

    def record_lookup(self, queried: int, hit: int) -> None:
        self.queried_tokens += queried
        self.hit_tokens += hit

    def publish(self, seq: Sequence, now_s: float) -> None:
        size = self._pool.block_size
        if seq.num_computed // size <= seq.num_published:
            return  # nearly every decode: no block has been filled
        num_full = seq.num_publishable // size
        if num_full <= seq.num_published:
            return
        self.extend_digests(seq, num_full)
        for i in range(seq.num_published, num_full):
            if self._num_full:
                self.insert(seq.digests[i], seq.blocks[i], now_s)
            for group, table in enumerate(seq.windows, start=self._num_full):
                self.insert(seq.digests[i], table[i - seq.first_place], now_s, group)
        seq.num_published = num_full
        self.tiers.note_published(seq)

    def insert(self, digest: bytes, block: int, now_s: float, group: int = 0) -> None:
        """Publish a full, computed block of a group of layers under its digest.

        The first block with some content wins: a second one stays private to its owner.
        """
        if digest not in self._block_of[group]:
            self._block_of[group][digest], self._entry_of[block] = block, (group, digest)
            self._used_s[block] = now_s
            self._pool.publish(block)
            if digest in self.pins:
                self._pool.pin(block)

    def touch(self, blocks: Seq[int], now_s: float) -> None:
        for block in reversed(blocks):
            if block in self._used_s:
                self._used_s[block] = now_s
                self._used_s.move_to_end(block)

    def invalidate(self, block: int) -> None:
        if block in self._entry_of:
            self._remove_entry(block)
            self._pool.unpublish(block)

    def pin(self, seq: Sequence, now_s: float) -> int:
        policy = seq.request.cache
        if policy is None or not policy.pin_tokens:
            return 0
        size = self._pool.block_size
        wanted = min(policy.pin_tokens, seq.num_prompt) // size
        self.extend_digests(seq, wanted)
        digests = tuple(seq.digests[:wanted])
        account = seq.request.account or seq.request.tenant
        num_pinned = self.pins.add(account, digests, now_s + policy.pin_ttl_s)
        for digest in digests[:num_pinned]:
            for blocks in self._block_of:
                if digest in blocks:
                    self._pool.pin(blocks[digest])
        return num_pinned * size

    def forget(self, account: str, seq: Sequence) -> int:
        num_blocks = seq.num_prompt // self._pool.block_size
        self.extend_digests(seq, num_blocks)
        digests = tuple(seq.digests[:num_blocks])
        self._unpin(self.pins.forget(account, digests))
        kept = [digest for digest in digests if digest in self.pins]  # pinned by others
        forgotten = 0
        for digest in digests[len(kept) :]:
            blocks = [known[digest] for known in self._block_of if digest in known]
            forgotten += bool(blocks)
            for block in blocks:
                self.invalidate(block)
        self.tiers.forget(digests[len(kept) :])
        return forgotten * self._pool.block_size

    def _unpin(self, digests: Seq[bytes]) -> None:
        for digest in digests:
            for blocks in self._block_of:
                if digest in blocks:
                    self._pool.unpin(blocks[digest])

    def expire(self, now_s: float) -> None:
        if self.pins:
            self._unpin(self.pins.expire(now_s))
        while self._used_s:
            block, used_s = next(iter(self._used_s.items()))
            if now_s - used_s <= self._ttl_s:
                return
            if self._pool.ref_count(block) or self._entry_of[block][1] in self.pins:
                # In use: its time to live has not started.
                self.touch((block,), now_s)
            else:
                self.invalidate(block)

    def clear(self) -> None:
        for block in list(self._entry_of):
            self.invalidate(block)

    def extend_digests(self, seq: Sequence, num_blocks: int) -> None:
        """Extend the sequence's hash chain to `num_blocks` digests."""
        size, digests = self._pool.block_size, seq.digests
        if len(digests) >= num_blocks:
            return
        parent = digests[-1] if digests else root_digest(seq.request.cache_scope)
        for i in range(len(digests), num_blocks):
            parent = block_digest(parent, seq.tokens[i * size : (i + 1) * size])
            digests.append(parent)

    def _evict(self, block: int) -> None:
        """The pool hands the block to another owner, who will overwrite it."""
        self.tiers.save(block, *self._entry_of[block])
        self._remove_entry(block)

    def _remove_entry(self, block: int) -> None:
        self._pool.unpin(block)
        group, digest = self._entry_of.pop(block)
        del self._block_of[group][digest]
        del self._used_s[block]
