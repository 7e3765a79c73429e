"""Twins behind the gateway on virtual time, against the simulator of the same fleet."""

from __future__ import annotations

import math

import pytest

from ridgeline.plan.simulate.records import (
    Autoscaling,
    FaultModel,
    RequestOutcome,
    SimulatedRequest,
)
from ridgeline.plan.step_time.operating_point import OperatingPoint
from ridgeline.plan.step_time.predict import predict
from ridgeline.records import Slo
from ridgeline.twin.config import TwinConfig
from tests.fleet.twin_fleet import TwinFleetPlan, goodput, rehearse, simulate_same, waves

TWIN = TwinConfig(model="llama-3.1-8b", device="l4", max_num_seqs=2, enable_prefix_caching=False)
SLO = Slo.parse("ttft:6000 tpot:80")


def mean_ttft_s(outcomes: list[RequestOutcome]) -> float:
    return sum(o.first_s - o.request.at_s for o in outcomes) / len(outcomes)


@pytest.mark.parametrize(("device", "num_prompt"), [("h100-sxm", 900), ("l4", 300)])
def test_a_request_alone_takes_as_long_as_predicted(device: str, num_prompt: int) -> None:
    plan = TwinFleetPlan(twin=TwinConfig(model="llama-3.1-8b", device=device), count=1)
    request = SimulatedRequest(at_s=0.0, num_prompt=num_prompt, num_output=9)
    (twin,), _ = rehearse(plan, [request])
    (simulated,) = simulate_same(plan, [request]).requests
    point = OperatingPoint(model="llama-3.1-8b", device=device, isl=num_prompt, osl=9)
    predicted = predict(point)
    assert predicted.ttft_ms > predicted.prompt_ms
    for outcome in (twin, simulated):
        assert 1000 * outcome.first_s == pytest.approx(predicted.ttft_ms, rel=0.01)
        tpot_ms = 1000 * (outcome.finished_s - outcome.first_s) / 8
        assert tpot_ms == pytest.approx(predicted.tpot_ms, rel=0.01)


def test_twins_behind_the_gateway_take_the_time_of_the_simulated_fleet() -> None:
    plan = TwinFleetPlan(twin=TWIN, count=3)
    requests = waves(40.0, 1.0, 1.0, 2000, 8)
    outcomes, fleet = rehearse(plan, requests)
    simulated = list(simulate_same(plan, requests).requests)
    assert not [outcome.error for outcome in outcomes if outcome.error]
    assert mean_ttft_s(outcomes) == pytest.approx(mean_ttft_s(simulated), rel=0.05)
    assert goodput(outcomes, SLO, 40.0) == pytest.approx(goodput(simulated, SLO, 40.0), rel=0.1)
    assert fleet.metric("ridgeline_fleet_requests_total") == len(requests)


@pytest.mark.slow
def test_killed_and_scaled_twins_keep_the_goodput_of_the_simulated_fleet() -> None:
    plan = TwinFleetPlan(
        twin=TWIN,
        count=2,
        scaling=Autoscaling(
            target=2, min_replicas=2, max_replicas=6, interval_s=5, startup_s=20, stable_s=20
        ),
        faults=FaultModel(mtbf_s=100.0, repair_s=20.0),
        seed=1,
    )
    requests = waves(300.0, 0.5, 3.0, 3000, 16)
    outcomes, fleet = rehearse(plan, requests)
    simulated = simulate_same(plan, requests)
    assert fleet.num_killed > 0 and fleet.metric("ridgeline_fleet_resumed_total") > 0
    assert len(fleet.places) > 2 and len(simulated.replicas) > 2
    assert not [outcome.error for outcome in outcomes if outcome.error]
    assert not any(math.isnan(outcome.finished_s) for outcome in outcomes)
    measured = goodput(outcomes, SLO, 300.0)
    assert measured == pytest.approx(goodput(simulated.requests, SLO, 300.0), rel=0.15)
    # both have the same failures: without that, one is up to twice as slow as the other
    assert mean_ttft_s(outcomes) == pytest.approx(mean_ttft_s(list(simulated.requests)), rel=0.15)
