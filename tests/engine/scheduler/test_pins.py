"""Pinned prefixes: evicted last, for a time, within bounds; limits and forgetting."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from ridgeline.engine.scheduler.kv.prefix_cache import PrefixCache
from ridgeline.engine.scheduler.kv.prefix_pins import PrefixPins
from ridgeline.engine.scheduler.scheduler import Scheduler
from ridgeline.records import CachePolicy, Event, Started
from tests.engine.scheduler.helpers import make_request, scheduler, step


def pinning(num_blocks: int = 16, max_pinned: int = 8) -> Scheduler:
    made = scheduler(num_blocks=num_blocks, block_size=4, prefix=True)
    assert isinstance(made.cache, PrefixCache)
    made.cache.pins = PrefixPins(max_pinned)
    return made


def run_to_end(sched: Scheduler, now_s: float) -> list[Event]:
    events: list[Event] = []
    while sched.has_work:
        events += step(sched, now_s)[1]
    return events


def serve(sched: Scheduler, name: str, first: int, now_s: float, **policy: Any) -> Started:
    """Serve a prompt of 17 tokens; how it started."""
    request = make_request(name, 17, first=first, at_s=now_s, max_tokens=1)
    own = replace(request, cache=CachePolicy(**policy) if policy else None, account=name[0])
    sched.add(own)
    [started] = [event for event in run_to_end(sched, now_s) if isinstance(event, Started)]
    return started


def flood(sched: Scheduler, now_s: float) -> None:
    """As many other prompts as overwrite every block."""
    for i in range(6):
        serve(sched, f"x{i}", 1000 * (i + 1), now_s)


def test_pinned_prefix_outlives_others_until_its_time_is_over() -> None:
    sched = pinning()
    assert serve(sched, "a", 100, 0.0, pin_tokens=17, pin_ttl_s=50.0).pinned_tokens == 16
    serve(sched, "b", 500, 0.0)
    flood(sched, 1.0)
    assert serve(sched, "b2", 500, 2.0).cached_tokens == 0
    assert serve(sched, "a2", 100, 2.0).cached_tokens == 16
    flood(sched, 60.0)
    assert serve(sched, "a3", 100, 61.0).cached_tokens == 0


def test_requests_may_use_the_whole_cache_in_spite_of_pins() -> None:
    sched = pinning(num_blocks=8, max_pinned=8)
    serve(sched, "a", 100, 0.0, pin_tokens=17)
    sched.add(make_request("big", 31, first=500, max_tokens=1))
    run_to_end(sched, 1.0)
    assert not sched.has_work


def test_an_account_pins_half_of_what_may_be_pinned() -> None:
    pins = PrefixPins(8)
    chains = [tuple(bytes((chain, i)) for i in range(3)) for chain in range(4)]
    assert [pins.add("a", chain, 10.0) for chain in chains[:2]] == [3, 1]
    assert pins.add("b", chains[2], 10.0) == 3
    assert len(pins) == 7
    assert pins.add("c", chains[3], 10.0) == 1
    assert pins.add("d", chains[3], 10.0) == 1, "what others have pinned costs nothing"
    longer = (*chains[2], b"more")
    assert pins.add("b", longer, 20.0) == 3, "one pin replaces the shorter one of the same text"
    assert len(pins.expire(15.0)) == 5
    assert len(pins.expire(25.0)) == 3
    assert len(pins) == 0


def test_limit_bounds_what_later_requests_find() -> None:
    sched = pinning()
    serve(sched, "a", 100, 0.0, max_cached_tokens=9)
    assert serve(sched, "b", 100, 1.0).cached_tokens == 8
    serve(sched, "c", 700, 2.0, max_cached_tokens=0)
    assert serve(sched, "d", 700, 3.0).cached_tokens == 0


def test_forgotten_prefix_is_not_found_unless_another_account_pinned_it() -> None:
    sched = pinning()
    serve(sched, "a", 100, 0.0, pin_tokens=17)
    request = replace(make_request("a9", 17, first=100), account="a")
    assert sched.forget_prefix(request) == 16
    assert serve(sched, "a2", 100, 1.0).cached_tokens == 0
    serve(sched, "b", 100, 2.0, pin_tokens=8)
    assert sched.forget_prefix(request) == 8
    assert serve(sched, "a3", 100, 3.0).cached_tokens == 8


def test_a_pin_is_prolonged_without_computing() -> None:
    sched = pinning()
    serve(sched, "a", 100, 0.0, pin_tokens=17, pin_ttl_s=50.0)
    policy = CachePolicy(pin_tokens=17, pin_ttl_s=50.0)
    again = replace(make_request("a9", 17, first=100, at_s=40.0), account="a", cache=policy)
    assert sched.pin_prefix(again) == 16
    assert not sched.has_work
    flood(sched, 60.0)
    assert serve(sched, "a2", 100, 61.0).cached_tokens == 16
    flood(sched, 91.0)
    assert serve(sched, "a3", 100, 92.0).cached_tokens == 0


def test_a_pin_of_what_is_not_cached_holds_when_it_is_computed() -> None:
    sched = pinning()
    policy = CachePolicy(pin_tokens=17, pin_ttl_s=50.0)
    first = replace(make_request("a0", 17, first=100), account="a", cache=policy)
    assert sched.pin_prefix(first) == 16
    serve(sched, "b", 100, 1.0)
    flood(sched, 2.0)
    assert serve(sched, "a1", 100, 3.0).cached_tokens == 16
