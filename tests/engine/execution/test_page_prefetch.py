"""Memory of the KV cache is there before a step writes to it, and what it holds stays."""

from __future__ import annotations

import resource
import sys
import threading

import numpy as np
import pytest
import torch
from torch import Tensor

from ridgeline import Engine, Sampling
from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.attention.kv_format import PlainKv
from ridgeline.engine.execution.page_prefetch import PagePrefetcher, populate_pages
from ridgeline.engine.kernels.large_pages import LARGE_PAGE, own_pages
from ridgeline.engine.scheduler.kv.block_pool import BlockPool

PER_PAGE = 16  # blocks in a large page of one layer
NUM_BLOCKS = 10 * PER_PAGE
FORMAT = PlainKv(torch.float32)


def cache_of(num_blocks: int = NUM_BLOCKS, num_layers: int = 3) -> KvCache:
    width = LARGE_PAGE // PER_PAGE // (2 * 2 * 16 * 4)
    layers = [torch.zeros(num_blocks, 2, 2, 16, width) for _ in range(num_layers)]
    return KvCache(layers, FORMAT, torch.float32)


class Asked:
    """Stands in for the system: which bytes of which layer were asked for."""

    def __init__(self) -> None:
        self.spans: list[tuple[int, int, int]] = []

    def __call__(self, layer: Tensor, first: int, end: int) -> bool:
        self.spans.append((layer.data_ptr(), first, end))
        return True


def wait_for_pages() -> None:
    for thread in threading.enumerate():
        if thread.name == "ridgeline-pages":
            thread.join(10)


def test_every_block_is_prefetched_once_and_a_page_ahead() -> None:
    cache, asked = cache_of(), Asked()
    pool = BlockPool(NUM_BLOCKS, 16)
    pool.watch_high_water(PagePrefetcher(cache, asked).extend_to)
    each = cache.layers[0].nbytes // NUM_BLOCKS
    rng = np.random.default_rng()
    given = 0
    while pool.num_idle:
        count = int(rng.integers(1, min(9, pool.num_idle) + 1))
        taken = [pool.allocate()] if count == 1 else pool.allocate_many(count)
        given = max(given, *taken)
        if rng.random() < 0.3:  # comes back, and is given again before a new one
            pool.release_all(taken)
        wait_for_pages()
        there = max(end for _, _, end in asked.spans) // each
        assert there >= min(NUM_BLOCKS, given + PER_PAGE)
        assert there <= given + 4 * PER_PAGE  # and no more than that: the rest may stay unused
    for layer in cache.layers:
        spans = sorted(span[1:] for span in asked.spans if span[0] == layer.data_ptr())
        ends = [0, *(end for _, end in spans)]
        assert [first for first, _ in spans] == ends[:-1]
        assert ends[-1] == layer.nbytes


def test_prefetching_keeps_written_data() -> None:
    kept = torch.randn(LARGE_PAGE)
    same = kept.clone()
    populate_pages(kept, 0, kept.nbytes)
    assert torch.equal(kept, same)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for pages")
def test_writes_cause_no_page_faults() -> None:
    def faults_of_writing(memory: Tensor) -> int:
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        memory.numpy().fill(1)  # on this thread alone
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before

    faults_of_writing(torch.zeros(64, dtype=torch.uint8))  # the code's own pages
    size = 16 * LARGE_PAGE
    fresh, supplied = own_pages(size), own_pages(size)
    if not populate_pages(supplied, 0, size):
        pytest.skip("this system does not supply pages when asked (Linux before 5.14)")
    assert faults_of_writing(supplied) <= 2
    assert faults_of_writing(fresh) >= 15


def test_prefetching_stops_after_the_first_layer_where_the_system_cannot_do_it() -> None:
    calls = []

    def cannot(layer: Tensor, first: int, end: int) -> bool:
        calls.append((first, end))
        return False

    PagePrefetcher(cache_of(), cannot).extend_to(0)
    wait_for_pages()
    assert len(calls) == 1


def test_device_memory_is_not_prefetched() -> None:
    layers = [torch.zeros(64, 2, 2, 16, 1024, device="meta")]
    asked = Asked()
    pages = PagePrefetcher(KvCache(layers, FORMAT, torch.float32), asked)
    assert pages.extend_to(0) > 0
    wait_for_pages()
    assert not asked.spans


@pytest.mark.slow
def test_engine_prefetches_pages_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked()
    monkeypatch.setattr("ridgeline.engine.execution.page_prefetch.populate_pages", asked)
    with Engine.open("demo", kv_cache_memory_bytes=96 << 20, max_model_len=2048) as engine:
        wait_for_pages()
        at_start = max(end for _, _, end in asked.spans)
        engine.generate([[7] * 1900, [8] * 1900], Sampling(max_tokens=4, ignore_eos=True))
        wait_for_pages()
    assert max(end for _, _, end in asked.spans) > at_start > 0
    assert len({layer for layer, _, _ in asked.spans}) == 6  # every layer of the model
