"""The invariants can fail: each bug below, planted into a part, is caught by `World`."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from ridgeline.engine.scheduler import plan
from ridgeline.engine.scheduler.batching.static import StaticBatching
from ridgeline.engine.scheduler.kv import prefix_cache
from ridgeline.engine.scheduler.kv.block_pool import BlockPool
from ridgeline.engine.scheduler.kv.block_tables import BlockTables
from ridgeline.engine.scheduler.kv.prefix_cache import PrefixCache
from ridgeline.engine.scheduler.plan import Run, RunOutput
from ridgeline.engine.scheduler.queue import sequence_registry
from ridgeline.engine.scheduler.queue.sequence_registry import SequenceRegistry
from ridgeline.engine.scheduler.queue.waiting_queue import WaitingQueue
from ridgeline.engine.scheduler.scheduler import Scheduler
from ridgeline.engine.scheduler.sequence import Sequence, SequenceGroup
from ridgeline.engine.scheduler.step_builder import StepBuilder
from ridgeline.engine.scheduler.token_budget import ChunkedBudget, WholeBudget
from ridgeline.records import Event
from tests.invariants.chances import add_random, end_random, fork_random
from tests.invariants.world import Setup, World

Plant = Callable[[pytest.MonkeyPatch], None]


def random_setup(rng: random.Random) -> Setup:
    return Setup(
        num_blocks=rng.randint(6, 12),
        block_size=rng.choice((1, 2, 4)),
        max_num_seqs=rng.randint(1, 5),
        max_num_batched_tokens=rng.randint(1, 12),
        chunked=rng.random() < 0.5,
        policy=rng.choice(("static", "dynamic", "continuous")),
        prefix=rng.random() < 0.7,
        ttl_s=rng.choice((None, 0.5, 4.0)),
        drafts=rng.choice((0, 1, 5)),
        branches=rng.choice((0, 3)),
    )


def live(rng: random.Random, num_operations: int = 40) -> World:
    """A random world, from its beginning to its end."""
    world = World(random_setup(rng))
    for _ in range(num_operations):
        operation = rng.choices(("add", "step", "advance", "end", "fork"), (5, 8, 1, 1, 1))[0]
        if operation == "add":
            add_random(world, rng.randint)
        elif operation == "step":
            world.step()
        elif operation == "advance":
            world.now_s += rng.random() * 5
        elif operation == "end":
            end_random(world, rng.randint)
        else:
            fork_random(world, rng.randint)
    world.drain()
    return world


def no_copy_on_write(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockTables, "_shared", lambda self, seq, num_blocks: [])


def publish_a_block_that_is_not_full(patch: pytest.MonkeyPatch) -> None:
    def publish(self: PrefixCache, seq: Sequence, now_s: float) -> None:
        computed, seq.computed = seq.computed, seq.computed + 1
        if seq.known >= seq.computed:
            original(self, seq, now_s)
        seq.computed = computed

    original = PrefixCache.publish
    patch.setattr(PrefixCache, "publish", publish)


def forget_a_reference(patch: pytest.MonkeyPatch) -> None:
    def retain(self: BlockPool, block: int) -> None:
        if not self.refs(block):
            original(self, block)

    original = BlockPool.retain
    patch.setattr(BlockPool, "retain", retain)


def keep_a_reference(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "release_all", lambda self, blocks: [*map(self.release, blocks[1:])])


def tenants_share(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prefix_cache, "root_digest", lambda tenant: b"everybody")


def hit_the_whole_prompt(patch: pytest.MonkeyPatch) -> None:
    def match(self: PrefixCache, seq: Sequence, now_s: float) -> list[int]:
        seq.tokens.append(0)
        found = original(self, seq, now_s)
        seq.tokens.pop()
        return found

    original = PrefixCache.match
    patch.setattr(PrefixCache, "match", match)


def preemption_loses_the_output(patch: pytest.MonkeyPatch) -> None:
    def forget(self: Sequence) -> None:
        original(self)
        del self.tokens[self.num_prompt + 1 :]

    original = Sequence.forget_computed
    patch.setattr(Sequence, "forget_computed", forget)


def preempt_the_first_in_order(patch: pytest.MonkeyPatch) -> None:
    def preempt(self: Scheduler, seq: Sequence, step: StepBuilder) -> None:
        original(self, self._registry.running[0], step)

    original = Scheduler._preempt
    patch.setattr(Scheduler, "_preempt", preempt)


def cancel_keeps_the_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "_drop", lambda self, group, at_s: self._registry.remove_group(group))


def forks_draw_the_same(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sequence_registry, "derive_seed", lambda base, index: base)


def a_chunk_too_many(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ChunkedBudget, "take", lambda self, num_tokens, later=0: None)


def long_prompts_wait_for_ever(patch: pytest.MonkeyPatch) -> None:
    def offer(self: WholeBudget, pending: int, later: int = 0) -> int:
        return pending if pending <= self.left - later else 0

    patch.setattr(WholeBudget, "offer", offer)


def evict_without_telling(patch: pytest.MonkeyPatch) -> None:
    def init(self: PrefixCache, pool: BlockPool, ttl_s: float | None = None) -> None:
        original(self, pool, ttl_s)
        pool.on_evict = lambda block: None

    original = PrefixCache.__init__
    patch.setattr(PrefixCache, "__init__", init)


def lose_who_is_preempted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SequenceRegistry, "wait", lambda self, seq: None)


def forget_the_next_leader(patch: pytest.MonkeyPatch) -> None:
    def succeed(self: SequenceRegistry, group: SequenceGroup) -> None:
        pass

    patch.setattr(SequenceRegistry, "_succeed", succeed)


def last_come_first_served(patch: pytest.MonkeyPatch) -> None:
    def peek(self: WaitingQueue) -> Sequence | None:
        return next(reversed(self._live.values()), None)

    patch.setattr(WaitingQueue, "peek", peek)


def join_a_running_batch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StaticBatching, "admits", lambda self, view: view.num_free_slots > 0)


def time_to_live_never_ends(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixCache, "expire", lambda self, now_s: None)


def rejected_drafts_keep_their_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockTables, "trim", lambda self, seq: None)


def rejected_drafts_count_as_computed(patch: pytest.MonkeyPatch) -> None:
    def advance(self: Scheduler, seq: Sequence, run: Run, sampled: RunOutput) -> list[Event]:
        return original(self, seq, replace(run, num_drafts=0), sampled)

    original = Scheduler._advance
    patch.setattr(Scheduler, "_advance", advance)


def every_draft_draws_the_same_number(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(plan, "_after", lambda at, drafts: at)


def branches_begin_empty(patch: pytest.MonkeyPatch) -> None:
    def branch(self: BlockTables, seq: Sequence, num_tokens: int) -> list[int]:
        return self._pool.alloc_many(self.num_of_branch(seq, num_tokens))

    patch.setattr(BlockTables, "branch", branch)


def the_branch_that_was_taken_is_given_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockTables, "graft", lambda self, seq, fresh: self.cut(fresh))


def what_a_branch_replaces_is_kept(patch: pytest.MonkeyPatch) -> None:
    def graft(self: BlockTables, seq: Sequence, fresh: list[int]) -> None:
        seq.blocks[seq.computed // self.block_size :] = fresh

    patch.setattr(BlockTables, "graft", graft)


def branches_take_what_others_need(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockTables, "num_of_branch", lambda self, seq, num_tokens: 0)


PLANTS: list[Plant] = [
    branches_begin_empty,
    the_branch_that_was_taken_is_given_back,
    what_a_branch_replaces_is_kept,
    branches_take_what_others_need,
    rejected_drafts_keep_their_blocks,
    rejected_drafts_count_as_computed,
    every_draft_draws_the_same_number,
    no_copy_on_write,
    publish_a_block_that_is_not_full,
    forget_a_reference,
    keep_a_reference,
    tenants_share,
    hit_the_whole_prompt,
    preemption_loses_the_output,
    preempt_the_first_in_order,
    cancel_keeps_the_blocks,
    forks_draw_the_same,
    a_chunk_too_many,
    long_prompts_wait_for_ever,
    evict_without_telling,
    lose_who_is_preempted,
    forget_the_next_leader,
    last_come_first_served,
    join_a_running_batch,
    time_to_live_never_ends,
]


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_is_caught(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        for seed in range(60):
            live(random.Random(seed))


def test_without_a_bug_nothing_is_caught() -> None:
    """The same random worlds, and they do exercise what the bugs are about."""
    worlds = [live(random.Random(seed)) for seed in range(60)]
    assert sum(world.num_preempted for world in worlds) > 50
    assert sum(world.num_copies for world in worlds) > 100
    assert sum(world.num_accepted for world in worlds) > 300
    assert sum(world.num_branched for world in worlds) > 10
    assert sum(world.scheduler.cache.hit_tokens for world in worlds) > 100
