"""Prefix cache: what one sequence has computed, another with the same beginning need not compute
again.

What. Every full block of a sequence has a digest: blake2b-256 over its parent's digest and its own
token ids; the chain starts from the tenant's name. Equal digests therefore mean equal tokens *and*
an equal beginning *and* the same tenant, so that a dictionary from digest to block finds the
longest known beginning one lookup per block. The digest is long enough for collisions, accidental
or forged, to be out of question: a wrong hit would show one user the text of another.

Source. Automatic prefix caching of vLLM (hash chain per full block, LRU through the free list); the
radix tree of SGLang finds the same beginnings to the token, at the price of a second structure.

Invariants.
  * A block is published only when it is full and all of it is computed, and is never written again.
  * At most known - 1 tokens are hit: the last token must be computed, since its logits are wanted.
  * Tenants never share: the chain's root differs.
  * Cached blocks cost nothing: they stay in the pool's idle list and are given away, least recently
    released first. `ttl_s` also forgets what has not been used for that long (time comes from
    outside).

When it loses. Prompts that share no beginning of a block's length: hashing costs about 1 µs per
block and gains nothing. A hit also makes the step shorter, never the sequence's memory smaller than
its blocks.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from collections.abc import Sequence as Seq
from hashlib import blake2b
from typing import Protocol

from ridgeline.engine.scheduler.kv.block_pool import BlockPool
from ridgeline.engine.scheduler.sequence import Sequence
from ridgeline.errors import BadInput

DIGEST_BYTES = 32


def root_digest(tenant: str) -> bytes:
    """Where a tenant's chains begin."""
    salt = tenant.encode("utf-8", "surrogatepass")
    return blake2b(salt, digest_size=DIGEST_BYTES, person=b"ridgeline-root").digest()


def block_digest(parent: bytes, tokens: Seq[int]) -> bytes:
    """The digest of one full block after `parent`."""
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=DIGEST_BYTES).digest()


class BlockCache(Protocol):
    """What the scheduler needs of a prefix cache. Instants are seconds on the caller's clock."""

    queried_tokens: int
    hit_tokens: int

    def match(self, seq: Sequence, now_s: float) -> list[int]:
        """The blocks that hold the longest known beginning of `seq`; the caller retains them."""

    def count(self, queried: int, hit: int) -> None:
        """Count a lookup that was used."""

    def publish(self, seq: Sequence, now_s: float) -> None:
        """Offer the full, computed blocks of `seq` that have not been offered yet."""

    def touch(self, blocks: Seq[int], now_s: float) -> None:
        """These blocks are in use until now: their time to live starts again."""

    def forget(self, block: int) -> None:
        """Drop the block's entry: its owner is about to write it."""

    def expire(self, now_s: float) -> None:
        """Drop entries whose time to live is over."""

    def clear(self) -> None:
        """Drop every entry."""


class NoPrefixCache:
    """No cache: never a hit, nothing kept."""

    def __init__(self) -> None:
        self.queried_tokens = self.hit_tokens = 0

    def match(self, seq: Sequence, now_s: float) -> list[int]:
        return []

    def count(self, queried: int, hit: int) -> None:
        pass

    def publish(self, seq: Sequence, now_s: float) -> None:
        pass

    def touch(self, blocks: Seq[int], now_s: float) -> None:
        pass

    def forget(self, block: int) -> None:
        pass

    def expire(self, now_s: float) -> None:
        pass

    def clear(self) -> None:
        pass


class PrefixCache:
    """Published blocks by digest, over the idle list of `pool`; see the head of this file."""

    def __init__(self, pool: BlockPool, ttl_s: float | None = None) -> None:
        if ttl_s is not None and not ttl_s > 0:
            raise BadInput("the prefix cache's time to live must be positive", value=ttl_s)
        self.queried_tokens = self.hit_tokens = 0
        self._pool, self._ttl_s = pool, math.inf if ttl_s is None else ttl_s
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._used_s: OrderedDict[int, float] = OrderedDict()  # block -> last use, oldest first
        pool.on_evict = self._drop

    def __len__(self) -> int:
        return len(self._block_of)

    def match(self, seq: Sequence, now_s: float) -> list[int]:
        self._extend(seq, (seq.known - 1) // self._pool.block_size)
        self.expire(now_s)
        found = []
        for digest in seq.digests[: (seq.known - 1) // self._pool.block_size]:
            block = self._block_of.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def count(self, queried: int, hit: int) -> None:
        self.queried_tokens += queried
        self.hit_tokens += hit

    def publish(self, seq: Sequence, now_s: float) -> None:
        num_full = seq.computed // self._pool.block_size
        if num_full <= seq.num_published:
            return
        self._extend(seq, num_full)
        for i in range(seq.num_published, num_full):
            self._enter(seq.digests[i], seq.blocks[i], now_s)
        seq.num_published = num_full

    def touch(self, blocks: Seq[int], now_s: float) -> None:
        for block in reversed(blocks):
            if block in self._used_s:
                self._used_s[block] = now_s
                self._used_s.move_to_end(block)

    def forget(self, block: int) -> None:
        if block in self._digest_of:
            self._drop(block)
            self._pool.unpublish(block)

    def expire(self, now_s: float) -> None:
        while self._used_s:
            block, used_s = next(iter(self._used_s.items()))
            if now_s - used_s <= self._ttl_s:
                return
            if self._pool.refs(block):  # in use: its time to live has not begun
                self.touch((block,), now_s)
            else:
                self.forget(block)

    def clear(self) -> None:
        for block in list(self._digest_of):
            self.forget(block)

    def _extend(self, seq: Sequence, num_blocks: int) -> None:
        """Carry the sequence's chain on to `num_blocks` digests."""
        size, digests = self._pool.block_size, seq.digests
        if len(digests) >= num_blocks:
            return
        parent = digests[-1] if digests else root_digest(seq.request.tenant)
        for i in range(len(digests), num_blocks):
            parent = block_digest(parent, seq.tokens[i * size : (i + 1) * size])
            digests.append(parent)

    def _enter(self, digest: bytes, block: int, now_s: float) -> None:
        """First come, first kept: a second block with the same content stays private to its
        owner."""
        if digest in self._block_of:
            return
        self._block_of[digest], self._digest_of[block] = block, digest
        self._used_s[block] = now_s
        self._pool.publish(block)

    def _drop(self, block: int) -> None:
        del self._block_of[self._digest_of.pop(block)]
        del self._used_s[block]
