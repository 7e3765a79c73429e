"""Exchanges over the process groups of torch.distributed, whatever their backend."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ridgeline.errors import RankFailed
from ridgeline.modelspec.shard import Shard

TCP = "tcp://"


class ProcessGroupBackend(Protocol):
    """Makes the process groups of one backend."""

    def make_group(self, store: dist.Store, rank: int, size: int) -> dist.ProcessGroup:
        """The group of `size` processes that meet at `store`. Raises RuntimeError."""
        ...


class ProcessGroupCollectives:
    """Collectives over process groups: one per stage, and one of all ranks between stages.

    `connect` blocks until every rank has called it. An exchange that takes longer than `timeout_s`
    fails.
    """

    def __init__(self, shard: Shard, timeout_s: float, backend: ProcessGroupBackend) -> None:
        self.shard, self.place, self.num_places = shard, shard.place, shard.sizes.stage_ranks
        self.timeout_s, self._backend = timeout_s, backend
        self._stage: dist.ProcessGroup | None = None
        self._world: dist.ProcessGroup | None = None

    def connect(self, store: str) -> None:
        sizes = self.shard.sizes
        shared = self._open_store(store)
        if self.num_places > 1:
            stage_store = dist.PrefixStore(f"stage{self.shard.stage}", shared)
            self._stage = self._group(stage_store, self.place, self.num_places)
        if sizes.pipeline > 1:
            world_store = dist.PrefixStore("world", shared)
            self._world = self._group(world_store, self.shard.rank, sizes.num_ranks)

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
            raise self._failed(error) from error

    def _group(self, store: dist.Store, rank: int, size: int) -> dist.ProcessGroup:
        try:
            return self._backend.make_group(store, rank, size)
        except RuntimeError as error:
            raise self._failed(error) from error

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
    def _within(self) -> dist.ProcessGroup:
        assert self._stage is not None, "not connected"
        return self._stage

    @property
    def _between(self) -> dist.ProcessGroup:
        assert self._world is not None, "not connected"
        return self._world

    def _wait(self, work: dist.Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise self._failed(error) from error

    def _failed(self, error: RuntimeError) -> RankFailed:
        reason = str(error).splitlines()[0]
        return RankFailed(f"rank {self.shard.rank} lost the other ranks: {reason}")
