"""The invariants can fail: `World` catches each of the bugs planted below."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from ridgeline.engine.scheduler import plan, scheduler
from ridgeline.engine.scheduler.batching.static import StaticBatching
from ridgeline.engine.scheduler.kv import cache_tiers, prefix_cache
from ridgeline.engine.scheduler.kv.block_pool import BlockPool
from ridgeline.engine.scheduler.kv.block_tables import BlockTables
from ridgeline.engine.scheduler.kv.cache_tiers import CacheTiers
from ridgeline.engine.scheduler.kv.memory_tier import MemoryTier
from ridgeline.engine.scheduler.kv.prefix_cache import ComputedPrefix, PrefixCache
from ridgeline.engine.scheduler.plan import Run, RunOutput
from ridgeline.engine.scheduler.queue import sequence_registry
from ridgeline.engine.scheduler.queue.lanes import Lane
from ridgeline.engine.scheduler.queue.sequence_registry import SequenceRegistry
from ridgeline.engine.scheduler.queue.waiting_queue import WaitingQueue
from ridgeline.engine.scheduler.scheduler import Scheduler
from ridgeline.engine.scheduler.sequence import Sequence, SequenceGroup
from ridgeline.engine.scheduler.step_builder import StepBuilder, make_run
from ridgeline.engine.scheduler.token_budget import ChunkedBudget, WholeBudget
from ridgeline.modelspec.cost.kv_layout import KvLayout
from ridgeline.records import Event
from tests.invariants.random_operations import add_random, end_random, fork_random
from tests.invariants.world import Setup, World

Plant = Callable[[pytest.MonkeyPatch], None]
MakeSetup = Callable[[random.Random], Setup]


def random_setup(rng: random.Random) -> Setup:
    window = rng.randint(1, 9) if rng.random() < 0.4 else 0
    return Setup(
        num_blocks=rng.randint(14, 40) if window else rng.randint(6, 12),
        block_size=rng.choice((1, 2, 4)),
        max_num_seqs=rng.randint(1, 5),
        max_num_batched_tokens=rng.randint(1, 12),
        chunked=rng.random() < 0.5,
        policy=rng.choice(("static", "dynamic", "continuous")),
        prefix=rng.random() < 0.7,
        ttl_s=rng.choice((None, 0.5, 4.0)),
        drafts=rng.choice((0, 1, 5)),
        branches=rng.choice((0, 3)),
        window=window,
        has_full=rng.random() < 0.6,
    )


def tiered_setup(rng: random.Random) -> Setup:
    """A random setup whose evicted blocks go to a memory tier, and mostly to storage."""
    setup, slots = random_setup(rng), rng.choice((3, 6, 20))
    return dataclasses.replace(setup, prefix=True, tier_slots=slots, storage=rng.random() < 0.8)


def run_random_world(
    rng: random.Random, num_operations: int = 40, make_setup: MakeSetup = random_setup
) -> World:
    """Perform random operations on a random world, then serve all of its requests."""
    world = World(make_setup(rng))
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
    patch.setattr(BlockTables, "_shared", lambda self, seq, table, end: [])


def publish_a_block_that_is_not_full(patch: pytest.MonkeyPatch) -> None:
    def publish(self: PrefixCache, seq: Sequence, now_s: float) -> None:
        computed, seq.num_computed = seq.num_computed, seq.num_computed + 1
        if seq.num_known >= seq.num_computed:
            original(self, seq, now_s)
        seq.num_computed = computed

    original = PrefixCache.publish
    patch.setattr(PrefixCache, "publish", publish)


def forget_a_reference(patch: pytest.MonkeyPatch) -> None:
    def retain(self: BlockPool, block: int) -> None:
        if not self.ref_count(block):
            original(self, block)

    original = BlockPool.retain
    patch.setattr(BlockPool, "retain", retain)


def keep_a_reference(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "release_all", lambda self, blocks: [*map(self.release, blocks[1:])])


def tenants_share(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prefix_cache, "root_digest", lambda tenant: b"anyone")


def hit_the_whole_prompt(patch: pytest.MonkeyPatch) -> None:
    def match(self: PrefixCache, seq: Sequence, now_s: float) -> list[int]:
        seq.tokens.append(0)
        blocks = original(self, seq, now_s)
        seq.tokens.pop()
        return blocks

    original = PrefixCache.match
    patch.setattr(PrefixCache, "match", match)


def preemption_loses_the_output(patch: pytest.MonkeyPatch) -> None:
    def reset(self: Sequence) -> None:
        original(self)
        del self.tokens[self.num_prompt + 1 :]

    original = Sequence.reset_computed
    patch.setattr(Sequence, "reset_computed", reset)


def preempt_the_first_in_order(patch: pytest.MonkeyPatch) -> None:
    def preempt(self: Scheduler, seq: Sequence, step: StepBuilder) -> None:
        original(self, self._registry.running[0], step)

    original = Scheduler._preempt
    patch.setattr(Scheduler, "_preempt", preempt)


def cancel_keeps_the_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Scheduler, "_remove_group", lambda self, group, at_s: self._registry.remove_group(group)
    )


def forks_share_a_seed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sequence_registry, "derive_seed", lambda base, index: base)


def ignore_the_token_budget(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ChunkedBudget, "take", lambda self, num_tokens, later=0: None)


def long_prompts_wait_for_ever(patch: pytest.MonkeyPatch) -> None:
    def offer(self: WholeBudget, pending: int, later: int = 0) -> int:
        return pending if pending <= self.left - later else 0

    patch.setattr(WholeBudget, "offer", offer)


def evict_without_notice(patch: pytest.MonkeyPatch) -> None:
    def init(self: PrefixCache, pool: BlockPool, *rest: Any) -> None:
        original(self, pool, *rest)
        pool.on_evict = lambda block: None

    original = PrefixCache.__init__
    patch.setattr(PrefixCache, "__init__", init)


def lose_preempted_sequences(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SequenceRegistry, "enqueue_resuming", lambda self, seq: None)


def lose_the_next_choice(patch: pytest.MonkeyPatch) -> None:
    def promote(self: SequenceRegistry, group: SequenceGroup) -> None:
        pass

    patch.setattr(SequenceRegistry, "_promote_choice", promote)


def serve_the_last_arrival_first(patch: pytest.MonkeyPatch) -> None:
    def peek(self: WaitingQueue) -> Sequence | None:
        return next(reversed(self._live.values()), None)

    patch.setattr(WaitingQueue, "peek", peek)


def admit_to_a_running_batch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StaticBatching, "admits", lambda self, view: view.num_free_slots > 0)


def ignore_the_time_to_live(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixCache, "expire", lambda self, now_s: None)


def rejected_drafts_keep_their_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockTables, "trim", lambda self, seq: None)


def rejected_drafts_count_as_computed(patch: pytest.MonkeyPatch) -> None:
    def advance(self: Scheduler, seq: Sequence, run: Run, output: RunOutput) -> list[Event]:
        return original(self, seq, replace(run, num_drafts=0), output)

    original = Scheduler._advance
    patch.setattr(Scheduler, "_advance", advance)


def drafts_share_a_sample_index(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(plan, "_after_drafts", lambda point, drafts: point)


def branches_lack_the_known_part(patch: pytest.MonkeyPatch) -> None:
    def allocate_branch(self: BlockTables, seq: Sequence, num_tokens: int) -> list[list[int]]:
        num_places = self._num_branch_places(seq, num_tokens)
        return [self._pool.allocate_many(num_places) for _ in range(self.num_groups)]

    patch.setattr(BlockTables, "allocate_branch", allocate_branch)


def release_the_accepted_branch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        BlockTables, "accept_branch", lambda self, seq, blocks: self.release_branch(blocks)
    )


def leak_the_blocks_a_branch_replaces(patch: pytest.MonkeyPatch) -> None:
    def accept_branch(self: BlockTables, seq: Sequence, branch: list[list[int]]) -> None:
        seq.blocks[seq.num_computed // self.block_size :] = branch[0]

    patch.setattr(BlockTables, "accept_branch", accept_branch)


def branches_ignore_the_spare_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockTables, "num_branch_blocks", lambda self, seq, num_tokens: 0)


def resumed_sequences_keep_their_old_slot(patch: pytest.MonkeyPatch) -> None:
    original = SequenceRegistry.activate

    def activate(self: SequenceRegistry, seq: Sequence) -> None:
        slot = seq.state_slot
        original(self, seq)
        if seq.num_output:
            seq.state_slot = slot

    patch.setattr(SequenceRegistry, "activate", activate)


def released_slots_are_not_given_back(patch: pytest.MonkeyPatch) -> None:
    original = SequenceRegistry.activate

    def activate(self: SequenceRegistry, seq: Sequence) -> None:
        self._free_slots.clear()
        original(self, seq)

    patch.setattr(SequenceRegistry, "activate", activate)


def runs_lack_the_slot(patch: pytest.MonkeyPatch) -> None:
    def make_run_without_slot(*args: Any) -> Run:
        return replace(make_run(*args), state_slot=0)

    patch.setattr(scheduler, "make_run", make_run_without_slot)


def windows_are_one_place_short(patch: pytest.MonkeyPatch) -> None:
    original = KvLayout.first_place

    def first_place(self: KvLayout, position: int, block_size: int) -> int:
        return original(self, position, block_size) + (position > self.window)

    patch.setattr(KvLayout, "first_place", first_place)


def windows_give_nothing_back(patch: pytest.MonkeyPatch) -> None:
    original = BlockTables._slide

    def slide(self: BlockTables, seq: Sequence) -> None:
        if not seq.windows:
            original(self, seq)

    patch.setattr(BlockTables, "_slide", slide)


def windows_lose_what_they_give_back(patch: pytest.MonkeyPatch) -> None:
    original = BlockTables._slide

    def slide(self: BlockTables, seq: Sequence) -> None:
        for table in seq.windows:
            for block in table:
                self._pool.retain(block)
        original(self, seq)
        for table in seq.windows:
            for block in table:
                self._pool.release(block)

    patch.setattr(BlockTables, "_slide", slide)


def hits_ignore_the_windows(patch: pytest.MonkeyPatch) -> None:
    def match_windows(self: PrefixCache, seq: Sequence, end: int) -> tuple[int, int]:
        group = self._block_of[self._num_full]
        while end and seq.digests[end - 1] not in group:
            end -= 1
        return (max(0, end - 1), end)

    patch.setattr(PrefixCache, "_match_windows", match_windows)


def forks_ignore_what_was_given_back(patch: pytest.MonkeyPatch) -> None:
    original = BlockTables.shared_prefix

    def shared_prefix(self: BlockTables, source: Sequence, num_known: int) -> ComputedPrefix:
        self._num_windowed, num = 0, self._num_windowed
        prefix = original(self, source, num_known)
        self._num_windowed = num
        assert prefix is not None
        return prefix

    patch.setattr(BlockTables, "shared_prefix", shared_prefix)


def branches_share_one_window(patch: pytest.MonkeyPatch) -> None:
    original = BlockTables.branch_tables

    def branch_tables(self: BlockTables, seq: Sequence, branch: Any) -> Any:
        blocks, windows = original(self, seq, branch)
        return blocks, windows[:1] * len(windows)

    patch.setattr(BlockTables, "branch_tables", branch_tables)


def tiers_load_a_neighbouring_slot(patch: pytest.MonkeyPatch) -> None:
    original = CacheTiers.take_transfers

    def take_transfers(self: CacheTiers) -> Any:
        stores, loads = original(self)
        slots = [slot for slot, _ in loads]
        shifted = slots[1:] + slots[:1]
        return stores, tuple((slot, b) for slot, (_, b) in zip(shifted, loads, strict=True))

    patch.setattr(CacheTiers, "take_transfers", take_transfers)


def tiers_mix_groups_of_layers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cache_tiers, "block_key", lambda group, digest: digest + b"\0")


def tier_slots_are_not_pinned(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryTier, "pin", lambda self, key: self._slot_of.get(key))
    patch.setattr(MemoryTier, "unpin", lambda self, slots: None)
    original = MemoryTier.publish

    def publish(self: MemoryTier, *args: Any, pinned: bool = False) -> bool:
        return original(self, *args)

    patch.setattr(MemoryTier, "publish", publish)


def tiers_hit_the_whole_prompt(patch: pytest.MonkeyPatch) -> None:
    original = CacheTiers._reach

    def reach(self: CacheTiers, seq: Sequence, holds: Any) -> tuple[int, int]:
        seq.tokens.append(0)
        found = original(self, seq, holds)
        seq.tokens.pop()
        return found

    patch.setattr(CacheTiers, "_reach", reach)


def cancelled_sequences_go_on_waiting_for_their_load(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lane, "discard_unstarted", lambda self, seq: self.unstarted.discard(seq))


def tiers_take_a_prefix_that_is_being_evicted(patch: pytest.MonkeyPatch) -> None:
    original = CacheTiers.fill

    def fill(self: CacheTiers, seq: Sequence, prefix: ComputedPrefix, now_s: float) -> Any:
        with patch.context() as context:
            context.setattr(BlockPool, "retain", lambda self, block: None)
            filled, held = original(self, seq, prefix, now_s)
        return filled, [block for block in held if block not in prefix.all_blocks]

    patch.setattr(CacheTiers, "fill", fill)


TIER_PLANTS: list[Plant] = [
    tiers_load_a_neighbouring_slot,
    tiers_mix_groups_of_layers,
    tier_slots_are_not_pinned,
    tiers_hit_the_whole_prompt,
    cancelled_sequences_go_on_waiting_for_their_load,
    tiers_take_a_prefix_that_is_being_evicted,
]
PLANTS: list[Plant] = [
    windows_are_one_place_short,
    windows_give_nothing_back,
    windows_lose_what_they_give_back,
    hits_ignore_the_windows,
    forks_ignore_what_was_given_back,
    branches_share_one_window,
    resumed_sequences_keep_their_old_slot,
    released_slots_are_not_given_back,
    runs_lack_the_slot,
    branches_lack_the_known_part,
    release_the_accepted_branch,
    leak_the_blocks_a_branch_replaces,
    branches_ignore_the_spare_blocks,
    rejected_drafts_keep_their_blocks,
    rejected_drafts_count_as_computed,
    drafts_share_a_sample_index,
    no_copy_on_write,
    publish_a_block_that_is_not_full,
    forget_a_reference,
    keep_a_reference,
    tenants_share,
    hit_the_whole_prompt,
    preemption_loses_the_output,
    preempt_the_first_in_order,
    cancel_keeps_the_blocks,
    forks_share_a_seed,
    ignore_the_token_budget,
    long_prompts_wait_for_ever,
    evict_without_notice,
    lose_preempted_sequences,
    lose_the_next_choice,
    serve_the_last_arrival_first,
    admit_to_a_running_batch,
    ignore_the_time_to_live,
]


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_planted_bug_is_caught(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        for seed in range(60):
            run_random_world(random.Random(seed))


@pytest.mark.slow
def test_random_worlds_pass_without_a_bug() -> None:
    """The same random worlds pass, and they exercise what the bugs are about."""
    worlds = [run_random_world(random.Random(seed)) for seed in range(60)]
    assert sum(world.num_preempted for world in worlds) > 50
    assert sum(world.num_copies for world in worlds) > 100
    assert sum(world.num_accepted for world in worlds) > 300
    assert sum(world.num_branched for world in worlds) > 10
    assert sum(world.scheduler.cache.hit_tokens for world in worlds) > 100


@pytest.mark.parametrize("plant", TIER_PLANTS, ids=lambda plant: plant.__name__)
def test_planted_bug_of_the_tiers_is_caught(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        for seed in range(80):
            run_random_world(random.Random(seed), make_setup=tiered_setup)


@pytest.mark.slow
def test_random_worlds_with_tiers_pass_without_a_bug() -> None:
    worlds = [run_random_world(random.Random(seed), make_setup=tiered_setup) for seed in range(80)]
    assert sum(world.num_tier_loads for world in worlds) > 200
    assert sum(world.storage.num_loaded for world in worlds if world.storage is not None) > 3
