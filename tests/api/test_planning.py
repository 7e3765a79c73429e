"""`plan`, `predict`, `simulate` and `cost`: what they find, and that their records save."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ridgeline
from ridgeline.report.result import Result

MODEL = "llama-3.1-8b"


def check_record(result: Result, folder: Path) -> None:
    """The record saves what `to_dict` says, and its pages run no script."""
    saved = json.loads(result.save(folder / "result.json").read_text())
    assert saved == json.loads(json.dumps(result.to_dict()))
    page = result.save(folder / "result.html").read_text()
    assert page.startswith("<!doctype html>") and "<script" not in page
    assert result._repr_html_().startswith("<iframe srcdoc=")


@pytest.mark.slow
def test_plan_finds_a_fleet_and_its_command(tmp_path: Path) -> None:
    limits = {"accelerator": "h100-sxm", "quantization": "bfloat16", "max_devices": 1}
    slow = ridgeline.plan(MODEL, **limits)  # type: ignore[arg-type]
    fast = ridgeline.plan(
        MODEL,
        request_rate=100,
        manifests=tmp_path / "manifests",
        **limits,  # type: ignore[arg-type]
    )
    assert slow.fleets[0].num_devices == 1 < fast.fleets[0].num_devices
    assert any("vllm serve" in command for command in slow.commands.values())
    assert list((tmp_path / "manifests").iterdir())
    check_record(slow, tmp_path)


def test_prediction_follows_the_load(tmp_path: Path) -> None:
    one = ridgeline.predict(MODEL, accelerator="h100-sxm")
    many = ridgeline.predict(MODEL, accelerator="h100-sxm", max_concurrency=64)
    assert many.prediction.output_tok_s > 10 * one.prediction.output_tok_s
    assert one.point.device == "h100-sxm"
    check_record(many, tmp_path)


def test_simulation_is_determined_by_its_seed(tmp_path: Path) -> None:
    load = {"accelerator": "h100-sxm", "request_rate": 4, "num_prompts": 60, "slo": "ttft:500"}
    first = ridgeline.simulate(MODEL, seed=3, **load)  # type: ignore[arg-type]
    again = ridgeline.simulate(MODEL, seed=3, **load)  # type: ignore[arg-type]
    other = ridgeline.simulate(MODEL, seed=4, **load)  # type: ignore[arg-type]
    assert first.summary == again.summary != other.summary
    assert first.summary.attainment == 1.0
    check_record(first, tmp_path)
    assert json.loads(first.save_trace(tmp_path / "trace.json").read_text())


def test_cost_ranks_the_offers(tmp_path: Path) -> None:
    cost = ridgeline.cost(MODEL, accelerator="l4", price_per_hour=0.7, accept_stale=True)
    prices = [offer.total_per_request for offer in cost.offers]
    assert prices == sorted(prices) and prices[0] > 0
    assert cost.dollars_per_hour == pytest.approx(0.7 * cost.fleet.num_devices)
    check_record(cost, tmp_path)


def test_durations_and_counts_may_be_written_with_units() -> None:
    run = ridgeline.simulate(
        MODEL, accelerator="h100-sxm", num_prompts=20, autoscale=2, startup_s="1m30s"
    )
    assert run.options.startup_s == 90.0
