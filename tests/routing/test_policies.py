"""Routing policies: choices, bounds of their memory, and what they gain on a simulated fleet."""

from __future__ import annotations

import itertools
import random
import statistics
import time

import msgspec
import pytest

from ridgeline.routing import ROUTERS, make_router
from ridgeline.routing.base import FleetLoad
from ridgeline.routing.prefix import PrefixAware
from ridgeline.routing.prefix_index import PrefixIndex
from ridgeline.routing.session import SessionAffinity
from ridgeline.routing.ttft import LeastTtft


class Wanted(msgspec.Struct):
    """A request as a policy sees it."""

    prefix: tuple[int, ...] = ()
    prefix_block: int = 16
    num_prompt: int = 64
    session: str = ""
    ttft_slo_s: float | None = None


def fleet(*in_flight: int) -> FleetLoad:
    load = FleetLoad()
    for number in in_flight:
        load.in_flight[load.add_replica()] = number
    return load


def measured(load: FleetLoad, replica: int, tokens_per_s: int) -> None:
    load.note_sent(replica, tokens_per_s)
    load.note_first_token(replica, tokens_per_s, 0.0, 1.0)
    load.note_ended(replica)


@pytest.mark.parametrize("name", ROUTERS)
def test_choice_is_active_and_repeatable(name: str) -> None:
    rng = random.Random(1)
    choices = []
    for _ in range(2):
        rng.seed(1)
        router, load = make_router(name, seed=4), fleet(*[0] * 6)
        sequence = []
        for _ in range(300):
            active = sorted(rng.sample(range(6), rng.randint(1, 6)))
            prefix = tuple(rng.choices(range(3), k=rng.randint(0, 4)))
            chosen = router.choose(Wanted(prefix, session=str(prefix)), active, load)
            assert chosen in active
            load.note_sent(chosen, 10)
            sequence.append(chosen)
        choices.append(sequence)
    assert choices[0] == choices[1]


def test_prefix_memory_is_bounded_and_heads_outlive_tails() -> None:
    index = PrefixIndex(max_blocks=100)
    for i in range(1000):
        index.add((1, 2, 1000 + i), 0)
    assert index.num_blocks(0) == 100
    assert index.num_matched((1, 2, 0), 0) == 2  # the shared head is the most recently used
    assert index.longest((1, 2, 1000), {0}) == 0
    index.remove(0)
    assert index.num_blocks(0) == 0 and index.longest((1, 2), {0}) is None
    assert not index._holders


def test_matches_are_those_of_a_search_block_by_block() -> None:
    rng, index = random.Random(3), PrefixIndex(max_blocks=40)
    for _ in range(600):
        prefix = tuple(itertools.accumulate(rng.choices(range(3), k=rng.randint(0, 12)), hash_of))
        replica = rng.randrange(3)
        known = index._blocks.get(replica, {})
        misses = (d for d, block in enumerate(prefix) if (d, block) not in known)
        assert index.num_matched(prefix, replica) == next(misses, len(prefix))
        index.add(prefix, replica)


def hash_of(chain: int, block: int) -> int:
    return hash((chain, block))


def test_load_guard_breaks_affinity_by_default() -> None:
    aware, load = PrefixAware(), fleet(0, 0)
    request = Wanted((7, 8))
    home = aware.choose(request, [0, 1], load)
    load.in_flight[home] = 200
    assert aware.choose(request, [0, 1], load) == 1 - home
    sticky = SessionAffinity(0, balance_abs=4)
    home = sticky.choose(Wanted(session="a"), [0, 1], fleet(0, 0))
    busy = fleet(0, 0)
    busy.in_flight[home] = 9
    assert sticky.choose(Wanted(session="a"), [0, 1], busy) == 1 - home


def test_ttft_prefers_the_faster_replica_in_proportion() -> None:
    router, load = LeastTtft(), fleet(0, 0)
    measured(load, 0, 1000)
    measured(load, 1, 3000)
    counts = [0, 0]
    for i in range(400):
        chosen = router.choose(Wanted((i,), num_prompt=100), [0, 1], load)
        load.note_sent(chosen, 100)
        counts[chosen] += 1
    assert 2.7 < counts[1] / counts[0] < 3.3


def test_ttft_packs_prefixes_while_the_slo_holds() -> None:
    load = fleet(0, 0)
    for replica in (0, 1):
        measured(load, replica, 1000)
    request = Wanted((1, 2, 3, 4), num_prompt=64, ttft_slo_s=1.0)
    router = LeastTtft()
    home = router.choose(request, [0, 1], load)
    load.queued_tokens[home] = 800  # 0.8 s: slower than the idle one, but within the SLO
    assert router.choose(request, [0, 1], load) == home
    load.queued_tokens[home] = 1200
    assert router.choose(request, [0, 1], load) == 1 - home
    without = msgspec.structs.replace(request, ttft_slo_s=None)
    load.queued_tokens[home] = 800
    assert router.choose(without, [0, 1], load) == 1 - home


def test_ttft_takes_predictions_that_are_close_for_equal() -> None:
    """A replica that seems a little faster does not get everything while nothing is queued."""
    load = fleet(2, 5, 6)
    for replica, rate in enumerate((900, 1000, 1100)):
        measured(load, replica, rate)
    load.in_flight[:] = [2, 5, 6]
    assert LeastTtft().choose(Wanted(num_prompt=1000), [0, 1, 2], load) == 0
    load.queued_tokens[0] = 4000
    assert LeastTtft().choose(Wanted(num_prompt=1000), [0, 1, 2], load) == 1


def test_short_prompts_do_not_make_a_replica_seem_slow() -> None:
    """Both take 0.1 s per request and 1 ms per token."""
    load = fleet(0, 0)
    for i in range(40):
        for replica, num_tokens in ((0, 20 if i % 8 else 2000), (1, 2000)):
            load.note_sent(replica, num_tokens)
            seconds = 0.1 + 1e-3 * num_tokens
            load.note_first_token(replica, num_tokens, 10.0 * i, 10.0 * i + seconds)
    assert load.prefill_rate(0) == pytest.approx(load.prefill_rate(1), rel=0.05)


def test_prefill_rate_follows_what_was_measured() -> None:
    load = fleet(0)
    assert load.prefill_rate(0) == 0.0
    load.note_sent(0, 100)
    load.note_sent(0, 100)
    load.note_first_token(0, 100, 10.0, 10.5)
    load.note_first_token(0, 100, 10.0, 11.0)  # it began when the first one was done
    assert load.prefill_rate(0) == pytest.approx(200, rel=0.01)
    assert load.queued_tokens[0] == 0 and load.in_flight[0] == 2


@pytest.mark.parametrize("name", ROUTERS)
def test_choice_takes_less_than_a_third_of_a_millisecond(name: str) -> None:
    """100 replicas, prompts of 8,000 tokens that share half of them."""
    router, load = make_router(name), fleet(*[0] * 100)
    requests = [
        Wanted((*range(64), *range(i, i + 64)), 64, 8192, session=str(i)) for i in range(100)
    ]
    took_s = []
    for request in requests:
        began_s = time.thread_time()
        load.in_flight[router.choose(request, range(100), load)] += 1
        took_s.append(time.thread_time() - began_s)
    assert statistics.median(took_s) < 0.3e-3
