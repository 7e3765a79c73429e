"""Costs that the planning commands print at 80 columns: whole figures, which add up to the bill."""

from __future__ import annotations

import re

import pytest

from ridgeline.cli.main import main

IN, OUT, RATE = 1024, 256, 5.0
LOAD = ["--request-rate", str(RATE), "--accelerator", "h100-sxm", "--accept-stale"]
NUMBER = r"([\d,.]+)"
OFFER = re.compile(
    rf"\s+{NUMBER}\s+{NUMBER}\s+{NUMBER}\s+{NUMBER}\s+{NUMBER}\s+(?:never|[\d.]+/s)\s+\d{{4}}-\S+$"
)
TERMS = re.compile(rf"\s{NUMBER}\s+{NUMBER}\s+{NUMBER}\s+\d{{4}}-\S+$")
FLEET = re.compile(rf"\s\d+-\d+\s+{NUMBER}\s+{NUMBER}\s+{NUMBER}\s+[\d.]+$")


def printed(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([command, "llama-3.1-8b", *LOAD]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert not [line for line in lines if "…" in line], "cut"
    return lines


def numbers(pattern: re.Pattern[str], lines: list[str]) -> list[list[float]]:
    matches = filter(None, map(pattern.search, lines))
    return [[float(text.replace(",", "")) for text in match.groups()] for match in matches]


@pytest.mark.slow
def test_rows_of_the_cost_table_add_up(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = printed("cost", capsys, monkeypatch)
    at = next(i for i, line in enumerate(lines) if line.startswith("$ per 1,000 requests"))
    offers = numbers(OFFER, lines[at:])
    assert len(offers) >= 10
    for whole, sent, cached, received, month in offers:
        assert sent + cached + received == pytest.approx(whole, rel=0.01)
        assert whole / 1000 * RATE * 3600 * 730 == pytest.approx(month, rel=0.01)
    terms = numbers(TERMS, lines[:at])
    assert len(terms) >= 10
    for hour, month, per_1000 in terms:
        assert hour * 730 == pytest.approx(month, rel=0.01)
        assert hour / 3600 / RATE * 1000 == pytest.approx(per_1000, rel=0.01)


@pytest.mark.slow
def test_input_and_output_of_a_plan_add_up_to_its_dollars_per_hour(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleets = numbers(FLEET, printed("plan", capsys, monkeypatch))
    assert len(fleets) >= 3
    for hour, per_input, per_output in fleets:
        spent = RATE * 3600 * (IN * per_input + OUT * per_output) / 1e6
        assert spent == pytest.approx(hour, rel=0.02)
