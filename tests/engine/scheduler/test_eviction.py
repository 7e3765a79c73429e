"""The scheduler's part of KV eviction: what is dropped when, and whose blocks come free."""

from __future__ import annotations

import random

import pytest

from ridgeline.engine.scheduler.kv.eviction import SequenceEviction
from ridgeline.engine.scheduler.plan import Run, stored_runs
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
