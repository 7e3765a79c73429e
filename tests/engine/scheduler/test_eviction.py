"""The scheduler's part of KV eviction: what is dropped when, and whose blocks come free."""

from __future__ import annotations

import random

import pytest

from ridgeline.engine.scheduler import Scheduler
from ridgeline.engine.scheduler.kv.eviction import SequenceEviction
from ridgeline.engine.scheduler.plan import Run, StepPlan, stored_runs
from ridgeline.errors import BadInput, DoesNotFit
from ridgeline.records import KvEviction
from tests.engine.scheduler.helpers import make_request, scheduler, scripted

STREAMING = KvEviction(method="streaming", budget=16, sinks=4)


def eviction(num_prompt: int = 40, block_size: int = 4, **policy: object) -> SequenceEviction:
    made = SequenceEviction.of(KvEviction(**policy), num_prompt, block_size)  # type: ignore[arg-type]
    assert made is not None
    return made


def test_streaming_never_holds_more_than_its_budget() -> None:
    own = eviction(method="streaming", budget=17, sinks=3)
    for position in range(200):
        held = position + 1 - own.dropped_at(position)
        assert own.sinks < held <= 17 or position < 17
        assert own.dropped_at(position) % 4 == 0


def test_snapkv_drops_once_and_h2o_again_and_again() -> None:
    snap = eviction(method="snapkv", budget=20, window=8)
    assert [snap.dropped_at(p) for p in (0, 39, 40, 90)] == [0, 0, 20, 20]
    assert (snap.next_drop(0), snap.next_drop(40)) == (40, float("inf"))
    heavy = eviction(method="h2o", budget=20)
    drops, position = [], 0
    while position < 60:
        position = int(heavy.next_drop(position))
        drops.append((position, heavy.dropped_at(position)))
    assert drops == [(40, 24), (44, 28), (48, 32), (52, 36), (56, 40), (60, 44)]


def test_share_of_a_short_prompt_keeps_what_the_method_needs() -> None:
    assert eviction(num_prompt=8, method="snapkv", budget=0.25, window=8).budget == 12
    assert eviction(num_prompt=100, method="snapkv", budget=0.25, window=8).budget == 25


def test_budget_too_small_for_sinks_and_a_block_is_refused() -> None:
    with pytest.raises(BadInput, match="budget of KV eviction by streaming is too small"):
        scheduler().add(make_request(kv_eviction=KvEviction(method="streaming", budget=7)))


@pytest.mark.parametrize("seed", range(4))
def test_stored_runs_read_the_blocks_of_what_each_query_sees(seed: int) -> None:
    rng = random.Random(seed)
    own = eviction(method="streaming", budget=rng.randint(12, 30), sinks=rng.choice((0, 4, 7)))
    start, count = rng.randint(0, 60), rng.randint(1, 50)
    dropped, sinks = own.dropped_at(start), own.sinks // 4
    places = [*range(sinks), *range(sinks + dropped // 4, -(-(start + count) // 4))]
    if not dropped:
        places = list(range(-(-(start + count) // 4)))
    run = Run(0, start, tuple(range(count)), tuple(places), None, num_dropped=dropped, eviction=own)
    seen = []
    for part in stored_runs([run], 4):
        for i in range(len(part.tokens)):
            index = part.start + i
            keys = {part.blocks[j // 4] * 4 + j % 4 for j in range(index + 1)}
            position = start + len(seen)
            assert position == index + part.num_dropped
            hidden = range(own.sinks, own.sinks + own.dropped_at(position))
            assert keys == set(range(position + 1)) - set(hidden)
            seen.append(position)
    assert seen == list(range(start, start + count))


def run_to_end(**request: object) -> tuple[int, int]:
    """(most sequences at once, most blocks in use) of four requests in 32 blocks."""
    own = scheduler(num_blocks=32, max_num_batched_tokens=16, max_num_seqs=4)
    for i in range(4):
        own.add(make_request(f"{i}", 60, max_tokens=20, **request))
    most_running = most_blocks = 0
    for step in range(500):
        if not own.has_work:
            break
        plan = own.plan(float(step))
        running = own.stats()
        most_running = max(most_running, running.num_running)
        most_blocks = max(most_blocks, running.used_blocks)
        own.commit(plan, scripted(plan), step + 0.5)
    assert own.pool.num_owned == 0
    return most_running, most_blocks


def test_more_sequences_fit_when_the_middle_is_given_back() -> None:
    assert run_to_end()[0] == 2
    running, blocks = run_to_end(kv_eviction=STREAMING)
    assert running == 4 and blocks <= 32
    # Alone, a sequence never holds more than its budget and a step.
    assert eviction(num_prompt=60, method="streaming", budget=16).max_held(80, 16) == 31


def test_prompt_longer_than_the_pool_is_served_by_streaming_only() -> None:
    own = scheduler(num_blocks=8, max_model_len=200)
    with pytest.raises(DoesNotFit):
        own.add(make_request("whole", 100))
    own.add(make_request("streaming", 100, kv_eviction=STREAMING))
    for step in range(100):
        plan = own.plan(float(step))
        own.commit(plan, scripted(plan), step + 0.5)
    assert not own.has_work


def test_evicted_tokens_enter_no_prefix_cache() -> None:
    own = scheduler(num_blocks=64, prefix=True)
    own.add(make_request("a", 60, kv_eviction=STREAMING))
    for step in range(40):
        plan = own.plan(float(step))
        own.commit(plan, scripted(plan), step + 0.5)
    assert not own.has_work
    own.add(make_request("b", 60))
    own.plan(100.0)
    assert own.running[0].num_computed == 16  # the tokens that saw everything before them


SNAPKV = KvEviction(method="snapkv", budget=16, window=4)


def serve_all(own: Scheduler, num_steps: int = 200) -> list[StepPlan]:
    plans = []
    for step in range(num_steps):
        if not own.has_work:
            break
        plan = own.plan(float(step))
        plans.append(plan)
        own.commit(plan, scripted(plan), step + 0.5)
    assert not own.has_work and not own.pool.num_owned
    return plans


def test_compaction_returns_the_blocks_it_empties() -> None:
    own = scheduler(num_blocks=32)
    own.add(make_request("a", 50, max_tokens=8, kv_eviction=SNAPKV))
    used = []
    for step in range(30):
        plan = own.plan(float(step))
        own.commit(plan, scripted(plan), step + 0.5)
        used.append(own.pool.num_owned)
        for compaction in plan.compactions:
            assert (compaction.num_cached, compaction.num_kept) == (50, 14)
            assert set(compaction.targets) <= set(compaction.sources)  # its own blocks: no more
    assert max(used) == 13 and 0 < min(n for n in used if n) <= 5


def test_shared_blocks_are_left_as_they_were() -> None:
    own = scheduler(num_blocks=64, prefix=True, max_num_seqs=2)
    own.add(make_request("full", 50, max_tokens=30))
    for step in range(5):
        plan = own.plan(float(step))
        own.commit(plan, scripted(plan), step + 0.5)
    [full] = own.running
    own.add(make_request("snapkv", 50, max_tokens=4, kv_eviction=SNAPKV, at_s=5.0))
    compactions = []
    for step in range(5, 12):
        plan = own.plan(float(step))
        compactions += plan.compactions
        for compaction in plan.compactions:
            assert set(compaction.sources) & set(full.blocks)
            assert not set(compaction.targets) & set(full.blocks)
        own.commit(plan, scripted(plan), step + 0.5)
    assert len(compactions) == 1
    # The prompt was computed in full, so a later request finds it.
    own.add(make_request("later", 60, at_s=20.0))
    own.plan(20.0)
    assert [seq.num_computed for seq in own.running if seq.request.id == "later"] == [48]


def test_sequences_that_share_a_full_pool_still_evict() -> None:
    own = scheduler(num_blocks=14, prefix=True, max_num_seqs=4, max_num_batched_tokens=64)
    for i in range(3):
        own.add(make_request(f"{i}", 50, max_tokens=6, kv_eviction=SNAPKV, at_s=float(i)))
    assert sum(len(plan.compactions) for plan in serve_all(own)) == 3


@pytest.mark.parametrize("seed", range(6))
def test_random_loads_with_eviction_leak_no_block(seed: int) -> None:
    rng = random.Random(seed)
    own = scheduler(
        num_blocks=rng.randint(26, 60), prefix=rng.random() < 0.7, max_num_batched_tokens=24
    )
    policies = [None, STREAMING, SNAPKV, KvEviction(method="h2o", budget=12)]
    cancelled = rng.randrange(12)
    for i in range(12):
        policy, first = rng.choice(policies), rng.choice((100, 500))
        length, count = rng.randint(1, 70), rng.randint(1, 25)
        request = make_request(
            f"{i}", length, first=first, max_tokens=count, kv_eviction=policy, n=rng.choice((1, 2))
        )
        own.add(request)
    for step in range(2000):
        if not own.has_work:
            break
        plan = own.plan(float(step))
        written = {block for run in plan.runs for block in run.blocks[run.num_cached // 4 :]}
        for compaction in plan.compactions:
            others = [c for c in plan.compactions if c is not compaction]
            assert not set(compaction.targets) & {b for c in others for b in c.targets}
            assert not set(compaction.sources) & {target for _, target in plan.copies}
        assert all(own.pool.is_private(block) for block in written)
        own.commit(plan, scripted(plan), step + 0.5)
        if step == 9:
            own.cancel(f"{cancelled}")
    assert not own.has_work and not own.pool.num_owned
