"""Exchanges over the process groups of torch.distributed, whatever their backend."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ridgeline.engine.parallel.exchange.base import GroupCollectives
from ridgeline.errors import RankFailed
from ridgeline.modelspec.shard import Members, Shard

TCP = "tcp://"


class ProcessGroupBackend(Protocol):
    """Makes the process groups of one backend."""

    def make_group(self, store: dist.Store, rank: int, size: int) -> dist.ProcessGroup:
        """The group of `size` processes that meet at `store`. Raises RuntimeError."""
        ...


class ProcessGroupExchanges:
    """Exchanges among the ranks of one process group, which is made by `join`."""

    def __init__(self, members: Members, rank: int) -> None:
        self.place, self.num_places = members.place, members.size
        self.rank = rank
        self._group: dist.ProcessGroup | None = None

    def join(self, backend: ProcessGroupBackend, store: dist.Store) -> None:
        """Make the group, together with its other ranks. Raises RankFailed."""
        try:
            self._group = backend.make_group(store, self.place, self.num_places)
        except RuntimeError as error:
            raise lost_ranks(self.rank, error) from error

    def sum_parts(self, part: Tensor) -> Tensor:
        if self.num_places == 1:
            return part
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.num_places)]
        self._wait(self._within.allgather([parts], [part]))
        total = parts[0]
        for other in parts[1:]:
            total += other
        return total

    def sum_rows(self, part: Tensor, counts: Sequence[int]) -> Tensor:
        if self.num_places == 1:
            return part
        num_own, width = counts[self.place], part.shape[1]
        everyone = part.new_empty((num_own * self.num_places, width))
        own_counts = [num_own] * self.num_places
        options = dist.AllToAllOptions()
        self._wait(
            self._within.alltoall_base(
                everyone, part.contiguous(), own_counts, list(counts), options
            )
        )
        total, *others = everyone.split(num_own) if num_own else [everyone]
        for other in others:
            total += other
        return total

    def sum_integers(self, part: Tensor) -> Tensor:
        return self._all_reduce(part, dist.ReduceOp.SUM)

    def maximum(self, part: Tensor) -> Tensor:
        return self._all_reduce(part, dist.ReduceOp.MAX)

    def _all_reduce(self, part: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        if self.num_places == 1:
            return part
        part = part.contiguous()
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(op)
        self._wait(self._within.allreduce([part], options))
        return part

    def broadcast(self, x: Tensor) -> Tensor:
        if self.num_places > 1:
            self._wait(self._within.broadcast([x], dist.BroadcastOptions()))
        return x

    def gather_columns(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        if self.num_places == 1:
            return part
        part = part.contiguous()
        if self.place:
            self._wait(self._within.send([part], 0, self.place))
            return part
        parts = [part, *(part.new_empty(len(part), width) for width in widths[1:])]
        waiting = [self._within.recv([parts[i]], i, i) for i in range(1, self.num_places)]
        for work in waiting:
            self._wait(work)
        return torch.cat(parts, dim=1)

    def gather_rows(self, part: Tensor, counts: Sequence[int]) -> list[Tensor]:
        if self.num_places == 1:
            return [part]
        # backends gather tensors of one shape only.
        padded = part.new_zeros((max(counts), part.shape[1]))
        padded[: len(part)] = part
        parts = [torch.empty_like(padded) for _ in counts]
        if len(padded):
            self._wait(self._within.allgather([parts], [padded]))
        return [own[:count] for own, count in zip(parts, counts, strict=True)]

    @property
    def _within(self) -> dist.ProcessGroup:
        assert self._group is not None, "not connected"
        return self._group

    def _wait(self, work: dist.Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise lost_ranks(self.rank, error) from error


class ProcessGroupCollectives(ProcessGroupExchanges):
    """Collectives over process groups: one per stage, its divisions if it has two, and one of all
    ranks between stages.

    `connect` blocks until every rank has called it. An exchange that takes longer than `timeout_s`
    fails.
    """

    tensor: GroupCollectives
    context: GroupCollectives

    def __init__(self, shard: Shard, timeout_s: float, backend: ProcessGroupBackend) -> None:
        super().__init__(shard.stage_members, shard.rank)
        self.shard, self.timeout_s, self._backend = shard, timeout_s, backend
        self._world: dist.ProcessGroup | None = None
        self._divisions: dict[Members, ProcessGroupExchanges] = {}
        self.tensor = self._division(shard.tensor_members)
        self.context = self._division(shard.context_members)

    def _division(self, members: Members) -> ProcessGroupExchanges:
        """The exchanges of a part of the stage's ranks, or of all of them."""
        if members.size == self.num_places:
            return self
        exchanges = ProcessGroupExchanges(members, self.rank)
        if members.size > 1:
            self._divisions[members] = exchanges
        return exchanges

    def connect(self, store: str) -> None:
        sizes = self.shard.sizes
        shared = self._open_store(store)
        if self.num_places > 1:
            self.join(self._backend, dist.PrefixStore(f"stage{self.shard.stage}", shared))
        for members, exchanges in self._divisions.items():
            name = f"from{members.first}by{members.stride}"
            exchanges.join(self._backend, dist.PrefixStore(name, shared))
        if sizes.pipeline > 1:
            world_store = dist.PrefixStore("world", shared)
            try:
                self._world = self._backend.make_group(
                    world_store, self.shard.rank, sizes.num_ranks
                )
            except RuntimeError as error:
                raise lost_ranks(self.rank, error) from error

    def _open_store(self, store: str) -> dist.Store:
        sizes = self.shard.sizes
        if not store.startswith(TCP):
            return dist.FileStore(store, sizes.num_ranks)
        host, _, port = store.removeprefix(TCP).rpartition(":")
        try:
            return dist.TCPStore(
                host,
                int(port),
                sizes.num_ranks,
                self.shard.rank == 0,
                timeout=timedelta(seconds=self.timeout_s),
            )
        except RuntimeError as error:
            raise lost_ranks(self.rank, error) from error

    def send(self, x: Tensor, stage: int) -> None:
        if x.numel():
            self._wait(self._between.send([x.contiguous()], self._peer(stage), 0))

    def receive(self, x: Tensor, stage: int) -> Tensor:
        if x.numel():
            self._wait(self._between.recv([x], self._peer(stage), 0))
        return x

    def _peer(self, stage: int) -> int:
        return stage * self.num_places + self.place

    @property
    def _between(self) -> dist.ProcessGroup:
        assert self._world is not None, "not connected"
        return self._world


def lost_ranks(rank: int, error: RuntimeError) -> RankFailed:
    """The error of a rank whose exchange failed."""
    return RankFailed(f"rank {rank} lost the other ranks: {str(error).splitlines()[0]}")
