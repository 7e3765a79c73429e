"""Exchanges among processes of one host in memory that they share.

    line 0            1 once a process is lost: those that wait give up
    5 lines per rank  rounds that it has gathered in its stage, in its tensor group and in its
                      context group, messages sent to the next stage, and received
    8 slots per rank  two for gathers of each kind, two for messages, used in turn

A rank copies its part to a slot, counts up and waits for the counters of the others. It writes to
the slot again two rounds later: by then every other rank has entered the round in between, so that
it has read the slot. A rank that waits longer than a few microseconds sleeps in the kernel
(native/exchange/counters.h).

Sums are added in the order of places, so that results have the bits of gloo.

Shape legend: N numbers of a part.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

import ridgeline._native as _native
from ridgeline.engine.parallel.exchange.base import GroupCollectives
from ridgeline.errors import RankFailed
from ridgeline.modelspec.shard import Members, Shard

LINE_BYTES = 64
SLOT_BYTES = 2 << 20
"""Larger parts are exchanged in several rounds."""

Reduction = Callable[[Tensor, Tensor], Tensor]

_LINES_PER_RANK, _SLOTS_PER_RANK = 5, 8
_COUNTER_MASK = 0xFFFFFFFF


def segment_bytes(num_ranks: int) -> int:
    """Size of the memory that `num_ranks` ranks share."""
    return _slots_start(num_ranks) + num_ranks * _SLOTS_PER_RANK * SLOT_BYTES


def _slots_start(num_ranks: int) -> int:
    lines = (1 + _LINES_PER_RANK * num_ranks) * LINE_BYTES
    return -(-lines // mmap.PAGESIZE) * mmap.PAGESIZE


def why_no_segment() -> str | None:
    """Why processes of this system cannot share memory without a name; None if they can."""
    return None if hasattr(os, "memfd_create") else "memfd_create(2) is a call of Linux"


def create_segment(num_ranks: int) -> int:
    """A file descriptor of zeroed memory, which child processes inherit. Raises OSError."""
    descriptor = os.memfd_create("ridgeline-ranks")
    os.posix_fallocate(descriptor, 0, segment_bytes(num_ranks))
    return descriptor


class SharedSegment:
    """The shared memory, mapped into this process."""

    def __init__(self, descriptor: int, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._map = mmap.mmap(descriptor, segment_bytes(num_ranks))
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.address = self._bytes.data_ptr()
        self._views: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def counter(self, rank: int, which: int) -> int:
        """Address of a counter of a rank."""
        return self.address + (1 + _LINES_PER_RANK * rank + which) * LINE_BYTES

    def slot(self, rank: int, which: int, dtype: torch.dtype) -> Tensor:
        """A slot of a rank, as numbers."""
        key = (rank, which, dtype)
        if key not in self._views:
            start = _slots_start(self.num_ranks)
            start += (rank * _SLOTS_PER_RANK + which) * SLOT_BYTES
            self._views[key] = self._bytes[start : start + SLOT_BYTES].view(dtype)
        return self._views[key]

    def abort(self) -> None:
        """Make every wait of every process fail."""
        _native.publish_counter(self.address, 1)


_IN_STAGE, _IN_TENSOR, _IN_CONTEXT, _SENT, _RECEIVED = range(_LINES_PER_RANK)
_SEND_SLOT = 2 * _SENT


class SharedMemoryExchanges:
    """`GroupCollectives` among `members`, of which this process is `rank`.

    `counter` is the number of the line that counts their rounds, and half of that of their slots.
    """

    def __init__(
        self, members: Members, rank: int, counter: int, segment: SharedSegment, timeout_s: float
    ) -> None:
        self.members, self.rank, self._counter = members, rank, counter
        self.place, self.num_places = members.place, members.size
        self.segment, self.timeout_s = segment, timeout_s
        self._round = 0

    def sum_parts(self, part: Tensor) -> Tensor:
        if self.num_places == 1:
            return part
        return self._reduce(part, torch.Tensor.add_)

    def sum_integers(self, part: Tensor) -> Tensor:
        return self.sum_parts(part)

    def maximum(self, part: Tensor) -> Tensor:
        if self.num_places == 1:
            return part
        return self._reduce(part, lambda total, own: torch.maximum(total, own, out=total))

    def sum_rows(self, part: Tensor, counts: Sequence[int]) -> Tensor:
        if self.num_places == 1:
            return part
        width, before = part.shape[1], sum(counts[: self.place])
        start, stop = before * width, (before + counts[self.place]) * width
        own_N, total_N = part.contiguous().view(-1), part.new_empty(stop - start)
        for piece in _pieces(len(own_N), part.dtype):
            parity = self._enter(own_N[piece])
            low, high = max(start, piece.start), min(stop, piece.stop)
            if low >= high:
                continue
            sum_N = total_N[low - start : high - start]
            for place in range(self.num_places):
                other_N = self._gathered(place, parity, part.dtype)
                other_N = other_N[low - piece.start : high - piece.start]
                sum_N.copy_(other_N) if place == 0 else sum_N.add_(other_N)
        return total_N.view(-1, width)

    def _reduce(self, part: Tensor, add: Reduction) -> Tensor:
        part = part.contiguous()
        own_N, total_N = part.view(-1), torch.empty_like(part).view(-1)
        for piece in _pieces(len(own_N), part.dtype):
            parity = self._enter(own_N[piece])
            sum_N = total_N[piece]
            for place in range(self.num_places):
                other_N = self._gathered(place, parity, part.dtype)[: len(sum_N)]
                sum_N.copy_(other_N) if place == 0 else add(sum_N, other_N)
        return total_N.view(part.shape)

    def broadcast(self, x: Tensor) -> Tensor:
        if self.num_places > 1:
            size = x.numel()
            lengths = [size, *[0] * (self.num_places - 1)]
            own_N = x.contiguous().view(-1) if self.place == 0 else x.new_empty(0)
            (values_N, *_) = self._gather(own_N, lengths)
            x.copy_(values_N.view(x.shape))
        return x

    def gather_columns(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        if self.num_places == 1:
            return part
        parts = self._gather(part.contiguous().view(-1), [len(part) * own for own in widths])
        if self.place:
            return part
        columns = [own.view(len(part), width) for own, width in zip(parts, widths, strict=True)]
        return torch.cat(columns, 1)

    def gather_rows(self, part: Tensor, counts: Sequence[int]) -> list[Tensor]:
        if self.num_places == 1:
            return [part]
        width = part.shape[1]
        parts = self._gather(part.contiguous().view(-1), [count * width for count in counts])
        return [own.view(count, width) for own, count in zip(parts, counts, strict=True)]

    def _gather(self, own_N: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """Every place's numbers, `lengths` of them."""
        results = [own_N.new_empty(length) for length in lengths]
        for piece in _pieces(max(lengths), own_N.dtype):
            parity = self._enter(own_N[piece])
            for place, result_N in enumerate(results):
                into_N = result_N[piece]
                into_N.copy_(self._gathered(place, parity, own_N.dtype)[: len(into_N)])
        return results

    def _enter(self, own_N: Tensor) -> int:
        """Publish this rank's numbers and wait for all others'; returns which slots hold them."""
        self._round += 1
        parity = self._round % 2
        rank, segment, counter = self.rank, self.segment, self._counter
        segment.slot(rank, 2 * counter + parity, own_N.dtype)[: len(own_N)].copy_(own_N)
        _native.publish_counter(segment.counter(rank, counter), self._round & _COUNTER_MASK)
        self._wait(self.members, counter, self._round)
        return parity

    def _gathered(self, place: int, parity: int, dtype: torch.dtype) -> Tensor:
        rank = self.members.first + place * self.members.stride
        return self.segment.slot(rank, 2 * self._counter + parity, dtype)

    def _wait(self, members: Members, which: int, value: int) -> None:
        reached = _native.wait_for_counters(
            self.segment.counter(members.first, which),
            members.size,
            members.stride * _LINES_PER_RANK * LINE_BYTES,
            value & _COUNTER_MASK,
            self.segment.address,
            self.timeout_s,
        )
        if not reached:
            raise RankFailed(f"rank {self.rank} lost the other ranks: no answer in shared memory")


class SharedMemoryCollectives(SharedMemoryExchanges):
    """`Collectives` among ranks of one host."""

    tensor: GroupCollectives
    context: GroupCollectives

    def __init__(self, shard: Shard, timeout_s: float, descriptor: int) -> None:
        segment = SharedSegment(descriptor, shard.sizes.num_ranks)
        super().__init__(shard.stage_members, shard.rank, _IN_STAGE, segment, timeout_s)
        self.shard = shard
        self._num_sent = self._num_received = 0
        self.tensor = self._division(shard.tensor_members, _IN_TENSOR)
        self.context = self._division(shard.context_members, _IN_CONTEXT)

    def _division(self, members: Members, counter: int) -> SharedMemoryExchanges:
        """The exchanges of a part of the stage's ranks, or of all of them."""
        if members.size == self.num_places:
            return self
        return SharedMemoryExchanges(members, self.rank, counter, self.segment, self.timeout_s)

    def connect(self, store: str) -> None:
        """Nothing to do: the memory was there before the ranks."""

    def send(self, x: Tensor, stage: int) -> None:
        own_N, segment, peer = x.contiguous().view(-1), self.segment, self._peer(stage)
        for piece in _pieces(len(own_N), x.dtype):
            self._num_sent += 1
            if self._num_sent > 2:
                self._wait(_one(peer), _RECEIVED, self._num_sent - 2)
            values_N = own_N[piece]
            slot = segment.slot(self.shard.rank, _SEND_SLOT + self._num_sent % 2, x.dtype)
            slot[: len(values_N)].copy_(values_N)
            counter = segment.counter(self.shard.rank, _SENT)
            _native.publish_counter(counter, self._num_sent & _COUNTER_MASK)

    def receive(self, x: Tensor, stage: int) -> Tensor:
        flat_N, segment, peer = x.view(-1), self.segment, self._peer(stage)
        for piece in _pieces(len(flat_N), x.dtype):
            self._num_received += 1
            self._wait(_one(peer), _SENT, self._num_received)
            values_N = flat_N[piece]
            slot = segment.slot(peer, _SEND_SLOT + self._num_received % 2, x.dtype)
            values_N.copy_(slot[: len(values_N)])
            counter = segment.counter(self.shard.rank, _RECEIVED)
            _native.publish_counter(counter, self._num_received & _COUNTER_MASK)
        return x

    def _peer(self, stage: int) -> int:
        return stage * self.num_places + self.place


def _one(rank: int) -> Members:
    return Members(rank, 1, 1, 0)


def _pieces(length: int, dtype: torch.dtype) -> Iterator[slice]:
    step = SLOT_BYTES // dtype.itemsize
    return (slice(start, start + step) for start in range(0, length, step))
