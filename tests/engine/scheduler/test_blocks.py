"""The block pool: counts, eviction order, sharing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.engine.scheduler.kv.block_pool import BlockPool
from ridgeline.errors import BadInput


def test_allocate_hands_out_every_block_once() -> None:
    pool = BlockPool(4, 16)
    assert [pool.allocate() for _ in range(4)] == [0, 1, 2, 3]
    assert (pool.num_idle, pool.num_owned) == (0, 4)
    with pytest.raises(AssertionError):
        pool.allocate()


def test_the_tail_of_a_table_is_evicted_first() -> None:
    pool = BlockPool(5, 16)
    table = [pool.allocate() for _ in range(3)]
    for block in table:
        pool.publish(block)
    pool.release_all(table)
    assert pool.idle_blocks() == [3, 4, 2, 1, 0]  # worthless blocks, then the tail before the head


def test_worthless_blocks_go_before_cached_ones() -> None:
    pool = BlockPool(2, 16)
    cached, worthless = pool.allocate(), pool.allocate()
    pool.publish(cached)
    pool.release(cached)
    pool.release(worthless)
    assert pool.allocate() == worthless
    assert pool.num_cached == 1


def test_block_is_idle_once_its_last_owner_releases_it() -> None:
    pool = BlockPool(1, 16)
    block = pool.allocate()
    pool.retain(block)
    pool.release(block)
    assert pool.num_idle == 0
    pool.release(block)
    assert pool.num_idle == 1
    with pytest.raises(AssertionError):
        pool.release(block)


def test_eviction_is_reported_and_unpublishes() -> None:
    pool, evicted = BlockPool(1, 16), []
    pool.on_evict = evicted.append
    block = pool.allocate()
    pool.publish(block)
    pool.release(block)
    assert (pool.num_cached, pool.num_free, evicted) == (1, 0, [])
    assert pool.allocate() == block
    assert evicted == [block]
    assert not pool.is_published(block)


def test_retaining_a_cached_block_takes_it_out_of_the_middle_of_the_list() -> None:
    pool = BlockPool(3, 16)
    blocks = [pool.allocate() for _ in range(3)]
    for block in blocks:
        pool.publish(block)
        pool.release(block)
    pool.retain(1)
    assert pool.idle_blocks() == [0, 2]
    assert (pool.num_cached, pool.num_owned) == (2, 1)


def test_unpublished_idle_block_is_reused_next() -> None:
    pool = BlockPool(3, 16)
    for _ in range(3):
        pool.publish(pool.allocate())
    pool.release_all([0, 1, 2])
    pool.unpublish(0)
    assert pool.idle_blocks() == [0, 2, 1]
    assert (pool.num_cached, pool.num_free) == (2, 1)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (4, 0)])
def test_sizes_must_be_positive(num_blocks: int, block_size: int) -> None:
    with pytest.raises(BadInput):
        BlockPool(num_blocks, block_size)


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from("amrp"), st.integers(0, 6)), max_size=60))
def test_allocate_many_equals_repeated_allocate(moves: list[tuple[str, int]]) -> None:
    """Allocate, release and publish at random: the same blocks in the same order either way."""
    many, single = BlockPool(12, 4), BlockPool(12, 4)
    tables: list[list[int]] = []
    for what, number in moves:
        if what in "am" and number <= many.num_idle:
            taken = many.allocate_many(number)
            assert taken == [single.allocate() for _ in range(number)]
            tables.append(taken)
        elif what == "p" and tables:
            for block in tables[number % len(tables)]:
                many.publish(block)
                single.publish(block)
        elif what == "r" and tables:
            table = tables.pop(number % len(tables))
            many.release_all(table)
            for block in reversed(table):
                single.release(block)
        assert many.idle_blocks() == single.idle_blocks()
        assert (many.num_idle, many.num_cached) == (single.num_idle, single.num_cached)
