"""`plan`: search, errors, the verdict on disaggregation, and the command."""

from __future__ import annotations

import json
import math
from importlib.resources import files
from pathlib import Path

import pytest
from msgspec.structs import replace as with_

from ridgeline.cli.main import main
from ridgeline.errors import BadInput, CannotRun
from ridgeline.hardware.catalogue import load_catalogue
from ridgeline.modelspec.checkpoints.planning import load_planning_spec
from ridgeline.plan.fleet.demand import Demand, demand_of, wait_quantile
from ridgeline.plan.fleet.disaggregate import judge_disaggregation, smallest_pools, transfer_seconds
from ridgeline.plan.fleet.infeasible import explain_infeasible
from ridgeline.plan.fleet.pareto_plot import draw_front
from ridgeline.plan.fleet.search import (
    SearchResult,
    SearchSpace,
    enumerate_layouts,
    other_layouts,
    pareto_front,
    search,
)
from ridgeline.plan.step_time.parallel_layout import Layout
from ridgeline.plan.step_time.replica import build_replica
from ridgeline.records import Slo

CATALOGUE = load_catalogue()
SLO = Slo.parse("ttft:1000 tpot:50")
DEMAND = Demand(rate=20, isl=1024, osl=256, isl_p95=1500, longest=2048)
SPACE = SearchSpace(
    devices=("h100-sxm", "h200-sxm"), token_budgets=(2048,), max_devices_per_replica=8
)


def found(model: str = "llama-3.1-70b", slo: Slo = SLO, space: SearchSpace = SPACE) -> SearchResult:
    return search(load_planning_spec(model), DEMAND, slo, space, CATALOGUE)


@pytest.mark.slow
def test_fleets_meet_the_slo_and_are_sorted_by_price() -> None:
    result = found()
    prices = [candidate.dollars_per_hour for candidate in result.fleets]
    assert len(prices) > 4 and None not in prices
    assert prices == sorted(prices)  # type: ignore[type-var]
    for candidate in result.fleets:
        assert candidate.holds and candidate.ttft_s <= 1 and candidate.tpot_s <= 0.05
        assert candidate.num_replicas == math.ceil(DEMAND.rate / candidate.rate)
        assert candidate.num_devices == candidate.num_replicas * candidate.layout.num_devices
        assert candidate.kv_tokens >= candidate.max_num_seqs * (DEMAND.isl + DEMAND.osl)
        low, high = candidate.tpot_interval_s
        assert low < candidate.tpot_s < high


@pytest.mark.slow
def test_input_and_output_prices_add_up_to_the_fleet_price() -> None:
    best = found().fleets[0]
    assert best.input_dollars_per_mtok and best.output_dollars_per_mtok and best.dollars_per_hour
    paid = best.input_dollars_per_mtok * DEMAND.rate * DEMAND.isl
    paid += best.output_dollars_per_mtok * DEMAND.rate * DEMAND.osl
    assert paid * 3600 / 1e6 == pytest.approx(best.dollars_per_hour)
    assert best.watts == best.num_devices * (CATALOGUE[best.device].tdp_w or 0)


def test_prompts_are_charged_even_in_memory_bound_steps() -> None:
    """At least the share of the device's time that their arithmetic takes."""
    idle = with_(DEMAND, rate=5, isl=128, isl_p95=128)
    space = with_(SPACE, devices=("h100-sxm",), max_devices_per_replica=1)
    spec = load_planning_spec("llama-3.1-8b")
    best = search(spec, idle, SLO, space, CATALOGUE).fleets[0]
    assert best.input_dollars_per_mtok and best.output_dollars_per_mtok
    paid_in = best.input_dollars_per_mtok * idle.isl
    paid = paid_in + best.output_dollars_per_mtok * idle.osl
    prompts_s = idle.rate * idle.isl * 2 * 7e9 / CATALOGUE["h100-sxm"].peak_flops["bfloat16"]
    assert prompts_s < paid_in / paid < 0.5


@pytest.mark.slow
def test_no_candidate_dominates_the_pareto_front() -> None:
    result = found()
    for candidate in result.front:
        assert not any(
            other.tok_s_user >= candidate.tok_s_user and other.tok_s_device > candidate.tok_s_device
            for other in result.front
        )
    assert pareto_front(result.front) == result.front
    picture = draw_front(result.front, SLO.tpot_s)
    assert "*" in picture and "|" in picture and "tok/s per user" in picture


@pytest.mark.slow
def test_looser_slo_never_costs_more() -> None:
    tight = found(slo=Slo.parse("ttft:400 tpot:25")).fleets[0].dollars_per_hour
    loose = found().fleets[0].dollars_per_hour
    assert tight is not None and loose is not None and loose <= tight


def test_wait_quantile_matches_queueing_theory() -> None:
    assert wait_quantile(0.01, 1.0, 0.95) == 0.0  # 99 of 100 do not wait
    assert wait_quantile(1.0, 1.0, 0.95) == math.inf
    # M/D/1 at rho 0.8: the exact 95th percentile of the wait is 6.5 service times
    assert wait_quantile(0.8, 1.0, 0.95) == pytest.approx(6.5, rel=0.1)
    assert wait_quantile(0.8, 1.0, 0.95, cv2=1.0) == 2 * wait_quantile(0.8, 1.0, 0.95)


def refusal(slo: str, space: SearchSpace = SPACE, model: str = "llama-3.1-70b") -> CannotRun:
    spec, limits = load_planning_spec(model), Slo.parse(slo)
    result = search(spec, DEMAND, limits, space, CATALOGUE)
    assert not result.fleets
    return explain_infeasible(spec, DEMAND, limits, space, CATALOGUE, result)


@pytest.mark.slow
def test_impossible_slo_names_the_bound() -> None:
    assert "memory bandwidth" in str(refusal("tpot:0.5"))
    assert "(compute)" in str(refusal("ttft:1"))
    assert "memory bandwidth" in str(refusal("e2e:200"))
    small = with_(SPACE, devices=("t4",))
    assert "memory capacity" in str(refusal("tpot:50", small))
    assert "budget" in str(refusal("tpot:50", with_(SPACE, dollars_per_month=5.0)))
    assert "overhead" in str(refusal("tpot:3.2"))


def test_invalid_workloads_are_rejected() -> None:
    long = demand_of([(4000, 200)], 1.0)
    for rate in (0.0, -4.0, float("nan"), 1e308):
        with pytest.raises(BadInput, match="rate"):
            demand_of([(1024, 256)], rate)
    for lengths in ((0, 256), (1024, 0), (-5, 256)):
        with pytest.raises(BadInput, match="at least one token"):
            demand_of([(1024, 256), lengths], 1.0)
    with pytest.raises(BadInput, match="context"):
        search(load_planning_spec("llama-2-7b"), long, SLO, SPACE, CATALOGUE)


@pytest.mark.parametrize(
    ("mean", "batch", "replicas"),
    [(None, 0.0, 4), (8.0, 12.0, 4), (8.0, 13.0, 5), (None, 1.0, 5), (0.0, 50.0, 10)],
)
def test_fleet_holds_the_peak_and_the_mean_with_batch_requests(
    mean: float | None, batch: float, replicas: int
) -> None:
    demand = with_(demand_of([(100, 10)], 20.0), mean_rate=mean, batch_rate=batch)
    assert demand.replicas_at(5.0, 0.1) == replicas


def test_mean_above_the_peak_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BadInput, match="cannot exceed their peak"):
        with_(demand_of([(100, 10)], 20.0), mean_rate=21.0)
    assert main(["plan", "llama-3.1-8b", "--accelerator", "l4", "--mean-request-rate", "0.5"]) == 2
    assert "no effect without --batch-rate" in capsys.readouterr().err


def test_demand_from_lengths() -> None:
    made = demand_of([(100, 10)] * 19 + [(1000, 30)], 2.0, cached=0.5)
    assert (made.isl, made.osl, made.isl_p95, made.longest) == (145, 11, 1000, 1030)
    assert made.cached == 72 and made.input_cv2 > 1


def test_kv_transfer_time_by_hand() -> None:
    machine = build_replica(
        load_planning_spec("llama-3.1-70b"), CATALOGUE["h100-sxm"], Layout(tp=4)
    )
    assert transfer_seconds(machine, DEMAND) == pytest.approx(1024 * 327_680 / (4 * 50e9))


@pytest.mark.slow
def test_disaggregation_is_rejected_if_it_needs_more_devices() -> None:
    best = found().fleets[0]
    machine = build_replica(
        load_planning_spec("llama-3.1-70b"),
        CATALOGUE[best.device],
        best.layout,
        weight_dtype=best.weight_dtype,
        kv_dtype=best.kv_dtype,
    )
    verdict = judge_disaggregation(
        (machine,), with_(DEMAND, rate=5.0), SLO, with_(best, num_devices=1)
    )
    assert not verdict.yes and "ms per token" in verdict.why and verdict.pools is not None
    alone = judge_disaggregation((machine,), DEMAND, SLO, None)
    assert alone.yes and "no shared fleet" in alone.why
    assert smallest_pools((machine,), DEMAND, Slo.parse("ttft:1")) is None


def test_split_pools_share_an_e2e_limit() -> None:
    """An e2e limit bounds the time of both pools together, even without a TTFT limit."""
    machine = build_replica(
        load_planning_spec("llama-3.1-70b"), CATALOGUE["h100-sxm"], Layout(tp=4)
    )
    for e2e_ms in (6000, 8000, 12_000):
        split = smallest_pools((machine,), DEMAND, Slo.parse(f"e2e:{e2e_ms}"))
        assert split is not None
        took_s = split.ttft_s + (DEMAND.osl - 1) * split.tpot_s
        assert took_s <= e2e_ms / 1000
    alone = machine.uniform(1, DEMAND.isl, 0, sampled=1).seconds
    token = machine.uniform(1, 1, DEMAND.isl + DEMAND.osl // 2, sampled=1).seconds
    assert smallest_pools((machine,), DEMAND, Slo(e2e_s=DEMAND.osl * token + alone)) is None


def test_pipeline_stages_of_a_prefill_pool_overlap() -> None:
    machine, staged = (
        build_replica(load_planning_spec("llama-3.1-8b"), CATALOGUE["h100-sxm"], Layout(pp=pp))
        for pp in (1, 4)
    )
    heavy = with_(DEMAND, rate=2000.0)  # many replicas, so that rounding up does not count
    one, four = smallest_pools((machine,), heavy, SLO), smallest_pools((staged,), heavy, SLO)
    assert one is not None and four is not None
    assert four.num_prefill <= one.num_prefill / 3


def test_tpot_limit_does_not_apply_to_one_token_answers() -> None:
    single = with_(DEMAND, osl=1)
    with pytest.raises(BadInput, match="no TPOT"):
        search(load_planning_spec("llama-3.1-8b"), single, Slo.parse("tpot:50"), SPACE, CATALOGUE)
    space = with_(SPACE, devices=("h100-sxm",), max_devices_per_replica=1)
    kept = search(
        load_planning_spec("llama-3.1-8b"), single, Slo.parse("ttft:500"), space, CATALOGUE
    )
    same = Slo.parse("ttft:500 tpot:0.01")  # not judged
    assert kept.fleets
    assert search(load_planning_spec("llama-3.1-8b"), single, same, space, CATALOGUE).fleets


@pytest.mark.slow
def test_full_attainment_is_rejected() -> None:
    """Some queue exceeds any limit, so the 100 % quantile does not exist."""
    with pytest.raises(BadInput, match="every request"):
        found(slo=Slo.parse("ttft:1000 tpot:50 attainment:100%"))
    assert found(slo=Slo.parse("ttft:1000 tpot:50 attainment:99.9%")).fleets


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "plan",
        "llama-3.1-8b",
        "--request-rate",
        "5",
        "--accelerator",
        "h100-sxm",
        "--max-devices",
        "2",
    ]
    page, folder = tmp_path / "plan.html", tmp_path / "out"
    assert main([*command, "--html", str(page), "--manifests", str(folder)]) == 0
    assert "disaggregate" in capsys.readouterr().out
    assert "<svg" in page.read_text() and (folder / "kubernetes.yaml").is_file()
    assert main([*command, "--json", "--workload", "synthetic:input=300,output=20"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["demand"]["isl"] == pytest.approx(300, rel=0.1) and plan["fleets"]
    catalogue = tmp_path / "catalogue.toml"
    known = files("ridgeline.hardware").joinpath("catalogue.toml").read_text(encoding="utf-8")
    catalogue.write_text(known.replace('as_of = "2026', 'as_of = "2020'))
    old = [*command, "--catalogue", str(catalogue)]
    assert main(old) == 2 and "stale" in capsys.readouterr().err
    assert main([*old, "--accept-stale"]) == 0 and "days old" in capsys.readouterr().out
    assert main([*old, "--price-per-hour", "2"]) == 0
    assert main([*command, "--image", "vllm/vllm-openai:v1"]) == 2
    assert "no effect without --manifests" in capsys.readouterr().err
    assert main([*command, "--slo", "tpot:0.1"]) == 2
    assert "memory bandwidth" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--max-model-len", "1279"], "1,280"),
        (["--max-model-len", "128", "--input-len", "100", "--output-len", "29"], "129"),
        (["--max-model-len", "131073"], "131,072"),
        (["--price-per-hour", "-1"], "--price-per-hour"),
        (["--price-per-hour", "nan"], "--price-per-hour"),
    ],
)
def test_context_limits_that_cannot_serve_the_load_are_rejected(
    capsys: pytest.CaptureFixture[str], given: list[str], named: str
) -> None:
    """The load is 1,024 tokens in and 256 out; the model's context is 131,072."""
    assert main(["plan", "llama-3.1-8b", "--accelerator", "h100-sxm", *given]) == 2
    captured = capsys.readouterr()
    assert named in captured.err and not captured.out


@pytest.mark.slow
def test_context_limit_may_equal_the_longest_request(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["plan", "llama-3.1-8b", "--accelerator", "h100-sxm", "--max-model-len", "1280"]
    assert main(command) == 0
    assert capsys.readouterr().out.count("--max-model-len 1280") == 2


def test_routed_models_are_searched_over_tp_ep_dp() -> None:
    dense, routed = load_planning_spec("llama-3.1-8b"), load_planning_spec("qwen3-235b-a22b")
    assert all(layout.dp == layout.ep == 1 for layout in enumerate_layouts(dense, 16))
    layouts = list(enumerate_layouts(routed, 16))
    assert len(layouts) == len(set(map(str, layouts)))
    assert max(layout.num_devices for layout in layouts) == 16
    for wanted in (
        Layout(tp=8),
        Layout(tp=4, ep=4),
        Layout(tp=1, dp=8, ep=8),
        Layout(tp=2, dp=4),
        Layout(tp=8, dp=2, ep=8),
        Layout(tp=4, pp=2),
    ):
        assert wanted in layouts


def test_pools_may_differ_in_layout_and_are_no_larger_for_it() -> None:
    machine = build_replica(
        load_planning_spec("llama-3.1-70b"),
        CATALOGUE["h100-sxm"],
        Layout(tp=8),
        weight_dtype="float8_e4m3",
    )
    load = with_(DEMAND, rate=30.0, isl=4000, isl_p95=4000, longest=4256)
    machines = (machine, *other_layouts(machine, 8))
    alike = [smallest_pools((each,), load, SLO) for each in machines]
    best = smallest_pools(machines, load, SLO)
    assert best is not None
    assert best.num_devices <= min(split.num_devices for split in alike if split is not None)
    assert best.prefill_layout in [each.layout for each in machines]
    verdict = judge_disaggregation(machines, load, SLO, None)
    assert str(best.prefill_layout) in verdict.why and str(best.decode_layout) in verdict.why
