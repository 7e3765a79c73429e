"""Steps in which requests join, foreseen (`engine.core.entering`), against steps as planned."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from ridgeline.engine.scheduler.scheduler import Scheduler
from ridgeline.plan.simulate.fleet import simulate_fleet
from ridgeline.plan.simulate.records import SimulatedRequest
from ridgeline.plan.simulate.replica import SimulatedReplica
from ridgeline.records import Request, Sampling
from tests.plan.constant_step_times import ConstantStepTimes
from tests.plan.test_fleet import fleet, instants, make, outcomes


def test_fast_prefill_leaves_the_same_scheduler_state() -> None:
    """Requests admitted among decodes: tables, idle blocks and totals equal plan and commit's."""

    def after(fast_forward: bool) -> Scheduler:
        station = SimulatedReplica(
            make(blocks=60)(), ConstantStepTimes(1.0), fast_forward=fast_forward
        )
        for i, at_s in enumerate((0.0, 2.5, 6.5, 6.6, 11.5)):
            while station.wake_s < at_s:
                station.advance(station.wake_s)
            sampling = Sampling(temperature=0.0, max_tokens=(20, 14, 8, 2, 9)[i], ignore_eos=True)
            station.add(
                Request(id=str(i), prompt=(7,) * 9, sampling=sampling, arrival_s=at_s), at_s
            )
        while station.wake_s <= 12.0:
            station.advance(station.wake_s)
        return station.scheduler

    fast, slow = after(True), after(False)
    assert len(fast.running) == 4
    assert fast.pool.idle_blocks() == slow.pool.idle_blocks()
    for one, other in zip(fast.running, slow.running, strict=True):
        assert (one.blocks, one.tokens, one.key) == (other.blocks, other.tokens, other.key)
    assert fast.totals == slow.totals
    assert [lane.num_started for lane in fast._registry.lanes] == [
        lane.num_started for lane in slow._registry.lanes
    ]


@pytest.mark.slow
def test_fast_prefill_agrees_at_the_memory_limit() -> None:
    """Budget and blocks that are just enough, or just not, for who wants to join."""
    rng = np.random.default_rng(5)
    for _ in range(150):
        scheduler = make(4, int(rng.integers(16, 24)), budget=int(rng.integers(16, 60)))
        at_s = np.sort(rng.uniform(0, 0.03, 8)).tolist()
        asked = [
            SimulatedRequest(at_s=at, num_prompt=int(p), num_output=int(n))
            for at, p, n in zip(at_s, rng.integers(4, 20, 8), rng.integers(1, 30, 8), strict=True)
        ]
        fast, slow = (
            simulate_fleet(
                asked,
                fleet(scheduler, ConstantStepTimes(math.pi / 1000), fast_forward=fast_forward),
            )
            for fast_forward in (True, False)
        )
        assert outcomes(fast) == outcomes(slow)
        assert np.allclose(instants(fast), instants(slow), rtol=1e-9, atol=1e-12)


def test_request_overhead_delays_only_the_client() -> None:
    asked = [SimulatedRequest(at_s=0.1 * i, num_prompt=8, num_output=5) for i in range(6)]
    plain = fleet(make(), ConstantStepTimes(0.01))
    build = msgspec.structs.replace(plain.replicas[0], overhead_s=0.002)
    late = msgspec.structs.replace(plain, replicas=(build,))
    one, other = (instants(simulate_fleet(asked, each)) for each in (plain, late))
    assert np.allclose(other[:, 1:], one[:, 1:] + 0.002) and np.allclose(other[:, 0], one[:, 0])
