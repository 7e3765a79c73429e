"""What the tiers need of transfers between servers, and a server without any.

A prefill server keeps the blocks of a prompt under a lease, chunk by chunk as they are computed; a
decode server fetches them into its memory tier while the sequence waits. Blocks are named by group
of layers and place in the sequence, and the two servers compare a digest of the prompt's tokens, so
that neither has to know how the other one salts its prefix cache.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence as Seq
from hashlib import blake2b
from typing import Protocol

from ridgeline.engine.scheduler.kv.memory_tier import Key
from ridgeline.engine.scheduler.sequence import Sequence
from ridgeline.records import KvTransferParams

Place = tuple[int, int]
"""(group of layers, index of the block in the sequence)."""


def content_digest(tokens: Seq[int], num_tokens: int) -> bytes:
    """Digest of the first tokens of a prompt: equal on every server."""
    data = array("q", tokens[:num_tokens]).tobytes()
    return blake2b(data, digest_size=32, person=b"ridgeline-moved").digest()


class BlockExports(Protocol):
    """The leases of a prefill server, as its engine thread sees them."""

    def note_published(self, seq: Sequence) -> None:
        """More blocks of a sequence with a lease are computed."""
        ...

    def note_released(self, seq: Sequence) -> None:
        """A sequence with a lease is about to return its blocks."""
        ...


class NoExports:
    """No block leaves this server."""

    def note_published(self, seq: Sequence) -> None:
        pass

    def note_released(self, seq: Sequence) -> None:
        pass


class BlockFetch(Protocol):
    """Blocks on their way into the memory tier, which keeps what has come until `release`."""

    def is_over(self) -> bool:
        """Whether nothing more will come."""
        ...

    def release(self) -> None:
        """The sequence has been admitted, or has ended: stop, and let the blocks be evicted."""
        ...


class BlockPeers(Protocol):
    """The servers that a decode server fetches from. No method blocks."""

    @property
    def timeout_s(self) -> float:
        """The longest wait for a fetch."""
        ...

    def seconds(self, nbytes: int) -> float:
        """Predicted seconds to move `nbytes`."""
        ...

    def fetch(
        self, source: KvTransferParams, digest: bytes, wanted: Seq[tuple[Place, Key]]
    ) -> BlockFetch | None:
        """Begin to fetch blocks, in the order in which they are computed; None if refused."""
        ...

    def decline(self, source: KvTransferParams, reason: str) -> None:
        """Let go of the lease: the prompt is computed here. `reason` "" is not counted."""
        ...


class NoPeers:
    """Nothing is fetched."""

    timeout_s = 0.0

    def seconds(self, nbytes: int) -> float:
        return math.inf

    def fetch(
        self, source: KvTransferParams, digest: bytes, wanted: Seq[tuple[Place, Key]]
    ) -> BlockFetch | None:
        return None

    def decline(self, source: KvTransferParams, reason: str) -> None:
        pass
