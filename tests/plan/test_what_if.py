"""Sweeps, off-peak windows, speculation and counted blocks: each against the plain way."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from ridgeline.cli.main import main
from ridgeline.engine.scheduler import (
    BlockPool,
    NoPrefixCache,
    Scheduler,
    SchedulerLimits,
    make_policy,
)
from ridgeline.errors import BadInput, CannotRun
from ridgeline.hardware.catalogue import find_accelerator
from ridgeline.modelspec.checkpoints.planning import load_planning_spec
from ridgeline.plan.fleet.demand import demand_of
from ridgeline.plan.simulate.block_counter import CountingBlockPool
from ridgeline.plan.simulate.fleet import simulate_fleet
from ridgeline.plan.simulate.off_peak import OffPeak
from ridgeline.plan.simulate.records import FleetConfig, ReplicaConfig, SimulatedRequest
from ridgeline.plan.step_time.operating_point import OperatingPoint
from ridgeline.plan.step_time.predict import predict_on
from ridgeline.plan.step_time.replica import Replica, build_replica
from ridgeline.plan.step_time.simulated import ModelledStepTimes
from ridgeline.plan.step_time.speculation import SpeculationModel
from tests.plan.constant_step_times import ConstantStepTimes

WORDS = [
    "simulate",
    "llama-3.1-8b",
    "--accelerator",
    "h100-sxm",
    "--num-prompts",
    "40",
    "--request-rate",
    "8",
]


def machine(model: str = "llama-3.1-8b") -> Replica:
    return build_replica(load_planning_spec(model), find_accelerator("h100-sxm"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_block_counter_gives_the_same_schedule_as_block_tables(seed: int) -> None:
    rng = np.random.default_rng(seed)
    at_s = np.cumsum(rng.exponential(0.05, 150))
    requests = [
        SimulatedRequest(at_s=float(at), num_prompt=int(p), num_output=int(n))
        for at, p, n in zip(at_s, rng.integers(1, 300, 150), rng.integers(1, 200, 150), strict=True)
    ]
    limits = SchedulerLimits(max_num_seqs=24, max_num_batched_tokens=128, max_model_len=600)

    def served(pool: type[BlockPool]) -> list[tuple[float, float, int]]:
        def make() -> Scheduler:
            return Scheduler(limits, make_policy("continuous"), pool(90, 16), NoPrefixCache())

        build = ReplicaConfig(name="x", scheduler=make, step_times=ConstantStepTimes(0.01))
        lives = simulate_fleet(requests, FleetConfig(replicas=(build,))).requests
        return [(life.first_s, life.finished_s, life.num_preempted) for life in lives]

    found = served(CountingBlockPool)
    assert found == served(BlockPool) and sum(preempted for *_, preempted in found) > 0


def test_block_counter_rejects_block_identities() -> None:
    pool = CountingBlockPool(4, 16)
    for what in (pool.retain, pool.publish):
        with pytest.raises(CannotRun):
            what(0)


def test_off_peak_windows() -> None:
    night = OffPeak.parse("22:00-06:00@18:30")
    assert night.opens_s(0.0) == 3.5 * 3600 and night.opens_s(4 * 3600.0) == 4 * 3600.0
    assert night.opens_s(11.5 * 3600 - 1) == 11.5 * 3600 - 1  # 05:59:59
    assert night.opens_s(11.5 * 3600) == 27.5 * 3600  # 06:00: the next night
    assert OffPeak.parse("01:00-05:00").opens_s(0.0) == 3600.0
    for bad in ("night", "22:00-22:00", "25:00-26:00", "01:00-00:99"):
        with pytest.raises(BadInput):
            OffPeak.parse(bad)


def test_batch_requests_wait_for_their_window(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*WORDS, "--batch-share", "0.5", "--json"]
    assert main(words) == 0
    soon = json.loads(capsys.readouterr().out)
    assert main([*words, "--off-peak", "01:00-02:00"]) == 0
    later = json.loads(capsys.readouterr().out)
    assert soon["num_served"] == later["num_served"] == 40
    assert soon["duration_s"] < 1000 and later["duration_s"] > 3600
    assert soon["batch"]["num_requests"] == later["batch"]["num_served"] > 10
    assert later["batch"]["e2e"]["p99"] < 100  # from when its window opened
    assert main([*WORDS, "--off-peak", "01:00-02:00"]) == 2


@pytest.mark.slow
def test_background_requests_have_no_slo_and_do_not_delay_interactive_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With background requests, interactive latencies are nearly those of a fleet without them; the
    same number of interactive requests misses the SLO."""
    rate = [
        "--input-len",
        "500",
        "--output-len",
        "60",
        "--max-num-seqs",
        "16",
        "--num-prompts",
        "600",
        "--request-rate",
    ]
    asked = ["simulate", "llama-3.1-8b", "--accelerator", "h100-sxm", "--slo", "ttft:60", "--json"]

    def ran(*words: str) -> Any:
        assert main([*asked, *rate, *words]) == 0
        return json.loads(capsys.readouterr().out)

    alone, mixed, all_online = ran("20"), ran("40", "--batch-share", "0.5"), ran("40")
    assert alone["batch"] is None and all_online["batch"] is None
    assert mixed["batch"]["num_requests"] == pytest.approx(300, rel=0.15)
    assert mixed["ttft"]["p50"] < 1.35 * alone["ttft"]["p50"]
    assert mixed["attainment"] > all_online["attainment"] + 0.05
    assert mixed["batch"]["e2e"]["p50"] > mixed["e2e"]["p50"]


@pytest.mark.slow
def test_sweep_equals_separate_simulations(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--sweep", "replicas=1,2", "--sweep", "max-num-seqs=4,64"]
    assert main([*WORDS, "--slo", "ttft:500 tpot:30", *asked, "--json"]) == 0
    cases = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [case["changes"] for case in cases] == [
        {"replicas": n, "max_num_seqs": m} for n in (1, 2) for m in (4, 64)
    ]
    alone = [*WORDS, "--slo", "ttft:500 tpot:30", "--replicas", "2", "--max-num-seqs", "4"]
    assert main([*alone, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == cases[2]["summary"]


@pytest.mark.parametrize(
    "axis", ["replicas", "replicas=two", "nothing=1", "html=a,b", "rate=nan,1", "rate=inf"]
)
def test_sweep_over_an_unknown_setting_is_rejected(
    axis: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*WORDS, "--sweep", axis]) == 2
    assert "--sweep" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--seed", "-1"], ["--sweep", "rate=1", "--num-workers", "0"]])
def test_malformed_numbers_are_rejected(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*WORDS, *flags]) == 2
    assert flags[-2] in capsys.readouterr().err


@pytest.mark.parametrize("cached", [math.nan, -0.5, 1.5])
def test_cached_share_must_be_between_0_and_1(cached: float) -> None:
    with pytest.raises(BadInput, match="cached"):
        demand_of([(100, 10)], 1.0, cached)


def test_expected_tokens_per_speculative_step() -> None:
    drafts = SpeculationModel(num_tokens=4, acceptance=0.8)
    assert drafts.tokens_per_step == pytest.approx((1 - 0.8**5) / (1 - 0.8))
    assert SpeculationModel(num_tokens=4, acceptance=1.0).tokens_per_step == 5
    for bad in ({"num_tokens": 0, "acceptance": 0.5}, {"num_tokens": 2, "acceptance": 1.5}):
        with pytest.raises(BadInput):
            SpeculationModel(**bad)  # type: ignore[arg-type]


def test_speculation_pays_for_small_batches_only() -> None:
    here = machine()

    def tpot(batch: int, **drafts: object) -> float:
        fields = {"model": "", "device": "", "isl": 500, "osl": 100, "batch": batch, **drafts}
        return predict_on(here, OperatingPoint(**fields)).decode_ms  # type: ignore[arg-type]

    likely = {"num_speculative_tokens": 4, "acceptance": 0.7}
    assert tpot(1, **likely) < 0.45 * tpot(1)
    assert tpot(1, **likely, draft_model="llama-3.2-1b") > tpot(1, **likely)
    unlikely = {"num_speculative_tokens": 4, "acceptance": 0.1}
    assert tpot(200, **unlikely) > tpot(200)
    for half in ({"acceptance": 0.5}, {"num_speculative_tokens": 3}):
        with pytest.raises(BadInput):
            tpot(1, **half)


def test_simulated_drafts_cost_what_predictions_say() -> None:
    drafts = SpeculationModel(num_tokens=3, acceptance=0.6)
    step_times, here = ModelledStepTimes(machine(), drafts), machine()
    computed = [700, 900, 800]
    glide = step_times.linear_steps(computed, 10)
    assert glide is not None
    expected_s = drafts.decode_s(here, 3, 800)
    assert glide.first_s == pytest.approx(expected_s, rel=1e-3)
    assert step_times.step_s([(1, n) for n in computed], 3) == pytest.approx(expected_s, rel=1e-3)
    assert math.isclose(
        step_times.step_s([(512, 0)], 1), ModelledStepTimes(here).step_s([(512, 0)], 1)
    )
