"""Leases: the computed blocks of a prompt, kept in memory slots until another server has them.

    open         any thread       a lease on the blocks of a prompt that is about to be computed
    publish      engine thread    after a chunk: its blocks get slots, which the lease pins
    commit       engine thread    their bytes are in the slots: readers may send them
    wait, close  reader threads   send what is ready, and let the slots go

A lease without a reader expires, and one that is closed early aborts its request, so that
neither slots nor computation outlive the need for them.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ridgeline.engine.scheduler.kv.block_transfer import Place, content_digest
from ridgeline.engine.scheduler.kv.memory_tier import Key, MemoryTier, block_key
from ridgeline.engine.scheduler.sequence import Sequence as TokenSequence
from ridgeline.modelspec.cost.kv_layout import KvLayout


@dataclass(eq=False)
class PrefixLease:
    """The blocks of a prompt's first `num_tokens` tokens.

    `todo` are the places whose blocks are not computed yet, `ready` those that can be sent, with
    their slots. `error` says why some will never be.
    """

    id: str
    digest: bytes
    num_tokens: int
    todo: list[Place]
    expires_s: float
    request_id: str = ""
    ready: list[tuple[Place, int]] = field(default_factory=list)
    pending: list[tuple[Place, int]] = field(default_factory=list)
    is_released: bool = False  # the engine does no more for it
    is_ended: bool = False  # and readers may know
    is_connected: bool = False
    error: str = ""


class PrefixLeases:
    """All leases of a server. Thread-safe, except for what the engine thread alone calls.

    `abort` ends a request by its id.
    """

    def __init__(
        self,
        memory: MemoryTier,
        layout: KvLayout,
        block_size: int,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.abort: Callable[[str], None] = _ignore
        self.num_opened = self.num_expired = self.num_blocks = 0
        self._memory, self._layout, self._block_size = memory, layout, block_size
        self._num_full = int(bool(layout.full))
        self._timeout_s, self._clock = timeout_s, clock
        self._changed = threading.Condition()
        self._leases: dict[str, PrefixLease] = {}
        self._stores: list[tuple[int, int]] = []
        self._new: list[tuple[Key, int]] = []  # slots that the stores fill
        self._touched: list[PrefixLease] = []  # since the last commit

    def __len__(self) -> int:
        return len(self._leases)

    # -- any thread

    def open(self, prompt: Sequence[int]) -> PrefixLease | None:
        """A lease on the full blocks of a prompt without its last token; None if it has none."""
        size, layout = self._block_size, self._layout
        end = (len(prompt) - 1) // size
        if end <= 0:
            return None
        first = layout.first_place(end * size, size) if layout.windowed else 0
        todo = [
            (group, place)
            for place in range(end)
            for group in range(layout.num_groups)
            if group < self._num_full or place >= first
        ]
        lease = PrefixLease(
            id=secrets.token_hex(16),
            digest=content_digest(prompt, end * size),
            num_tokens=end * size,
            todo=todo,
            expires_s=self._clock() + self._timeout_s,
        )
        with self._changed:
            self._leases[lease.id] = lease
            self.num_opened += 1
        return lease

    def bind(self, lease_id: str, request_id: str) -> None:
        """The request that computes the blocks of a lease."""
        with self._changed:
            lease = self._leases.get(lease_id)
            if lease is not None:
                lease.request_id = request_id
        if lease is None:
            self.abort(request_id)

    def connect(self, lease_id: str) -> PrefixLease | None:
        """The lease, which does not expire from now on; None if it is unknown or taken."""
        with self._changed:
            lease = self._leases.get(lease_id)
            if lease is None or lease.is_connected:
                return None
            lease.is_connected = True
            return lease

    def wait(self, lease: PrefixLease, num_seen: int, timeout_s: float) -> list[tuple[Place, int]]:
        """Blocks that have become ready since `num_seen` of them were; waits for the first."""
        with self._changed:
            self._changed.wait_for(lambda: len(lease.ready) > num_seen or lease.is_ended, timeout_s)
            return lease.ready[num_seen:]

    def close(self, lease_id: str) -> None:
        """Let the blocks go, and abort the request if it still computes them."""
        with self._changed:
            lease = self._leases.pop(lease_id, None)
            if lease is None:
                return
            slots = [slot for _, slot in lease.ready]
            lease.ready, is_running = [], not lease.is_released
        self._memory.unpin(slots)
        if is_running and lease.request_id:
            self.abort(lease.request_id)

    def expire(self) -> None:
        """Close the leases that had no reader in time."""
        now_s = self._clock()
        with self._changed:
            over = [
                lease
                for lease in self._leases.values()
                if not lease.is_connected and lease.expires_s <= now_s
            ]
            self.num_expired += len(over)
        for lease in over:
            self.close(lease.id)

    # -- the engine thread

    def note_published(self, seq: TokenSequence) -> None:
        lease = self._leases.get(seq.request.lease)
        if lease is None or lease.error:
            return
        num_done = 0
        for group, place in lease.todo:
            if place >= seq.num_published or not self._export(lease, seq, group, place):
                break
            num_done += 1
        del lease.todo[:num_done]
        self._touched.append(lease)

    def _export(self, lease: PrefixLease, seq: TokenSequence, group: int, place: int) -> bool:
        """Give a block a slot, or keep the one that it has; False if there is none."""
        key = block_key(group, seq.digests[place])
        slot = self._memory.pin(key)
        if slot is None:
            slot = self._memory.reserve()
            if slot is None:
                lease.error = "no_room"
                return False
            self._memory.publish(key, slot, pinned=True)
            table, first = seq.blocks, 0
            if group >= self._num_full:
                table, first = seq.windows[group - self._num_full], seq.first_place
            self._stores.append((table[place - first], slot))
            self._new.append((key, slot))
        lease.pending.append(((group, place), slot))
        return True

    def note_released(self, seq: TokenSequence) -> None:
        lease = self._leases.get(seq.request.lease)
        if lease is not None:
            lease.is_released = True
            if lease.todo and not lease.error:
                lease.error = "prefill_failed"
            self._touched.append(lease)

    @property
    def has_changed(self) -> bool:
        """Whether `commit` has something to do."""
        return bool(self._touched)

    def take_stores(self) -> list[tuple[int, int]]:
        """(block, slot) pairs to copy before `commit`."""
        stores, self._stores = self._stores, []
        return stores

    def commit(self, *, failed: bool = False) -> None:
        """The copies are done, or have failed: tell the readers."""
        touched, self._touched = self._touched, []
        new, self._new = self._new, []
        unneeded: list[int] = []
        with self._changed:
            for lease in touched:
                pending, lease.pending = lease.pending, []
                if failed or lease.id not in self._leases:  # closed in the meantime
                    unneeded += [slot for _, slot in pending]
                    lease.error = lease.error or "prefill_failed"
                else:
                    lease.ready += pending
                    self.num_blocks += len(pending)
                lease.is_ended = lease.is_released or bool(lease.error)
            self._changed.notify_all()
        self._memory.unpin(unneeded)
        if failed:  # their slots hold something else
            for key, _ in new:
                self._memory.drop(key)


def _ignore(request_id: str) -> None:
    """Nothing computes for the leases."""
