"""`ridgeline diagnose --profile` and its page, end to end on a small engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ridgeline.cli.app import app
from ridgeline.hardware.ceilings import MeasuredCeilings

CEILINGS = MeasuredCeilings(
    bytes_s={1 << 20: 40e9, 1 << 28: 20e9},
    flops_s={"int4": 200e9, "int16": 150e9, "float32": 100e9},
    cpu_share=1.0,
)
LOAD = ["--random-input-len", "24", "--random-output-len", "8", "--max-concurrency", "2"]


def invoke(*args: str) -> Any:
    return CliRunner().invoke(app, ["diagnose", "demo", "--profile", "--num-threads", "1", *args])


@pytest.fixture
def known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridgeline.hardware.ceilings.measure_ceilings", lambda threads: CEILINGS)


@pytest.mark.usefixtures("known_machine")
def test_the_tables_the_chart_and_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = invoke(*LOAD, "--html", str(page))
    assert done.exit_code == 0, done.output
    for words in ("prefill: a prompt of 24 tokens", "decode: 2 sequences of", "% of bound"):
        assert words in done.output
    for words in ("q, k, v linears", "LM head", "host", "FLOP/byte", "GFLOP/s", "of its roof"):
        assert words in done.output
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg") == 4 and "<script" not in text and "http" not in text.split("<svg")[0]
    assert "What stands out" in text and "gate and up linears" in text


@pytest.mark.usefixtures("known_machine")
def test_json_has_every_figure() -> None:
    done = invoke(*LOAD, "--json", "--quantization", "int4")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout[done.stdout.index("{") :])
    for phase in told["phases"]:
        assert sum(row["time_s"] for row in phase["rows"]) == pytest.approx(phase["pass_s"])
        named = {row["operator"]: row for row in phase["rows"]}
        assert named["down"]["of_bound"] > 0 and named["host"]["of_bound"] is None
    assert told["peaks"]["dtype"] == "int4"


def test_what_would_change_nothing_is_refused() -> None:
    for flags in (["--request-rate", "3"], ["--url", "http://x"], ["--baseline", "x.jsonl"]):
        done = invoke(*flags)
        assert done.exit_code != 0 and "has no effect" in str(done.exception or done.output)


def test_a_longer_workload_than_the_model_takes_is_refused() -> None:
    done = invoke("--max-model-len", "64", "--random-input-len", "80")
    assert done.exit_code != 0 and "longer than the model" in str(done.exception or done.output)
