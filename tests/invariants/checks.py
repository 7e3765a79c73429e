"""Invariants of a `World`, checked after every operation and after every plan."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from ridgeline.engine.scheduler.kv.prefix_cache import PrefixCache, block_digest, root_digest
from ridgeline.engine.scheduler.plan import StepPlan, draft_paths
from ridgeline.engine.scheduler.queue.fair_queue import FairQueue
from ridgeline.engine.scheduler.queue.waiting_queue import WaitingQueue
from ridgeline.engine.scheduler.sequence import Sequence, State

if TYPE_CHECKING:
    from tests.invariants.world import World


def check_always(world: World) -> None:
    """Invariants after every operation."""
    check_registry(world)
    check_pool(world)
    if isinstance(world.scheduler.cache, PrefixCache):
        check_cache(world, world.scheduler.cache)
        check_tiers(world)


def waiting_in(queue: FairQueue | WaitingQueue) -> list[Sequence]:
    """The sequences of a queue, in no particular order."""
    parts = queue._queues.values() if isinstance(queue, FairQueue) else (queue,)
    return [seq for part in parts for seq in part._live.values()]


class Before:
    """The state before a plan."""

    def __init__(self, world: World) -> None:
        registry = world.scheduler._registry
        self.first = world.running[0] if world.running else None
        self.unstarted = [waiting_in(lane.unstarted) for lane in registry.lanes]
        self.resuming = [waiting_in(lane.resuming) for lane in registry.lanes]
        expired = [
            group
            for group in registry.groups.values()
            if group.started and (group.request.deadline_s or math.inf) <= world.now_s
        ]
        self.num_started = []
        for lane in registry.lanes:  # counts of a lane include those of higher priority
            gone = [c for c in expired if c.request.background <= lane.rank]
            started = sum(other.num_started for other in registry.lanes_up_to(lane))
            self.num_started.append(started - sum(group.num_unfinished for group in gone))


def check_registry(world: World) -> None:
    registry, running = world.scheduler._registry, world.running
    assert len(running) <= world.setup.max_num_seqs
    slots = {seq.state_slot for seq in running}
    assert len(slots) == len(running), "two sequences share a state"
    assert all(0 <= slot < world.setup.max_num_seqs for slot in slots)
    assert [seq.key for seq in running] == sorted(seq.key for seq in running)
    assert {seq.request.id for seq in running} <= set(registry.groups)
    live = [seq for group in registry.groups.values() for seq in group.live.values()]
    assert sum(c.num_unfinished for c in registry.groups.values()) == registry.num_unfinished
    for lane in registry.lanes:
        requests = [c for c in registry.groups.values() if c.request.background == lane.rank]
        assert sum(c.num_unfinished for c in requests if c.started) == lane.num_started
        own = [seq for seq in live if seq.request.background == lane.rank]
        assert lane.num_running == sum(seq.state is State.RUNNING for seq in own)
        # One choice stands for an unstarted request in the queue, though a resumed one has several.
        queued = [c.live.values() if c.started else list(c.live.values())[:1] for c in requests]
        num_waiting = len(lane.unstarted) + len(lane.resuming) + len(lane.held)
        assert sum(map(len, queued)) == lane.num_running + num_waiting
    assert sum(lane.num_running for lane in registry.lanes) == len(running)
    for seq in live:
        assert 0 <= seq.num_computed < seq.num_known
        assert seq.state is State.RUNNING or not (seq.all_blocks or seq.num_computed)


def check_pool(world: World) -> None:
    pool, running = world.scheduler.pool, world.running
    assert pool.num_owned + pool.num_free + pool.num_cached == pool.num_blocks
    idle = pool.idle_blocks()
    assert len(idle) == len(set(idle)) == pool.num_idle
    assert sum(pool.is_published(block) for block in idle) == pool.num_cached
    owners = Counter(block for seq in running for block in seq.all_blocks)
    branches = world.scheduler.draft_scheduler._branches._blocks.values()
    owners.update(b for own in branches for branch in own for blocks in branch for b in blocks)
    assert [pool.ref_count(b) for b in range(pool.num_blocks)] == [
        owners[b] for b in range(pool.num_blocks)
    ], "reference counts differ from the number of owners"
    places: dict[int, tuple[str, int, int]] = {}
    for seq in running:
        assert len(set(seq.all_blocks)) == len(seq.all_blocks)
        for group, (table, first) in enumerate(world.scheduler._tables._tables(seq)):
            assert first + len(table) >= pool.num_blocks_for(seq.num_computed)
            for place, block in enumerate(table, start=first):
                mine = (seq.request.tenant, group, place)
                assert places.setdefault(block, mine) == mine
        check_windows(world, seq)


def check_windows(world: World, seq: Sequence) -> None:
    """Layers with a window keep what the next token sees, and no more than a step's worth."""
    layout, size = world.scheduler.limits.kv_layout, world.scheduler.pool.block_size
    if not layout.windowed or not seq.windows:
        return
    assert seq.first_place <= layout.first_place(seq.num_computed, size), "given back too early"
    run_tokens = world.scheduler.limits.max_run_tokens
    longest = layout.max_window_places(run_tokens, size)
    assert all(len(table) <= longest for table in seq.windows), "blocks are not given back"
    assert len({len(table) for table in seq.windows}) <= 1


def check_cache(world: World, cache: PrefixCache) -> None:
    pool = world.scheduler.pool
    published = {b for b in range(pool.num_blocks) if pool.is_published(b)}
    entries = [entry for group in cache._block_of for entry in group.items()]
    assert published == set(cache._entry_of) == {block for _, block in entries}
    for digest, block in entries:
        text = world.slots[block][-1]
        assert text is not None, "a block was published before it was full"
        tenant, tokens = text
        assert digest == _digest(tenant, tokens, pool.block_size), "published under a wrong digest"


def check_tiers(world: World) -> None:
    """Slots hold what their keys say; none is free and findable at once."""
    if world.tiers is None:
        return
    memory, size = world.tiers.memory, world.setup.block_size
    first_group = 0 if world.setup.layout.full else 1  # of the world, which numbers from full
    assert not set(memory._free) & set(memory._slot_of.values())
    assert len(set(memory._slot_of.values())) == len(memory)
    for key, slot in memory._slot_of.items():
        group, *positions = world.tier_slots[slot]
        tenant, tokens = positions[-1]
        assert key == _digest(tenant, tokens, size) + bytes((group - first_group,)), (
            "a slot holds another block"
        )


def check_plan(world: World, plan: StepPlan, before: Before) -> None:
    ids = [run.seq_id for run in plan.runs]
    assert len(set(ids)) == len(ids) <= world.setup.max_num_seqs
    slot_of = {seq.id: seq.state_slot for seq in world.running}
    assert all(run.state_slot == slot_of[run.seq_id] for run in plan.runs)
    first = before.first
    if first is not None and first.state is not State.FINISHED and not first.request.background:
        assert first.id in ids, "the first sequence in order was preempted or left out"
    known = [len(run.tokens) - run.num_drafts for run in plan.runs]
    prompts = [count for count in known if count > 1]
    num_tokens = sum(len(path.tokens) for run in plan.runs for path in draft_paths(run))
    excess = 0 if world.setup.chunked or not prompts else prompts[0]
    assert num_tokens <= world.setup.max_num_batched_tokens + excess
    if not world.setup.chunked:
        assert all(run.sample for run in plan.runs), "a prompt was split"
    view = world.scheduler.stats()
    assert view.num_running == len(world.running)
    assert view.num_running + view.num_waiting == world.scheduler._registry.num_unfinished


def check_trimmed(world: World) -> None:
    """After a commit no sequence owns blocks beyond its known tokens, and no branch is left."""
    assert not world.scheduler.draft_scheduler._branches._blocks
    for seq in world.running:
        num_blocks = world.scheduler.pool.num_blocks_for(seq.num_known)
        tables = world.scheduler._tables._tables(seq)
        assert all(first + len(table) <= num_blocks for table, first in tables), (
            "a block of a rejected draft"
        )


def check_admitted(world: World, before: Before) -> None:
    """Admitted sequences precede all that still wait in the same queue."""
    registry, running = world.scheduler._registry, {seq.id for seq in world.running}
    for lane in registry.lanes:
        unstarted, resuming = before.unstarted[lane.rank], before.resuming[lane.rank]
        for queue, was_waiting in ((lane.unstarted, unstarted), (lane.resuming, resuming)):
            admitted = [seq.key for seq in was_waiting if seq.id in running]
            remaining = {seq.id for seq in waiting_in(queue)}
            waiting = [seq.key for seq in was_waiting if seq.id in remaining]
            assert not admitted or not waiting or max(admitted) < min(waiting), "overtaken"
            if admitted and queue is lane.unstarted and world.setup.policy != "continuous":
                assert before.num_started[lane.rank] == 0, "admitted to a running batch"
            if admitted and lane.rank:
                assert not registry.lanes[0].has_waiting, "admitted before an interactive request"


def check_time_to_live(world: World) -> None:
    pool = world.scheduler.pool
    for block in pool.idle_blocks():
        if pool.is_published(block) and world.setup.ttl_s is not None:
            assert world.now_s - world.used_s[block] <= world.setup.ttl_s, (
                "cached beyond its time to live"
            )


def _digest(tenant: str, tokens: tuple[int, ...], size: int) -> bytes:
    digest = root_digest(tenant)
    for i in range(0, len(tokens), size):
        digest = block_digest(digest, tokens[i : i + size])
    return digest
