"""`ridgeline explain speculation`: measured, not assumed; and what it refuses."""

from __future__ import annotations

import json

import pytest

from ridgeline.cli.main import main

SMALL = ("--kv-cache-memory-bytes", "32MiB", "--num-threads", "1", "--max-num-seqs", "8")


@pytest.mark.slow
def test_speculation_is_measured_on_this_model_and_machine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["explain", "speculation", "demo", "--json", *SMALL]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {each["batch"] for each in rows} == {1, 8}
    assert len({each["workload"] for each in rows}) == 2
    for each in rows:
        assert each["step_ms"] > 0 and 0 <= each["share"] <= 1
        assert all(0 <= chance <= 1 for chance in each["alpha"])
        for row in each["rows"]:
            assert row["gain"] == pytest.approx(row["tokens"] / row["slower"])
            assert 1 <= row["tokens"] <= row["depth"] + 1
        wins = max(row["gain"] for row in each["rows"]) > 1.03
        assert each["verdict"].startswith("up to" if wins else "off")
    for batch in (1, 8):  # tokens a step that drafts give, steps without any counted
        more = {
            "repeated" in each["workload"]: each["share"] * (each["rows"][-1]["tokens"] - 1)
            for each in rows
            if each["batch"] == batch
        }
        assert more[True] > max(0.5, more[False]), "text that is repeated is found"


def test_fixed_number_of_draft_tokens_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    config = '{"method": "ngram", "num_speculative_tokens": 3}'
    assert main(["explain", "speculation", "demo", "--speculative-config", config]) == 2
    assert "fixed depth" in capsys.readouterr().err


def test_second_model_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "demo", "demo"]) == 2
    assert "no effect after a model" in capsys.readouterr().err


def test_slo_is_rejected_by_explain_speculation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "speculation", "demo", "--slo", "ttft:9"]) == 2
    assert "--slo has no effect" in capsys.readouterr().err
