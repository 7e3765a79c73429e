"""The waiting order: priority, arrival, aging, SLO."""

from __future__ import annotations

import random

from msgspec.structs import replace

from ridgeline.engine.scheduler.queue.waiting_queue import WaitingQueue, order_key
from ridgeline.records import Slo
from tests.engine.scheduler.helpers import make_request, sequence

AGING_S = 10.0


def test_lower_priority_first_then_arrival() -> None:
    keys = [
        order_key(make_request(priority=priority, at_s=at_s), AGING_S, serial, 0)
        for serial, (priority, at_s) in enumerate([(0, 0.0), (-1, 5.0), (1, 1.0), (0, 2.0)])
    ]
    assert sorted(range(4), key=keys.__getitem__) == [1, 0, 3, 2]


def test_waiting_is_worth_priority() -> None:
    """A request one level behind can be overtaken for `aging_s` seconds and no longer."""
    late = order_key(make_request(priority=1, at_s=100.0), AGING_S, 0, 0)
    assert order_key(make_request(priority=0, at_s=109.0), AGING_S, 1, 0) < late
    assert order_key(make_request(priority=0, at_s=111.0), AGING_S, 2, 0) > late


def test_order_does_not_change_with_time() -> None:
    """The static key orders requests as their effective priorities do at any time."""
    rng = random.Random(0)
    requests = [
        make_request(priority=rng.randint(-3, 3), at_s=rng.uniform(0, 60)) for _ in range(30)
    ]
    by_key = sorted(requests, key=lambda a: order_key(a, AGING_S, 0, 0)[0])
    for now_s in (60.0, 1000.0):
        by_effect = sorted(requests, key=lambda a: a.priority - (now_s - a.arrival_s) / AGING_S)
        assert [id(a) for a in by_key] == [id(a) for a in by_effect]


def test_queue_pops_in_order_and_knows_the_oldest() -> None:
    queue, seqs = WaitingQueue(), [sequence([1], number=i) for i in (3, 1, 2)]
    assert (queue.peek(), queue.oldest_arrival_s) == (None, None)
    for seq in seqs:
        queue.push(seq)
    assert queue.oldest_arrival_s == 0.0
    assert [queue.pop().id for _ in range(len(queue))] == [1, 2, 3]


def test_discarded_entries_are_skipped_and_do_not_pile_up() -> None:
    queue, seqs = WaitingQueue(), [sequence([1], number=i) for i in range(500)]
    for seq in seqs:
        queue.push(seq)
    for seq in seqs[:490]:
        queue.discard(seq)
        queue.discard(seq)  # unknown: ignored
    assert len(queue) == 10
    assert len(queue._heap) < 200
    assert queue.pop() is seqs[490]


def test_ttft_slo_is_a_due_time() -> None:
    """The earliest due request goes first; without an SLO it is due at once."""
    slow, quick = Slo(ttft_s=5.0), Slo(ttft_s=1.0)
    requests = [
        replace(make_request("slow", at_s=0.0), slo=slow),
        replace(make_request("quick", at_s=3.0), slo=quick),
        replace(make_request("none", at_s=4.5), slo=None),
        replace(make_request("later", at_s=4.6), slo=quick),
    ]
    order = sorted(range(4), key=lambda i: order_key(requests[i], 10.0, i, 0))
    assert [requests[i].id for i in order] == ["quick", "none", "slow", "later"]
