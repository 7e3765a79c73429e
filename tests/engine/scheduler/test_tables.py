"""Block tables: growing, sharing, copy-on-write."""

from __future__ import annotations

from ridgeline.engine.scheduler.kv.block_pool import BlockPool
from ridgeline.engine.scheduler.kv.block_tables import BlockTables
from ridgeline.engine.scheduler.kv.prefix_cache import ComputedPrefix, NoPrefixCache, PrefixCache
from tests.engine.scheduler.helpers import sequence

SIZE = 4


def make(num_blocks: int) -> tuple[BlockPool, BlockTables]:
    pool = BlockPool(num_blocks, SIZE)
    return pool, BlockTables(pool, NoPrefixCache())


def test_reserve_is_all_or_nothing() -> None:
    pool, tables = make(2)
    seq = sequence(list(range(12)))
    assert not tables.reserve(seq, 12)
    assert (seq.blocks, pool.num_idle) == ([], 2)
    assert tables.reserve(seq, 5)
    assert len(seq.blocks) == 2


def test_a_shared_block_is_copied_before_it_is_written() -> None:
    pool, tables = make(6)
    one, two = sequence(list(range(6))), sequence(list(range(6)))
    tables.reserve(one, 6)
    tables.adopt_prefix(two, ComputedPrefix(one.blocks, 5), 0.0)
    shared = one.blocks[1]
    assert tables.reserve(two, 1)
    assert two.blocks[0] == one.blocks[0]
    assert tables.take_copies() == ((shared, two.blocks[1]),)
    assert [pool.ref_count(block) for block in (shared, two.blocks[0], two.blocks[1])] == [1, 2, 1]


def test_the_last_sharer_writes_in_place() -> None:
    _, tables = make(6)
    one, two = sequence(list(range(6))), sequence(list(range(6)))
    tables.reserve(one, 6)
    tables.adopt_prefix(two, ComputedPrefix(one.blocks, 5), 0.0)
    one.num_computed = 5
    assert tables.reserve(one, 1)
    assert tables.reserve(two, 1)
    assert len(tables.take_copies()) == 1


def test_copy_source_is_not_reused_while_the_plan_is_made() -> None:
    """Otherwise one block could be read by one copy and written by another."""
    pool, tables = make(3)
    one, two = sequence(list(range(2))), sequence(list(range(2)))
    tables.reserve(one, 2)
    tables.adopt_prefix(two, ComputedPrefix(one.blocks, 1), 0.0)
    origin = one.blocks[0]
    one.num_computed = 1
    assert tables.reserve(one, 1)
    tables.release(two, 0.0)  # preempted: only the plan holds the source
    assert pool.allocate() != origin
    assert pool.num_idle == 0
    tables.take_copies()
    assert pool.idle_blocks() == [origin]


def test_copy_of_a_copy_is_redirected_to_the_source() -> None:
    pool, tables = make(4)
    one, two, three = (sequence(list(range(2)), computed=1) for _ in range(3))
    tables.reserve(one, 1)
    two.num_computed = three.num_computed = 0
    tables.adopt_prefix(two, ComputedPrefix(one.blocks, 1), 0.0)
    origin = one.blocks[0]
    assert tables.reserve(one, 1)
    # From a block that the plan has yet to fill.
    tables.adopt_prefix(three, ComputedPrefix(one.blocks, 1), 0.0)
    assert tables.reserve(three, 1)
    assert tables.take_copies() == ((origin, one.blocks[0]), (origin, three.blocks[0]))
    assert [pool.ref_count(seq.blocks[0]) for seq in (one, two, three)] == [1, 1, 1]


def test_sole_owner_unpublishes_before_writing() -> None:
    pool = BlockPool(2, SIZE)
    cache = PrefixCache(pool)
    tables = BlockTables(pool, cache)
    seq = sequence(list(range(4)))
    tables.reserve(seq, 4)
    seq.num_computed = 4
    cache.publish(seq, 0.0)
    seq.num_computed = 3
    assert tables.reserve(seq, 1)
    assert (tables.take_copies(), len(cache)) == ((), 0)


def test_num_blocks_needed_is_what_adopt_prefix_and_reserve_take() -> None:
    pool, tables = make(8)
    one = sequence(list(range(10)))
    tables.reserve(one, 10)
    for computed in (4, 8, 9):
        child = sequence(list(range(10)))
        blocks = one.blocks[: pool.num_blocks_for(computed)]
        prefix = ComputedPrefix(blocks, computed)
        needed, idle = tables.num_blocks_needed(child, prefix), pool.num_idle
        tables.adopt_prefix(child, prefix, 0.0)
        assert tables.reserve(child, child.num_pending)
        assert idle - pool.num_idle == needed
        tables.release(child, 0.0)
        tables.take_copies()
