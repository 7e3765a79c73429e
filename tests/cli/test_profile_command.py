"""`ridgeline diagnose --profile` and its page, end to end on a small engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ridgeline.cli.main import main
from ridgeline.hardware.ceilings import MeasuredCeilings

pytestmark = pytest.mark.slow

CEILINGS = MeasuredCeilings(
    bytes_s={1 << 20: 40e9, 1 << 28: 20e9},
    flops_s={"int4": 200e9, "int16": 150e9, "float32": 100e9},
    cpu_share=1.0,
)
LOAD = ["--input-len", "24", "--output-len", "8", "--max-concurrency", "2"]


def profile(*args: str) -> int:
    return main(["diagnose", "demo", "--profile", "--num-threads", "1", *args])


@pytest.fixture
def known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridgeline.hardware.ceilings.measure_ceilings", lambda threads: CEILINGS)


@pytest.mark.usefixtures("known_machine")
def test_profile_prints_tables_and_writes_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert profile(*LOAD, "--html", str(page)) == 0
    output = capsys.readouterr().out
    for words in ("prefill: a prompt of 24 tokens", "decode: 2 sequences of", "% of bound"):
        assert words in output
    for words in ("q, k, v linears", "LM head", "host", "FLOP/byte", "GFLOP/s", "of its roof"):
        assert words in output
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg") == 4 and "<script" not in text and "http" not in text.split("<svg")[0]
    assert "What stands out" in text and "gate and up linears" in text


@pytest.mark.usefixtures("known_machine")
def test_profile_as_json_has_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert profile(*LOAD, "--json", "--quantization", "int4") == 0
    result = json.loads(capsys.readouterr().out)
    for phase in result["phases"]:
        assert sum(row["time_s"] for row in phase["rows"]) == pytest.approx(phase["pass_s"])
        named = {row["operator"]: row for row in phase["rows"]}
        assert named["down"]["of_bound"] > 0 and named["host"]["of_bound"] is None
    assert result["peaks"]["dtype"] == "int4"


def test_options_that_profile_does_not_read_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for flags in (["--request-rate", "3"], ["--url", "http://x"], ["--baseline", "x.jsonl"]):
        assert profile(*flags) == 2
        assert "has no effect" in capsys.readouterr().err


def test_a_workload_longer_than_the_context_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert profile("--max-model-len", "64", "--input-len", "80") == 2
    assert "longer than the model" in capsys.readouterr().err
