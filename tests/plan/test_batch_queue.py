"""Batch requests of a simulated fleet: troughs, deadlines, failures, and scaling."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from ridgeline.plan.simulate.batch_queue import BatchQueue
from ridgeline.plan.simulate.fleet import simulate_fleet
from ridgeline.plan.simulate.off_peak import OffPeak
from ridgeline.plan.simulate.records import (
    Autoscaling,
    FaultModel,
    FleetConfig,
    FleetOutcome,
    SimulatedRequest,
)
from ridgeline.plan.simulate.summary import summarise
from ridgeline.routing.batch_demand import wanted_servers
from tests.plan.constant_step_times import ConstantStepTimes
from tests.plan.test_fleet import fleet, instants, make, outcomes

STEP_S = 0.02


def batch_request(at_s: float, window_s: float, num_output: int = 10) -> SimulatedRequest:
    return SimulatedRequest(
        at_s=at_s,
        num_prompt=20,
        num_output=num_output,
        background=True,
        deadline_s=at_s + window_s,
    )


def interactive(at_s: float, num_output: int = 10) -> SimulatedRequest:
    return SimulatedRequest(at_s=at_s, num_prompt=20, num_output=num_output)


def scaled_fleet(**more: Any) -> FleetConfig:
    scaling = Autoscaling(
        **{"target": 100, "max_replicas": 8, "interval_s": 1, "startup_s": 2, "stable_s": 5, **more}
    )
    return fleet(make(slots=2), ConstantStepTimes(STEP_S), 1, scaling=scaling)


def most_replicas(outcome: FleetOutcome) -> int:
    return max(count for _, count in outcome.num_replicas)


def served(outcome: FleetOutcome) -> list[bool]:
    return [not math.isnan(result.finished_s) for result in outcome.requests]


def test_batch_requests_are_served_in_the_trough() -> None:
    """Two bursts that fill both slots, and a pause in which the batch has room."""
    bursts = [interactive(at + 0.02 * i, 40) for at in (0.0, 60.0) for i in range(60)]
    batch = [batch_request(0.5, 55.0) for _ in range(40)]
    both = sorted([*bursts, *batch], key=lambda request: request.at_s)
    outcome = simulate_fleet(both, fleet(make(slots=2), ConstantStepTimes(STEP_S)))
    alone = simulate_fleet(bursts, fleet(make(slots=2), ConstantStepTimes(STEP_S)))
    own = [r for r in outcome.requests if not r.request.background]
    assert [r.first_s for r in own] == pytest.approx([r.first_s for r in alone.requests], abs=0.1)
    busy_until_s = max(r.finished_s for r in alone.requests if r.request.at_s < 30)
    starts_s = [r.started_s for r in outcome.requests if r.request.background]
    assert all(served(outcome)) and sum(at_s > busy_until_s for at_s in starts_s) >= 38


@pytest.mark.parametrize(("window_s", "wants_more"), [(300.0, False), (8.0, True)])
def test_fleet_is_scaled_by_the_deadline(window_s: float, wants_more: bool) -> None:
    requests = [batch_request(0.0, window_s) for _ in range(200)]  # some 20 s of one replica
    outcome = simulate_fleet(requests, scaled_fleet())
    assert (most_replicas(outcome) > 1) == wants_more
    assert all(served(outcome))
    assert max(r.finished_s for r in outcome.requests) <= window_s


def test_servers_that_share_a_few_requests_do_not_seem_slow() -> None:
    """Six of them have few results each, of requests that one could run: five are given up."""
    requests = [batch_request(i / 8, 3.0, num_output=100) for i in range(400)]
    scaling = Autoscaling(target=100, max_replicas=8, interval_s=1, startup_s=2, stable_s=5)
    config = fleet(make(slots=32, budget=999), ConstantStepTimes(STEP_S), 6, scaling=scaling)
    outcome = simulate_fleet(requests, config)
    assert all(served(outcome)) and outcome.num_replicas[-1][1] == 1


def test_without_their_demand_batches_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: an autoscaler that does not hear of batches, as it was."""
    monkeypatch.setattr(BatchQueue, "demand", lambda *_: 0.0)
    outcome = simulate_fleet([batch_request(0.0, 8.0) for _ in range(200)], scaled_fleet())
    summary = summarise(outcome, None).batch
    assert most_replicas(outcome) == 1
    assert summary is not None and summary.num_expired == 200 - summary.num_served > 50
    errors = {r.error for r in outcome.requests if r.error}
    assert errors == {"its deadline passed"}


def test_old_queue_adds_replicas_in_the_simulator() -> None:
    requests = [interactive(0.05 * i) for i in range(400)]  # twice what one replica serves
    blind = simulate_fleet(requests, scaled_fleet())
    seeing = simulate_fleet(requests, scaled_fleet(allowed_wait_s=1.0))
    assert most_replicas(seeing) > most_replicas(blind)
    waits_s = [max(r.first_s - r.request.at_s for r in o.requests) for o in (blind, seeing)]
    assert waits_s[1] < waits_s[0]


def random_load(seed: int) -> list[SimulatedRequest]:
    rng = np.random.default_rng(seed)
    arrivals_s = np.cumsum(rng.exponential(0.05, 120)).tolist()
    return [
        batch_request(at_s, float(rng.uniform(1, 20)), int(rng.integers(1, 30)))
        if rng.random() < 0.5
        else interactive(at_s, int(rng.integers(1, 30)))
        for at_s in arrivals_s
    ]


@pytest.mark.parametrize("seed", range(4))
def test_fast_forward_equals_single_steps_with_batches(seed: int) -> None:
    found = [
        simulate_fleet(
            random_load(seed),
            fleet(
                make(slots=3),
                ConstantStepTimes(1 / 64),
                2,
                faults=FaultModel(mtbf_s=3.0, repair_s=0.5),
                seed=seed,
                resume=bool(seed % 2),
                fast_forward=fast,
            ),
        )
        for fast in (True, False)
    ]
    assert outcomes(found[0]) == outcomes(found[1])
    assert np.allclose(instants(found[0]), instants(found[1]), equal_nan=True, atol=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_every_batch_request_ends_once_whatever_fails(seed: int) -> None:
    requests = random_load(seed)
    faults = FaultModel(mtbf_s=1.0, repair_s=1.0)
    config = fleet(make(slots=3), ConstantStepTimes(STEP_S), 2, faults=faults, seed=seed)
    outcome = simulate_fleet(requests, config)
    assert sum(r.num_restarts for r in outcome.requests) > 0
    for result in outcome.requests:
        deadline_s = result.request.deadline_s
        if math.isnan(result.finished_s):
            assert result.error == "its deadline passed" and deadline_s is not None
        else:
            assert not result.error and result.finished_s <= (deadline_s or math.inf)


def test_off_peak_window_holds_batches_back_and_not_their_deadline() -> None:
    window = OffPeak(from_s=100.0, to_s=110.0)
    requests = [batch_request(0.0, 105.0), *(batch_request(1.0, 1000.0) for _ in range(50))]
    requests.append(batch_request(2.0, 50.0))
    outcome = simulate_fleet(
        requests, fleet(make(slots=2), ConstantStepTimes(STEP_S), off_peak=window)
    )
    *others, hopeless = outcome.requests
    assert hopeless.error == "its deadline passed"
    assert all(100.0 <= r.started_s < 110.0 for r in others)


def naive_demand(
    open_until: list[tuple[int, float]], seconds: float, now_s: float
) -> float:  # over all deadlines, one by one
    return max(
        (
            min(n, n * seconds / max(1.0, due_s - now_s))
            for _, due_s in open_until
            for n in [sum(count for count, other_s in open_until if other_s <= due_s)]
        ),
        default=0.0,
    )


@pytest.mark.parametrize("seed", range(5))
def test_queue_asks_for_what_its_open_requests_need(seed: int) -> None:
    rng = np.random.default_rng(seed)
    queue, open_, running = BatchQueue(None), dict[int, float](), list[int]()
    now_s = 0.0
    for index in range(60):
        now_s += float(rng.exponential(1.0))
        open_[index] = 50.0 * (1 + int(rng.integers(4)))
        queue.add(index, open_[index])
        if rng.random() < 0.5 and queue.first is not None:
            running.append(queue.take(0, 4, now_s))
        elif running:
            ended = running.pop(0)
            assert queue.end(ended, 0, 4, now_s) == (ended in open_)
            open_.pop(ended, None)
        for due_s in {due_s for due_s in open_.values() if due_s <= now_s}:
            expired = queue.expire(due_s)
            assert list(expired) == sorted(i for i in open_ if open_[i] == due_s)
            open_ = {i: at_s for i, at_s in open_.items() if at_s != due_s}
    seconds = queue._paces[0].seconds_per_request
    assert seconds is not None
    open_until = [(1, due_s) for due_s in open_.values()]
    expected = naive_demand(open_until, seconds, now_s)
    assert queue.demand([0, 7], now_s) == pytest.approx(expected)
    assert wanted_servers(open_until, seconds, now_s) == pytest.approx(expected)
    assert queue.demand([7], now_s) == 0.0, "a server without a result says nothing"
