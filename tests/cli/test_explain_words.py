"""Every label in the output of `bench` and `diagnose` can be looked up by `ridgeline explain`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from ridgeline.cli.main import main
from ridgeline.stats import Outcome
from ridgeline.workflows.explain import topics

HEADINGS = {"engine", "machine", "by kind", "by input length", "not measured", "memory"}


def unknown(labels: set[str]) -> list[str]:
    return sorted(label for label in labels if not topics.find_topics(label))


def test_labels_of_bench_and_diagnose_can_be_looked_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    log = tmp_path / "run.jsonl"
    load = ["--num-prompts", "4", "--max-concurrency", "2", "--slo", "ttft:1000 tpot:0.0001"]
    assert main(["bench", "demo", *load, "--log", str(log)]) == 0
    labels = set(map(_label, _table_lines(capsys.readouterr().out)))
    words = {word for label in labels for word in _names(label)} - HEADINGS
    assert len(words) > 20
    assert unknown(words) == []

    assert main(["diagnose", "--run", str(log)]) == 0
    out = capsys.readouterr().out
    lost = re.search(r"where latency went: (.*)", out)
    assert lost is not None
    losses = set(re.findall(r"([a-z_ ]+?) \d+%", lost[1]))
    details = {_label(line) for line in re.findall(r"^ {3}(\S.*)$", out, re.MULTILINE)}
    details = {detail for detail in details if not detail.startswith("will not help ")}
    assert losses and unknown({loss.strip() for loss in losses} | details - {"fix", "flag"}) == []


def test_outcomes_of_compare_can_be_looked_up() -> None:
    outcomes = get_args(Outcome)
    assert "improved" in outcomes and unknown(set(outcomes)) == []


def _table_lines(out: str) -> list[str]:
    """Lines that begin with a label and two blanks; no sentences and no rows of kinds."""
    after = out[out.index("latency (ms)") :].splitlines()[1:]
    return [
        line
        for line in after
        if re.match(r" {0,5}\S.*? {2,}\S", line) and not re.match(r"chat|code|input<=", line)
    ]


def _label(line: str) -> str:
    return re.split(r" {2,}", line.strip())[0].removeprefix("… ").split(" (")[0]


def _names(label: str) -> list[str]:
    """The names in a label: "decode MFU, MBU" has two metrics, "ttft to the first token" one."""
    if topics.find_topics(label) or label in HEADINGS:
        return [label]
    first = label.split()[0]
    return [first] if re.match(r"(ttft|tpot|itl|e2e) ", label) else re.split(r",? ", label)
