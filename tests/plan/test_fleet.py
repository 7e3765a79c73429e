"""The fleet: fast_forward, queueing theory, conservation, routing, faults, scaling."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ridgeline.engine.scheduler.admission.limits import SchedulerLimits
from ridgeline.engine.scheduler.batching import make_policy
from ridgeline.engine.scheduler.kv.block_pool import BlockPool
from ridgeline.engine.scheduler.kv.prefix_cache import NoPrefixCache, PrefixCache
from ridgeline.engine.scheduler.scheduler import Scheduler
from ridgeline.errors import BadInput
from ridgeline.hardware.catalogue import find_accelerator
from ridgeline.modelspec.checkpoints.planning import load_planning_spec
from ridgeline.plan.simulate.fleet import simulate_fleet
from ridgeline.plan.simulate.records import (
    Autoscaling,
    FaultModel,
    FleetConfig,
    FleetOutcome,
    ReplicaConfig,
    SimulatedRequest,
)
from ridgeline.plan.simulate.replica import SimulatedReplica
from ridgeline.plan.step_time.replica import build_replica
from ridgeline.plan.step_time.simulated import LinearSteps, ModelledStepTimes, StepTimes
from ridgeline.records import Request, Sampling
from ridgeline.routing import make_router
from ridgeline.routing.base import FleetLoad
from tests.plan.constant_step_times import ConstantStepTimes

MODEL = ModelledStepTimes(
    build_replica(load_planning_spec("llama-3.1-8b"), find_accelerator("h100-sxm"))
)


def make(
    slots: int = 8,
    blocks: int = 400,
    *,
    budget: int = 64,
    cache: bool = False,
    policy: str = "continuous",
    chunked: bool = True,
) -> Callable[[], Scheduler]:
    def build() -> Scheduler:
        pool = BlockPool(blocks, 4)
        limits = SchedulerLimits(
            max_num_seqs=slots,
            max_num_batched_tokens=budget,
            max_model_len=200,
            chunked_prefill=chunked,
        )
        prefix_cache = PrefixCache(pool) if cache else NoPrefixCache()
        return Scheduler(limits, make_policy(policy, wait_s=0.01), pool, prefix_cache)

    return build


def fleet(
    scheduler: Callable[[], Scheduler], step_times: StepTimes, count: int = 1, **more: object
) -> FleetConfig:
    replicas = (ReplicaConfig(name="test", scheduler=scheduler, step_times=step_times),) * count
    return FleetConfig(**{"replicas": replicas, "check": conserved, **more})  # type: ignore[arg-type]


def conserved(scheduler: Scheduler) -> None:
    """Blocks: owned ones are exactly those in tables. Tokens: never more computed than known."""
    running = scheduler.running
    tables = {block for seq in running for block in seq.all_blocks}
    assert scheduler.pool.num_owned == len(tables)
    assert scheduler.pool.num_owned + scheduler.pool.num_idle == scheduler.pool.num_blocks
    for seq in running:
        assert 0 <= seq.num_computed <= seq.num_known
        assert len(seq.blocks) >= scheduler.pool.num_blocks_for(seq.num_computed)


def outcomes(outcome: FleetOutcome) -> list[tuple[object, ...]]:
    return [
        (
            result.replica,
            result.cached,
            result.num_preempted,
            result.num_restarts,
            result.error,
        )
        for result in outcome.requests
    ]


def instants(outcome: FleetOutcome) -> np.ndarray:
    return np.array(
        [(result.started_s, result.first_s, result.finished_s) for result in outcome.requests]
    )


requests_of = st.lists(
    st.tuples(
        st.floats(0, 0.2),
        st.integers(1, 60),
        st.integers(1, 40),
        st.lists(st.integers(0, 2), max_size=4),
        st.integers(0, 1),
    ),
    min_size=1,
    max_size=14,
)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
# the duration of a step with a background request was learnt from a later fast-forwarded step
@example(
    asked=[
        *[(0.0, 1, 1, [], 0)] * 4,
        (0.0, 2, 2, [], 1),
        (0.13671875, 1, 2, [], 0),
        (0.140625, 1, 1, [], 1),
    ],
    slots=2, blocks=26, budget=4, cache=False, policy="continuous", count=1, steady=False,
)  # fmt: skip
@given(
    asked=requests_of,
    slots=st.integers(1, 6),
    blocks=st.integers(26, 60),
    budget=st.sampled_from([4, 16, 64]),
    cache=st.booleans(),
    policy=st.sampled_from(["continuous", "continuous", "static", "dynamic"]),
    count=st.integers(1, 2),
    steady=st.booleans(),
)
def test_fast_forward_equals_single_steps(
    asked: list[tuple[float, int, int, list[int], int]],
    slots: int,
    blocks: int,
    budget: int,
    cache: bool,
    policy: str,
    count: int,
    steady: bool,
) -> None:
    requests = [
        SimulatedRequest(
            at_s=at,
            num_prompt=prompt,
            num_output=out,
            prefix=tuple(ids),
            prefix_block=8,
            background=bool(p),
        )
        for at, prompt, out, ids, p in sorted(asked)
    ]
    scheduler = make(slots, blocks, budget=budget, cache=cache, policy=policy)
    # An arrival just at the end of a step is a tie, decided by rounding: here there are none.
    step_times: StepTimes = ConstantStepTimes(math.pi / 1000) if steady else MODEL
    fast, slow = (
        simulate_fleet(requests, fleet(scheduler, step_times, count, fast_forward=fast_forward))
        for fast_forward in (True, False)
    )
    assert outcomes(fast) == outcomes(slow)
    assert np.allclose(instants(fast), instants(slow), rtol=1e-9, atol=1e-12)
    assert fast.num_steps == slow.num_steps and fast.num_events <= slow.num_events
    assert all(not result.error for result in fast.requests)  # no request starves


def test_fast_forward_leaves_the_same_scheduler_state() -> None:
    """Not only the outcomes: block tables, cache entries and the order of idle blocks agree."""

    def after(fast_forward: bool) -> Scheduler:
        replica = SimulatedReplica(
            make(cache=True, blocks=60)(), ConstantStepTimes(1.0), fast_forward=fast_forward
        )
        for i in range(3):
            sampling = Sampling(temperature=0.0, max_tokens=30 + i, ignore_eos=True)
            prompt = (7,) * (5 + 3 * i)
            replica.add(Request(id=str(i), prompt=prompt, sampling=sampling, arrival_s=0.0), 0.0)
        now_s = 0.0
        while now_s < 31.0:
            now_s = replica.wake_s
            replica.advance(now_s)
        return replica.scheduler

    fast, slow = after(True), after(False)
    assert fast.pool.idle_blocks() == slow.pool.idle_blocks()
    assert [s.blocks for s in fast.running] == [s.blocks for s in slow.running]
    assert [s.tokens for s in fast.running] == [s.tokens for s in slow.running]
    assert vars(fast.cache)["_block_of"] == vars(slow.cache)["_block_of"]
    assert fast.totals == slow.totals


@example(0.875, 2.2200959279452888e-18, 15, 0.0)  # a growth that rounding swallows
@given(st.floats(1e-4, 1), st.floats(0, 1e-3), st.integers(1, 500), st.floats(-0.4, 0.4))
def test_linear_steps_sum_and_inversion(
    first_s: float, more_s: float, steps: int, off: float
) -> None:
    linear = LinearSteps(first_s, more_s)
    summed = sum(first_s + j * more_s for j in range(steps))
    assert linear.seconds(steps) == pytest.approx(summed)
    inside = linear.seconds(steps - 1) + (0.5 + off) * (first_s + (steps - 1) * more_s)
    assert linear.steps_until(inside) == steps


def test_modelled_linear_steps_equal_single_steps() -> None:
    computed = [100, 5000, 37]
    linear = MODEL.linear_steps(computed, 50)
    assert linear is not None
    one_by_one = [MODEL.step_s([(1, c + j) for c in computed], 3) for j in range(50)]
    assert linear.seconds(50) == pytest.approx(sum(one_by_one), rel=1e-9)


def poisson(rate: float, count: int, seed: int) -> np.ndarray:
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count))


def lindley(at_s: np.ndarray, service_s: float) -> np.ndarray:
    """Waits in a queue of one server, by the recursion w' = max(0, w + s - gap)."""
    drift = np.concatenate([[0.0], np.cumsum(service_s - np.diff(at_s))])
    return drift - np.minimum.accumulate(drift)


@pytest.mark.slow
@pytest.mark.parametrize("rho", [0.5, 0.8])
def test_one_slot_and_one_token_form_an_m_d_1_queue(rho: float) -> None:
    service_s = 0.01
    at_s = poisson(rho / service_s, 3000, 1)
    outcome = simulate_fleet(
        [SimulatedRequest(at_s=float(t), num_prompt=4, num_output=1) for t in at_s],
        fleet(make(slots=1), ConstantStepTimes(service_s)),
    )
    waits = np.array([result.started_s - result.request.at_s for result in outcome.requests])
    assert np.allclose(waits, lindley(at_s, service_s), atol=1e-9)
    long_run = lindley(poisson(rho / service_s, 4_000_000, 2), service_s).mean()
    theory = rho * service_s / (2 * (1 - rho))
    assert long_run == pytest.approx(theory, rel=0.02)


def kiefer_wolfowitz(at_s: Sequence[float], service_s: Sequence[float], servers: int) -> np.ndarray:
    free, waits = [0.0] * servers, []
    for at, service in zip(at_s, service_s, strict=True):
        begins = max(at, heapq.heappop(free))
        waits.append(begins - at)
        heapq.heappush(free, begins + service)
    return np.array(waits)


def erlang_c_wait(rate: float, mu: float, servers: int) -> float:
    a = rate / mu
    terms = [a**n / math.factorial(n) for n in range(servers)]
    last = a**servers / math.factorial(servers) * servers / (servers - a)
    return last / (sum(terms) + last) / (servers * mu - rate)


@pytest.mark.slow
def test_slots_sharing_steps_form_an_m_m_c_queue() -> None:
    """Answers of exponential length at 1 ms per token: c servers, up to the step that all share."""
    slots, step_s, mean = 4, 1e-3, 60
    rate = 0.8 * slots / (mean * step_s)
    rng = np.random.default_rng(5)
    at_s = poisson(rate, 4000, 3)
    tokens = np.maximum(1, np.ceil(rng.exponential(mean, 4000)).astype(int))
    limits = SchedulerLimits(max_num_seqs=slots, max_num_batched_tokens=10_000, max_model_len=4000)

    def build() -> Scheduler:
        pool = BlockPool(4000, 4)
        return Scheduler(limits, make_policy("continuous"), pool, NoPrefixCache())

    outcome = simulate_fleet(
        [
            SimulatedRequest(at_s=float(t), num_prompt=1, num_output=int(n))
            for t, n in zip(at_s, tokens, strict=True)
        ],
        fleet(build, ConstantStepTimes(step_s)),
    )
    waits = np.array([result.started_s - result.request.at_s for result in outcome.requests])
    ideal = kiefer_wolfowitz(at_s.tolist(), (tokens * step_s).tolist(), slots)
    assert waits.mean() == pytest.approx(ideal.mean(), abs=1.5 * step_s)
    many = 400_000
    long_run = kiefer_wolfowitz(
        poisson(rate, many, 8).tolist(), rng.exponential(mean * step_s, many).tolist(), slots
    ).mean()
    assert long_run == pytest.approx(erlang_c_wait(rate, 1 / (mean * step_s), slots), rel=0.02)


def load(count: int, rate: float = 50.0, seed: int = 0, **more: object) -> list[SimulatedRequest]:
    rng = np.random.default_rng(seed)
    at_s = poisson(rate, count, seed)
    return [
        SimulatedRequest(
            at_s=float(t),
            num_prompt=int(rng.integers(5, 60)),
            num_output=int(rng.integers(1, 60)),
            **more,  # type: ignore[arg-type]
        )
        for t in at_s
    ]


@pytest.mark.slow
def test_littles_law() -> None:
    outcome = simulate_fleet(load(2000), fleet(make(), ConstantStepTimes(0.005), 3))
    spent_s = sum(result.finished_s - result.request.at_s for result in outcome.requests)
    assert outcome.area == pytest.approx(spent_s, rel=1e-9)


@pytest.mark.parametrize(
    "router", ["round-robin", "least-loaded", "power-of-two", "prefix-aware", "session", "ttft"]
)
def test_every_router_serves_all_requests_deterministically(router: str) -> None:
    requests = load(300)
    plan = fleet(make(cache=True), ConstantStepTimes(0.005), 4, router=router, seed=3)
    first, again = simulate_fleet(requests, plan), simulate_fleet(requests, plan)
    assert outcomes(first) == outcomes(again)
    assert np.array_equal(instants(first), instants(again))
    assert all(not result.error for result in first.requests)


def in_flight(*numbers: int) -> FleetLoad:
    load = FleetLoad()
    for number in numbers:
        load.in_flight[load.add_replica()] = number
    return load


def test_router_choices() -> None:
    request = SimulatedRequest(at_s=0, num_prompt=9, num_output=1, prefix=(5, 6), session="anna")
    load = in_flight(3, 0, 2)
    round_robin = make_router("round-robin")
    assert [round_robin.choose(request, [0, 1, 2], load) for _ in range(4)] == [0, 1, 2, 0]
    assert make_router("least-loaded").choose(request, [0, 2], load) == 2
    aware = make_router("prefix-aware")
    assert aware.choose(request, [0, 1, 2], load) == 1
    assert aware.choose(request, [0, 1, 2], in_flight(0, 9, 0)) == 1  # its prefix is there
    assert aware.choose(request, [0, 1, 2], in_flight(0, 90, 0)) == 0  # but it is far too busy
    sticky = make_router("session", 1)
    home = sticky.choose(request, [0, 1, 2], load)
    assert all(sticky.choose(request, [0, 1, 2], in_flight(9, 9, 9)) == home for _ in range(3))
    others = [r for r in (0, 1, 2) if r != home]
    moved = next(r for r in others)
    assert sticky.choose(request, [r for r in (0, 1, 2) if r != moved], load) == home
    with pytest.raises(BadInput, match="round-robin"):
        make_router("best")


def test_prefix_aware_routing_has_more_hits() -> None:
    rng = np.random.default_rng(0)
    requests = [
        SimulatedRequest(
            at_s=0.01 * i,
            num_prompt=50,
            num_output=4,
            prefix=(int(rng.integers(0, 12)),),
            prefix_block=40,
        )
        for i in range(400)
    ]
    hits = {}
    for router in ("round-robin", "prefix-aware"):
        plan = fleet(make(cache=True, blocks=60), ConstantStepTimes(0.002), 4, router=router)
        hits[router] = sum(result.cached for result in simulate_fleet(requests, plan).requests)
    assert hits["prefix-aware"] > 1.3 * hits["round-robin"]


def test_requests_of_a_failed_replica_restart_elsewhere() -> None:
    plan = fleet(
        make(), ConstantStepTimes(0.005), 3, faults=FaultModel(mtbf_s=2.0, repair_s=0.5), seed=4
    )
    outcome = simulate_fleet(load(500), plan)
    assert sum(result.num_restarts for result in outcome.requests) > 5
    assert all(not result.error for result in outcome.requests)
    calm = simulate_fleet(load(500), fleet(make(), ConstantStepTimes(0.005), 3))
    assert outcome.area > calm.area


def test_autoscaling_follows_the_load() -> None:
    quiet = [SimulatedRequest(at_s=30.0 + i, num_prompt=5, num_output=2) for i in range(30)]
    plan = fleet(
        make(),
        ConstantStepTimes(0.02),
        1,
        scaling=Autoscaling(target=6, max_replicas=5, interval_s=0.5, startup_s=1.0),
    )
    outcome = simulate_fleet([*load(600, rate=60), *quiet], plan)
    sizes = [count for _, count in outcome.num_replicas]
    assert max(sizes) == 5 and outcome.num_replicas[-1][1] == 1
    assert all(not result.error for result in outcome.requests)
    first_new = next(at for at, count in outcome.num_replicas if count == 2)
    assert first_new >= 1.5  # an interval and the start-up


def test_disaggregated_pools_transfer_the_cache() -> None:
    build = ReplicaConfig(
        name="test", scheduler=make(cache=True), step_times=ConstantStepTimes(0.005)
    )
    plan = FleetConfig(
        replicas=(build,) * 2,
        decode=(build,) * 2,
        transfer_s=lambda tokens: 1e-4 * tokens,
        check=conserved,
    )
    outcome = simulate_fleet(load(200, rate=20), plan)
    assert all(not result.error for result in outcome.requests)
    decode_steps = sum(m.num_steps for m in outcome.replicas if m.pool == 1)
    assert decode_steps > 0
    one = simulate_fleet([SimulatedRequest(at_s=0, num_prompt=41, num_output=3)], plan).requests[0]
    assert one.first_s == pytest.approx(0.005)
    assert one.finished_s == pytest.approx(0.005 + 41e-4 + 2 * 0.005)  # the prompt was not computed


def test_background_requests_wait_for_interactive_ones() -> None:
    rng = np.random.default_rng(1)
    both = [
        SimulatedRequest(
            at_s=0.002 * i, num_prompt=20, num_output=10, background=bool(rng.integers(0, 2))
        )
        for i in range(300)
    ]
    outcome = simulate_fleet(both, fleet(make(slots=4), ConstantStepTimes(0.002)))
    waits = {
        p: np.mean(
            [
                result.started_s - result.request.at_s
                for result in outcome.requests
                if result.request.background == p
            ]
        )
        for p in (False, True)
    }
    assert waits[False] < waits[True]


def test_empty_fleet_and_oversized_request_are_rejected() -> None:
    with pytest.raises(BadInput):
        simulate_fleet([], FleetConfig(replicas=()))
    with pytest.raises(BadInput, match="too long"):
        simulate_fleet(
            [SimulatedRequest(at_s=0, num_prompt=500, num_output=1)],
            fleet(make(), ConstantStepTimes(0.01)),
        )


def test_simulation_ends_at_end_s() -> None:
    outcome = simulate_fleet(load(200), fleet(make(slots=1), ConstantStepTimes(0.05)), end_s=2.0)
    assert outcome.duration_s <= 2.0
    assert any(result.error for result in outcome.requests)
    assert all(result.request.at_s < 2.0 for result in outcome.requests)
