"""The decision flowchart: every answer can be reached, and follows its row's arrows."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import ridgeline
from ridgeline.diagnose.conditions import parse
from ridgeline.diagnose.rules.decisions import Decision, shipped_decisions, walk
from ridgeline.diagnose.rules.rulebook import Rule, shipped_rules

ROWS = shipped_decisions()
TECHNIQUES = tomllib.loads((Path(ridgeline.__file__).parent / "techniques.toml").read_text())
IDS = {row["id"] for row in TECHNIQUES["technique"]}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_shipped_decisions_parse_and_name_existing_rows(row: Decision) -> None:
    assert all(map(parse, row.when))
    assert {*row.yes_try, *row.no_try} <= IDS
    known = [each.id for each in ROWS]
    for onward in (row.yes_next, row.no_next):
        assert onward is None or known.index(onward) > known.index(row.id), "no circles"


def row(id: str, **more: str) -> Decision:
    texts = {"question": id, "yes": "is {n}", "no": "not {n}"}
    return Decision(id=id, when=("n > 1",), **{**texts, **more})  # type: ignore[arg-type]


def test_a_no_can_skip_questions() -> None:
    rows = (row("a", no_next="c"), row("b"), row("c"))
    assert [each.id for each in walk({"n": 2}, rows)] == ["a", "b", "c"]
    assert [each.id for each in walk({"n": 1}, rows)] == ["a", "c"]


def test_the_answer_has_its_numbers_and_techniques() -> None:
    rows = (row("a", yes_try=("x",), no_try=("y",)),)  # type: ignore[arg-type]
    (yes,), (no,) = walk({"n": 2}, rows), walk({"n": 1}, rows)
    assert (yes.answer, yes.why, yes.techniques) == (True, "is 2", ("x",))
    assert (no.answer, no.why, no.techniques) == (False, "not 1", ("y",))


def test_unknown_fact_leaves_the_question_open() -> None:
    (bare,) = walk({}, (row("a"),))
    assert bare.answer is None and "unknown" in bare.why
    (said,) = walk({"m": 3}, (row("a", open="say n; m is {m}"),))
    assert said.answer is None and said.why == "say n; m is 3"


def test_flowchart_and_rule_book_share_no_rule() -> None:
    """One predicts from bounds before a run, the other names causes from measurements."""
    observed = {condition for rule in shipped_rules() for condition in _conditions(rule)}
    assert len(observed) > 20
    assert not observed & {condition for row in ROWS for condition in row.when}
    assert not {rule.id for rule in shipped_rules()} & IDS_OF_QUESTIONS
    remedies = {rule.fix for rule in shipped_rules()}
    assert not remedies & {text for row in ROWS for text in (row.yes, row.no, row.open)}


IDS_OF_QUESTIONS = {row.id for row in ROWS}


def _conditions(rule: Rule) -> list[str]:
    places = (rule.losses, rule.figures, rule.headline)
    return [condition for place in places if place is not None for condition in place.when]
