"""The prefix cache: hits, expiry and the separation of tenants."""

from __future__ import annotations

import msgspec
import pytest

from ridgeline.engine.scheduler.kv.block_pool import BlockPool
from ridgeline.engine.scheduler.kv.prefix_cache import PrefixCache, block_digest, root_digest
from ridgeline.engine.scheduler.sequence import Sequence
from ridgeline.errors import BadInput
from tests.engine.scheduler.helpers import make_request, scheduler, sequence, step

SIZE = 4


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(8, SIZE)


def computed(pool: BlockPool, tokens: list[int], num: int, tenant: str = "") -> Sequence:
    """A sequence with its own blocks and `num` computed tokens."""
    seq = sequence(tokens, computed=num, tenant=tenant)
    seq.blocks = [pool.allocate() for _ in range(pool.num_blocks_for(len(tokens)))]
    return seq


def test_only_full_and_computed_blocks_are_published(pool: BlockPool) -> None:
    cache, seq = PrefixCache(pool), computed(pool, list(range(12)), 7)
    cache.publish(seq, 0.0)
    assert len(cache) == 1
    seq.num_computed = 12
    cache.publish(seq, 0.0)
    assert len(cache) == 3


def test_a_hit_never_covers_the_last_token(pool: BlockPool) -> None:
    cache, seq = PrefixCache(pool), computed(pool, list(range(8)), 8)
    cache.publish(seq, 0.0)
    assert cache.match(sequence(list(range(8))), 0.0).blocks == seq.blocks[:1]
    assert cache.match(sequence(list(range(9))), 0.0).blocks == seq.blocks
    assert cache.match(sequence(list(range(4))), 0.0).blocks == []


def test_hit_ends_where_the_tokens_differ(pool: BlockPool) -> None:
    cache, seq = PrefixCache(pool), computed(pool, list(range(12)), 12)
    cache.publish(seq, 0.0)
    other = [*range(4), 99, *range(5, 13)]  # the third block is equal, but not what precedes it
    assert cache.match(sequence(other), 0.0).blocks == seq.blocks[:1]


def test_tenants_never_share_blocks(pool: BlockPool) -> None:
    cache, seq = PrefixCache(pool), computed(pool, list(range(8)), 8, tenant="a")
    cache.publish(seq, 0.0)
    assert cache.match(sequence(list(range(9)), tenant="b"), 0.0).blocks == []
    assert cache.match(sequence(list(range(9)), tenant="a"), 0.0).blocks == seq.blocks


def test_first_block_with_some_content_is_kept(pool: BlockPool) -> None:
    cache = PrefixCache(pool)
    one, two = (computed(pool, list(range(5)), 5) for _ in range(2))
    cache.publish(one, 0.0)
    cache.publish(two, 0.0)
    assert cache.match(sequence(list(range(5))), 0.0).blocks == one.blocks[:1]
    assert not pool.is_published(two.blocks[0])


def test_evicted_blocks_are_not_hit(pool: BlockPool) -> None:
    cache, seq = PrefixCache(pool), computed(pool, list(range(8)), 8)
    cache.publish(seq, 0.0)
    pool.release_all(seq.blocks)
    for _ in range(7):  # six unused blocks, then the tail
        pool.allocate()
    assert cache.match(sequence(list(range(9))), 0.0).blocks == seq.blocks[:1]
    pool.allocate()
    assert len(cache) == 0


def test_time_to_live_starts_with_the_last_use(pool: BlockPool) -> None:
    cache, seq = PrefixCache(pool, ttl_s=10.0), computed(pool, list(range(8)), 8)
    cache.publish(seq, 0.0)
    cache.expire(50.0)
    assert len(cache) == 2  # in use: its time to live has not started
    cache.touch(seq.blocks, 60.0)
    pool.release_all(seq.blocks)
    assert cache.match(sequence(list(range(9))), 70.0).blocks == seq.blocks
    assert cache.match(sequence(list(range(9))), 70.1).blocks == []
    assert pool.num_cached == 0


def test_clear_drops_blocks_in_use_and_idle_ones(pool: BlockPool) -> None:
    cache = PrefixCache(pool)
    idle, used = computed(pool, list(range(8)), 8), computed(pool, list(range(9, 13)), 4)
    cache.publish(idle, 0.0)
    cache.publish(used, 0.0)
    pool.release_all(idle.blocks)
    cache.clear()
    assert (len(cache), pool.num_cached, pool.num_owned) == (0, 0, 1)


def test_digests_depend_on_parent_and_tokens() -> None:
    root = root_digest("")
    assert block_digest(root, [1, 23]) != block_digest(root, [12, 3])
    assert block_digest(root, [1, 2]) != block_digest(root_digest("x"), [1, 2])
    assert block_digest(block_digest(root, [1]), [2]) != block_digest(root, [1, 2])
    assert len(block_digest(root, [2**40])) == 32  # any token id


def test_time_to_live_must_be_positive(pool: BlockPool) -> None:
    with pytest.raises(BadInput):
        PrefixCache(pool, ttl_s=0.0)


@pytest.mark.parametrize("num_resumed", [1, 3, 9])
def test_a_choice_forked_from_a_resumed_one_has_the_digests_of_its_own_text(
    num_resumed: int,
) -> None:
    """Otherwise its blocks are found for the other choice's text, and that one's for its own."""
    sched = scheduler(prefix=True, block_size=2, num_blocks=64, eos=())
    request = make_request(num_prompt=5, n=3, max_tokens=12)
    resumed = (tuple(range(40, 40 + num_resumed)), (), ())
    sched.add(msgspec.structs.replace(request, resumed=resumed))
    num_checked, token = 0, 50
    while sched.has_work:
        step(sched, token=(token := token + 1))
        for seq in sched.running:
            fresh = sequence(list(seq.tokens))
            sched.cache.extend_digests(fresh, len(seq.digests))  # type: ignore[attr-defined]
            assert seq.digests == fresh.digests
            num_checked += seq.index > 0 and len(seq.digests) > 3
    assert num_checked > 4
