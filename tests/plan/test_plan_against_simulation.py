"""`plan` against `simulate`: a load that the search considers feasible is so under the scheduler.

The highest rate that `search` finds for a replica must meet the SLO under the engine's scheduler
with the planned slots and token budget; a rate well beyond it must miss the SLO, or the plan would
buy too many devices.
"""

from __future__ import annotations

import numpy as np
import pytest

from ridgeline.engine.scheduler import NoPrefixCache, Scheduler, SchedulerLimits, make_policy
from ridgeline.hardware.catalogue import load_catalogue
from ridgeline.modelspec.checkpoints.planning import load_planning_spec
from ridgeline.plan.fleet.demand import Demand
from ridgeline.plan.fleet.search import Candidate, SearchSpace, search
from ridgeline.plan.simulate.block_counter import CountingBlockPool
from ridgeline.plan.simulate.fleet import simulate_fleet
from ridgeline.plan.simulate.records import FleetConfig, ReplicaConfig, SimulatedRequest
from ridgeline.plan.simulate.summary import FleetSummary, summarise
from ridgeline.plan.step_time.memory import BLOCK_SIZE
from ridgeline.plan.step_time.parallel_layout import Layout
from ridgeline.plan.step_time.replica import build_replica
from ridgeline.plan.step_time.simulated import ModelledStepTimes
from ridgeline.records import Slo

CATALOGUE = load_catalogue()
MODEL, DEVICE = "llama-3.1-8b", "h100-sxm"
NUM_REQUESTS = 1500
SPARED = 0.95  # of the planned rate: how exact the arithmetic is, where a queue is about to form
OVERLOAD = 1.5  # times the planned rate, at which the SLO must be missed


def best_of_one(isl: int, osl: int, slo: Slo, tokens: int) -> Candidate:
    """The candidate with the highest rate of those that hold."""
    demand = Demand(rate=1e6, isl=isl, osl=osl, isl_p95=isl, longest=isl + osl)
    space = SearchSpace(
        devices=(DEVICE,),
        weight_dtypes=("bfloat16",),
        kv_dtypes=("bfloat16",),
        token_budgets=(tokens,),
        max_devices_per_replica=1,
    )
    found = search(load_planning_spec(MODEL), demand, slo, space, CATALOGUE)
    return max(found.fleets, key=lambda candidate: candidate.rate)


def attained(planned: Candidate, isl: int, osl: int, slo: Slo, rate: float) -> float:
    """Share of the requests that met the SLO, without the first tenth as warm-up."""
    found = simulated(planned, isl, osl, slo, rate)
    assert found.attainment is not None
    return found.attainment


def simulated(
    planned: Candidate, isl: int, osl: int, slo: Slo, rate: float, num_requests: int = NUM_REQUESTS
) -> FleetSummary:
    """The planned replica under Poisson arrivals."""
    machine = build_replica(load_planning_spec(MODEL), CATALOGUE[DEVICE], Layout())
    limits = SchedulerLimits(
        max_num_seqs=planned.max_num_seqs,
        max_num_batched_tokens=planned.max_num_batched_tokens,
        max_model_len=isl + osl,
    )

    def scheduler() -> Scheduler:
        pool = CountingBlockPool(planned.kv_tokens // BLOCK_SIZE, BLOCK_SIZE)
        return Scheduler(limits, make_policy("continuous"), pool, NoPrefixCache())

    gaps = np.random.default_rng(7).exponential(1 / rate, num_requests)
    requests = [
        SimulatedRequest(at_s=float(at), num_prompt=isl, num_output=osl) for at in np.cumsum(gaps)
    ]
    build = ReplicaConfig(
        name=DEVICE,
        scheduler=scheduler,
        step_times=ModelledStepTimes(machine),
        overhead_s=machine.efficiency.first_s,
    )
    return summarise(simulate_fleet(requests, FleetConfig(replicas=(build,))), slo)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [2048, 8192])
@pytest.mark.parametrize(
    ("isl", "osl", "limits"),
    [
        (1024, 1, "ttft:200"),
        (1024, 2, "ttft:300 tpot:200"),
        (1024, 4, "ttft:400 tpot:100"),
        (1024, 16, "ttft:200 tpot:200"),
        (1024, 16, "ttft:250 tpot:50"),
        (1024, 64, "ttft:300 tpot:50"),
        (1024, 256, "ttft:500 tpot:20"),
        (1024, 256, "e2e:6000"),
        (4000, 16, "ttft:1000 tpot:200"),
        (4000, 128, "ttft:1000 tpot:50"),
        (128, 16, "ttft:100 tpot:20"),
        (128, 128, "ttft:100 tpot:12"),
    ],
)
def test_planned_rate_meets_the_slo_and_overload_misses_it(
    isl: int, osl: int, limits: str, tokens: int
) -> None:
    slo = Slo.parse(limits)
    planned = best_of_one(isl, osl, slo, tokens)
    assert planned.holds
    assert attained(planned, isl, osl, slo, SPARED * planned.rate) >= slo.attainment
    assert attained(planned, isl, osl, slo, OVERLOAD * planned.rate) < slo.attainment


@pytest.mark.slow
@pytest.mark.parametrize("rate", [4.0, 10.0])
def test_planned_percentiles_are_those_of_the_simulated_load(rate: float) -> None:
    """Not those of the replica's full rate, which may be far above that load."""
    slo = Slo.parse("ttft:1000 tpot:50")
    demand = Demand(rate=rate, isl=2000, osl=300, isl_p95=2000, longest=2300)
    space = SearchSpace(
        devices=(DEVICE,),
        weight_dtypes=("bfloat16",),
        kv_dtypes=("bfloat16",),
        max_devices_per_replica=1,
    )
    fleet = search(load_planning_spec(MODEL), demand, slo, space, CATALOGUE).fleets[0]
    assert fleet.num_replicas == 1
    found = simulated(fleet, 2000, 300, slo, rate)
    assert found.ttft is not None and found.tpot is not None
    assert fleet.ttft_s == pytest.approx(found.ttft.p95, rel=0.25)
    assert fleet.tpot_s == pytest.approx(found.tpot.p95, rel=0.25)


@pytest.mark.slow
def test_prompts_that_share_a_step_wait_for_each_other_in_both() -> None:
    """Four prompts fit a step of 8,192 tokens: a queue of single prompts would end 11 % earlier."""
    slo = Slo.parse("ttft:1000 tpot:50")
    demand = Demand(rate=10.0, isl=2000, osl=300, isl_p95=2000, longest=2300)
    space = SearchSpace(
        devices=(DEVICE,),
        weight_dtypes=("bfloat16",),
        kv_dtypes=("bfloat16",),
        token_budgets=(8192,),
        max_devices_per_replica=1,
    )
    fleet = search(load_planning_spec(MODEL), demand, slo, space, CATALOGUE).fleets[0]
    found = simulated(fleet, 2000, 300, slo, 10.0, num_requests=8000)
    assert found.ttft is not None and found.tpot is not None
    assert fleet.ttft_s == pytest.approx(found.ttft.p95, rel=0.05)
    assert fleet.tpot_s == pytest.approx(found.tpot.p95, rel=0.04)


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "tokens"), [(4.0, 8192), (10.0, 2048)])
def test_tpot_spreads_with_prompts_and_requests_in_flight_together(
    rate: float, tokens: int
) -> None:
    """As independent spreads they gave a TPOT that was up to 8 % low."""
    slo = Slo.parse("ttft:1000 tpot:50")
    demand = Demand(rate=rate, isl=2000, osl=300, isl_p95=2000, longest=2300)
    space = SearchSpace(
        devices=(DEVICE,),
        weight_dtypes=("bfloat16",),
        kv_dtypes=("bfloat16",),
        token_budgets=(tokens,),
        max_devices_per_replica=1,
    )
    fleet = search(load_planning_spec(MODEL), demand, slo, space, CATALOGUE).fleets[0]
    found = simulated(fleet, 2000, 300, slo, rate, num_requests=2500)
    assert found.tpot is not None
    assert fleet.tpot_s == pytest.approx(found.tpot.p95, rel=0.05)
