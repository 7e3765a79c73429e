"""The ranks of a layout as threads of one process, which exchange tensors by reference."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ridgeline.engine.attention import build_attention, choose
from ridgeline.engine.attention.base import AttentionSite
from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.attention.kv_format import kv_format
from ridgeline.engine.checkpoints.load import load_decoder
from ridgeline.engine.execution.runner import TorchRunner
from ridgeline.engine.parallel.messages import Command, RankConfig
from ridgeline.engine.parallel.rank import RankWorker, load_model
from ridgeline.engine.parallel.resolve import choose_rank_layers
from ridgeline.engine.parallel.runner import GroupRunner, make_runner
from ridgeline.errors import RankFailed
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.cost.kv_layout import kv_layout
from ridgeline.modelspec.model import ModelSpec
from ridgeline.modelspec.rewrite import apply_quantization, with_dtype
from ridgeline.modelspec.shard import Members, ParallelSizes, Shard

TIMEOUT_S = 20.0


class Meeting:
    """Where the ranks of one group meet: a barrier, and what each of them brought."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.values: list[Any] = [None] * size


class Board:
    """Where the ranks of one process meet: by group of ranks, and a queue per pair of ranks."""

    def __init__(self, sizes: ParallelSizes) -> None:
        self.sizes = sizes
        shards = [Shard(sizes=sizes, rank=rank) for rank in range(sizes.num_ranks)]
        self.meetings = {
            (members.first, members.stride, members.size): Meeting(members.size)
            for own in shards
            for members in (own.stage_members, own.tensor_members, own.context_members)
        }
        pairs = [(a, b) for a in range(sizes.num_ranks) for b in range(sizes.num_ranks)]
        self.queues: dict[tuple[int, int], queue.Queue[Tensor]] = {p: queue.Queue() for p in pairs}

    def abort(self) -> None:
        for meeting in self.meetings.values():
            meeting.barrier.abort()


class ThreadExchanges:
    """`GroupCollectives` among threads."""

    def __init__(self, members: Members, board: Board) -> None:
        self.board, self.place, self.num_places = board, members.place, members.size
        self._meeting = board.meetings[members.first, members.stride, members.size]

    def _exchange(self, value: Tensor) -> list[Tensor]:
        if self.num_places == 1:
            return [value]
        values, barrier = self._meeting.values, self._meeting.barrier
        values[self.place] = value.clone()
        try:
            barrier.wait(TIMEOUT_S)
            everyone = list(values)
            barrier.wait(TIMEOUT_S)
        except threading.BrokenBarrierError:
            raise RankFailed(f"place {self.place} lost the other ranks") from None
        return everyone

    def sum_parts(self, part: Tensor) -> Tensor:
        first, *others = self._exchange(part)
        total = first.clone()
        for other in others:
            total += other
        return total

    def sum_integers(self, part: Tensor) -> Tensor:
        assert part.dtype == torch.int32
        return torch.stack(self._exchange(part)).sum(0, dtype=torch.int32)

    def sum_rows(self, part: Tensor, counts: Sequence[int]) -> Tensor:
        assert len(part) == sum(counts) and len(counts) == self.num_places
        return self.sum_parts(part).split(list(counts))[self.place].clone()

    def maximum(self, part: Tensor) -> Tensor:
        return torch.stack(self._exchange(part)).amax(0)

    def broadcast(self, x: Tensor) -> Tensor:
        return x.copy_(self._exchange(x)[0])

    def gather_columns(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        everyone = self._exchange(part)
        assert [own.shape[1] for own in everyone] == list(widths)
        return torch.cat(everyone, 1) if self.place == 0 else part

    def gather_rows(self, part: Tensor, counts: Sequence[int]) -> list[Tensor]:
        everyone = self._exchange(part)
        assert [len(own) for own in everyone] == list(counts)
        return everyone


class ThreadCollectives(ThreadExchanges):
    """`Collectives` among threads."""

    def __init__(self, shard: Shard, board: Board) -> None:
        super().__init__(shard.stage_members, board)
        self.shard = shard
        self.tensor = ThreadExchanges(shard.tensor_members, board)
        self.context = ThreadExchanges(shard.context_members, board)

    def send(self, x: Tensor, stage: int) -> None:
        self.board.queues[self.shard.rank, self._peer(stage)].put(x.clone())

    def receive(self, x: Tensor, stage: int) -> Tensor:
        return x.copy_(self.board.queues[self._peer(stage), self.shard.rank].get(timeout=TIMEOUT_S))

    def _peer(self, stage: int) -> int:
        return stage * self.num_places + self.place


class EmulatedRanks:
    """Every rank of a layout: rank 0 is `runner`, each other one has a thread."""

    def __init__(self, config: RankConfig) -> None:
        self.board = Board(config.sizes)
        ranks = range(config.sizes.num_ranks)
        configs = [_of_rank(config, rank) for rank in ranks]
        self.models = [load_model(own, ThreadCollectives(own.shard, self.board)) for own in configs]
        self._queues = [queue.Queue[Command | None]() for _ in self.models[1:]]
        self._errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._work, args=(RankWorker(model), commands), daemon=True)
            for model, commands in zip(self.models[1:], self._queues, strict=True)
        ]
        for thread in self._threads:
            thread.start()
        self.runner: GroupRunner = make_runner(self.models[0], self, None, None, None)

    def _work(self, worker: RankWorker, commands: queue.Queue[Command | None]) -> None:
        torch.set_num_threads(1)
        try:
            while (command := commands.get()) is not None:
                worker.execute(command)
        except BaseException as error:
            self._errors.append(error)
            self.board.abort()

    def announce(self, command: Command) -> None:
        for commands in self._queues:
            commands.put(command)

    def explain(self, error: RankFailed) -> RankFailed:
        if self._errors:
            raise self._errors[0]
        return error

    def __enter__(self) -> EmulatedRanks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for commands in self._queues:
            commands.put(None)
        for thread in self._threads:
            thread.join(TIMEOUT_S)
        assert not self._errors or error is not None, self._errors


def _of_rank(config: RankConfig, rank: int) -> RankConfig:
    import msgspec

    return msgspec.structs.replace(config, rank=rank)


def config_of(
    folder: Path | str, sizes: ParallelSizes, quantization: str | None = None, **changes: Any
) -> RankConfig:
    """The configuration of rank 0 of a small model in float32."""
    spec: ModelSpec = with_dtype(load_spec(str(folder)), "float32")
    if quantization is not None:
        spec = apply_quantization(spec, quantization)
    site = AttentionSite.of(spec, torch.device("cpu"), torch.float32, 16)
    values: dict[str, Any] = {
        "rank": 0,
        "sizes": sizes,
        "store": "",
        "segment": None,
        "nnodes": 1,
        "master_addr": None,
        "timeout_s": TIMEOUT_S,
        "model": str(folder),
        "spec": spec,
        "dtype": "float32",
        "seed": 0,
        "max_model_len": spec.max_positions,
        "max_num_seqs": 4,
        "num_blocks": 24,
        "block_size": 16,
        "kv_cache_dtype": spec.kv_dtype,
        "attention_backend": choose("auto", site)[0],
        "layer_backend": choose_rank_layers(
            "auto", spec, sizes, torch.device("cpu"), torch.float32
        )[0],
        "device": "cpu",
        "num_threads": 1,
        "num_threads_decode": 1,
    }
    return RankConfig(**values | changes)


def one_process(config: RankConfig) -> TorchRunner:
    """What computes the whole model with the same layers and attention: the reference."""
    spec = config.spec
    decoder = load_decoder(
        config.model,
        spec,
        device="cpu",
        compute_dtype=torch.float32,
        max_model_len=config.max_model_len,
        layer_backend=config.layer_backend,
    )
    cache = KvCache.allocate(
        spec,
        config.num_blocks,
        config.block_size,
        torch.float32,
        "cpu",
        kv_format(config.kv_cache_dtype),
        config.max_num_seqs,
        kv_layout(spec),
    )
    return TorchRunner(decoder, cache, build_attention(config.attention_backend, spec, cache))


Checkpoint = Callable[[str], Path]
