"""Exchanges in shared memory have the results of the reference, and never wait for ever."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.engine.parallel.exchange.base import Collectives
from ridgeline.engine.parallel.exchange.shared_memory import (
    SLOT_BYTES,
    SharedMemoryCollectives,
    SharedSegment,
    create_segment,
)
from ridgeline.errors import RankFailed
from ridgeline.modelspec.shard import ParallelSizes, Shard
from tests.engine.parallel.emulated import Board, ThreadCollectives

SIZES = (1, 3, 1000, SLOT_BYTES // 4 - 1, SLOT_BYTES // 4 + 7)
Ranks = Callable[[ParallelSizes, float], list[SharedMemoryCollectives]]


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """Makes the collectives of every rank of a layout, over one segment."""
    descriptors = []

    def make(sizes: ParallelSizes, timeout_s: float) -> list[SharedMemoryCollectives]:
        descriptors.append(create_segment(sizes.num_ranks))
        return [
            SharedMemoryCollectives(Shard(sizes=sizes, rank=rank), timeout_s, descriptors[-1])
            for rank in range(sizes.num_ranks)
        ]

    yield make
    for descriptor in descriptors:
        os.close(descriptor)


def at_once(jobs: list[Callable[[], Any]]) -> list[Any]:
    """The results of jobs that run side by side."""
    results: list[Any] = [None] * len(jobs)

    def work(i: int) -> None:
        results[i] = jobs[i]()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def exchange_everything(collectives: Collectives, seed: int) -> list[Tensor]:
    """Random exchanges; all ranks draw the same sizes, and each its own numbers."""
    rng, place, num = random.Random(seed), collectives.place, collectives.num_places
    numbers = torch.Generator().manual_seed(100 * seed + place)
    results: list[Tensor] = []
    for size in rng.sample(SIZES, len(SIZES)):
        x = torch.randn((size,), generator=numbers)
        results.append(collectives.sum_parts(x.clone()))
        results.append(collectives.sum_parts(x.to(torch.bfloat16)))
        results.append(collectives.sum_integers((x * 1000).to(torch.int32)))
        results.append(collectives.maximum(x.clone()))
        results.append(collectives.broadcast(x.clone()))
        counts = [rng.randrange(4) for _ in range(num)]
        rows = torch.randn((counts[place], 5), generator=numbers)
        results += collectives.gather_rows(rows, counts)
        part = torch.randn((sum(counts), 5), generator=numbers)
        results.append(collectives.sum_rows(part, counts))
        widths = [rng.randrange(1, 40) for _ in range(num)]
        columns = torch.randn((3, widths[place]), generator=numbers)
        if place == 0:
            results.append(collectives.gather_columns(columns, widths))
        else:
            collectives.gather_columns(columns, widths)
    return results


@pytest.mark.parametrize("num", [2, 3])
def test_exchanges_have_the_bits_of_the_reference(num: int, ranks: Ranks) -> None:
    sizes = ParallelSizes(tensor=num)
    board = Board(sizes)
    references = [ThreadCollectives(Shard(sizes=sizes, rank=rank), board) for rank in range(num)]
    expected = at_once([lambda own=own: exchange_everything(own, 7) for own in references])
    found = at_once([lambda own=own: exchange_everything(own, 7) for own in ranks(sizes, 20.0)])
    for own, reference in zip(found, expected, strict=True):
        assert len(own) == len(reference)
        assert all(map(torch.equal, own, reference))


def test_divisions_of_a_stage_exchange_apart(ranks: Ranks) -> None:
    sizes = ParallelSizes(tensor=2, context=3)
    board = Board(sizes)
    references = [ThreadCollectives(Shard(sizes=sizes, rank=rank), board) for rank in range(6)]
    rows = SLOT_BYTES // 20 + 3  # of five float32: more than one slot

    def exchange(own: Collectives) -> list[Tensor]:
        numbers = torch.Generator().manual_seed(own.place)
        part = torch.randn((rows, 5), generator=numbers)
        mine = own.tensor.sum_rows(part, [rows - 2, 2])
        counts = [(3 * place + own.tensor.place) % 4 for place in range(3)]
        everyone = own.context.gather_rows(part[: counts[own.context.place]], counts)
        return [mine, *everyone, own.sum_parts(part)]

    expected = at_once([lambda own=own: exchange(own) for own in references])
    found = at_once([lambda own=own: exchange(own) for own in ranks(sizes, 20.0)])
    for own, reference in zip(found, expected, strict=True):
        assert all(map(torch.equal, own, reference))


def test_stages_receive_what_was_sent_in_order(ranks: Ranks) -> None:
    sizes = ParallelSizes(pipeline=2)
    first, second = ranks(sizes, 20.0)
    sent = [torch.randn(size) for size in (*SIZES, 0, 5)]

    def send() -> None:
        for x in sent:
            first.send(x, 1)

    def receive() -> list[Tensor]:
        return [second.receive(torch.empty_like(x), 0) for x in sent]

    _, received = at_once([send, receive])
    assert all(map(torch.equal, received, sent))


def test_rank_without_partners_gives_up_in_time(ranks: Ranks) -> None:
    own, _ = ranks(ParallelSizes(tensor=2), 0.05)
    began_s = time.monotonic()
    with pytest.raises(RankFailed, match="rank 0 lost the other ranks"):
        own.sum_parts(torch.ones(4))
    assert time.monotonic() - began_s < 5


def test_aborted_segment_ends_a_wait_before_its_timeout(ranks: Ranks) -> None:
    own, _ = ranks(ParallelSizes(tensor=2), 60.0)
    threading.Timer(0.05, own.segment.abort).start()
    began_s = time.monotonic()
    with pytest.raises(RankFailed):
        own.sum_parts(torch.ones(4))
    assert time.monotonic() - began_s < 5


def test_segment_is_one_memory_for_all_who_map_it() -> None:
    descriptor = create_segment(2)
    try:
        one, two = SharedSegment(descriptor, 2), SharedSegment(descriptor, 2)
        one.slot(1, 3, torch.float32)[5] = 2.5
        assert two.slot(1, 3, torch.float32)[5] == 2.5
    finally:
        os.close(descriptor)
