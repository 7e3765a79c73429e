"""Techniques: rows of techniques.toml, with what the ladder and the flowchart say of them here."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path

from ridgeline.diagnose.rules.rules import shipped as shipped_rules
from ridgeline.optimize import ladder
from ridgeline.workflows.explain.topics.base import Known, Page


@cache
def rows() -> Mapping[str, dict[str, str]]:
    """The rows by id."""
    text = files("ridgeline").joinpath("techniques.toml").read_text(encoding="utf-8")
    return {row["id"]: row for row in tomllib.loads(text)["technique"]}


def names() -> Mapping[str, str]:
    """Ids and titles; the ladder's own names where a rung has one technique, and those of pages."""
    found = {rung.id: rung.technique for rung in ladder.load_default_ladder().rungs}
    found |= {Path(row["page"]).stem: id for id, row in rows().items() if "page" in row}
    found |= {row["title"]: id for id, row in rows().items()}
    return found | {id: id for id in rows()}


def page(id: str, known: Known) -> Page:
    """What it is, what was measured, and whether it is for this place."""
    row = rows()[id]
    rungs = {rung.id for rung in ladder.load_default_ladder().rungs if rung.technique == id}
    here = tuple((each.verdict, each.reason) for each in known.told if each.rung in rungs)
    asked = tuple(
        ("yes" if each.answer else "no", f"{each.question} {each.why}")
        for each in known.walked
        if id in each.techniques
    )
    mends = tuple(("mends", rule.fix) for rule in shipped_rules() if rule.rung in rungs)
    what = (
        ("honesty", row["honesty"]),
        ("paper", row["paper"]),
        ("moves", row["term"]),
        ("switch", row["switch"]),
        ("measured", row["measured"]),
        ("hurts when", row["hurts_when"]),
        ("more", row.get("page", "")),
        ("code", row["module"]),
        ("shown by", f"{row['conformance']}; {row['benchmark']}"),
    )
    return Page(kind="technique", id=id, title=row["title"], lines=(*what, *mends, *here, *asked))
