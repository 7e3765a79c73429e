"""Results save and display themselves; progress events read as lines."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest

from ridgeline.errors import BadInput
from ridgeline.records.progress import (
    Caution,
    StageAdvanced,
    StageFinished,
    StageStarted,
    TrialFinished,
    silent,
    stage,
)
from ridgeline.report.result import Result


class Answer(Result, frozen=True, kw_only=True):
    """A result for these tests."""

    name: str
    seconds: float


def test_numbers_without_a_json_form_become_null() -> None:
    assert Answer(name="a", seconds=float("inf")).to_dict() == {"name": "a", "seconds": None}
    assert Answer(name="a", seconds=np.float64(0.5)).to_dict()["seconds"] == 0.5


def test_a_result_is_saved_by_its_suffix(tmp_path) -> None:
    answer = Answer(name="<b>", seconds=1.5)
    path = answer.save(tmp_path / "r.json")
    assert json.loads(path.read_text()) == {"name": "<b>", "seconds": 1.5}
    page = answer.save(str(tmp_path / "r.html")).read_text()
    assert page.startswith("<!doctype html>") and "<b>" not in page and "&lt;b&gt;" in page
    with pytest.raises(BadInput, match=r"\.json, \.html"):
        answer.save(tmp_path / "r.txt")


def test_a_notebook_shows_the_page_in_a_frame() -> None:
    html = Answer(name='"', seconds=1.0)._repr_html_()
    assert html.startswith("<iframe srcdoc=") and html.count('"') % 2 == 0


def test_events_read_as_lines() -> None:
    trial = TrialFinished(label="int8", verdict="kept", reason="faster", ratio=(1.0, 1.25, 1.5))
    lines = {
        StageStarted(stage="loading", detail="demo"): "loading: demo",
        StageAdvanced(stage="requests", completed=5, total=20): "requests: 25%",
        StageAdvanced(stage="requests", completed=5): "requests: 5",
        StageFinished(stage="requests"): "requests: done",
        Caution(text="the machine is busy"): "warning: the machine is busy",
        trial: "int8: kept 1.25x [1.00, 1.50]: faster",
    }
    assert {event: str(event) for event in lines} == lines
    assert silent(trial) is None
    assert msgspec.to_builtins(trial)["type"] == "trial_finished"


def test_a_stage_that_fails_is_not_reported_as_finished() -> None:
    seen: list[object] = []
    with pytest.raises(ZeroDivisionError), stage(seen.append, "computing"):
        raise ZeroDivisionError
    assert seen == [StageStarted(stage="computing")]
    with stage(seen.append, "computing", total=2, unit="steps"):
        pass
    assert seen[-1] == StageFinished(stage="computing")
