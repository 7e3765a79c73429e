"""Techniques: rows of techniques.toml, with the ladder's and the flowchart's verdicts on them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.diagnose.rules.rulebook import shipped_rules
from ridgeline.optimize import ladder
from ridgeline.workflows.explain.fleet_figures import FLEET_TECHNIQUES, fleet_figures
from ridgeline.workflows.explain.topics import normalise
from ridgeline.workflows.explain.topics.base import TopicContext, TopicPage
from ridgeline.workflows.explain.topics.cost_terms import TERMS
from ridgeline.workflows.explain.topics.method_rows import Method, gain_here, share_left
from ridgeline.workflows.explain.topics.method_rows import rows as method_rows


@cache
def rows() -> Mapping[str, dict[str, Any]]:
    """The rows by id."""
    text = files("ridgeline").joinpath("techniques.toml").read_text(encoding="utf-8")
    return {row["id"]: row for row in tomllib.loads(text)["technique"]}


def names() -> Mapping[str, str]:
    """Ids and titles, the ladder's names for them, and those of their pages."""
    names = {rung.id: rung.technique for rung in ladder.load_default_ladder().rungs}
    names |= {Path(row["page"]).stem: id for id, row in rows().items() if "page" in row}
    names |= {row["title"]: id for id, row in rows().items()}
    return names | {id: id for id in rows()}


def page(id: str, context: TopicContext) -> TopicPage:
    """What it is, what was measured, and whether it suits this configuration."""
    row = rows()[id]
    rungs = _rungs(id)
    answers = tuple(
        ("yes" if answer.answer else "no", f"{answer.question} {answer.why}")
        for answer in context.answers
        if id in answer.techniques
    )
    figures = fleet_figures(id, context.facts) if id in FLEET_TECHNIQUES else _gain(id, context)
    fixes = tuple(("fixes", rule.fix) for rule in shipped_rules() if rule.rung in rungs)
    lines = (
        ("honesty", row["honesty"]),
        ("paper", row["paper"]),
        ("moves", row["term"]),
        ("switch", row["switch"]),
        ("measured", row["measured"]),
        ("on a GPU", row.get("gpu", "never run on one")),
        ("hurts when", row["hurts_when"]),
        ("predicted by", "; ".join(map(_command, row.get("modelled", ())))),
        ("not predicted", row.get("not_modelled", "")),
        ("more", row.get("page", "")),
        ("code", row["module"]),
        ("tested by", f"{row['conformance']}; {row['benchmark']}"),
        ("optimize", f"tries it: {', '.join(sorted(rungs))}" if rungs else row.get("no_rung", "")),
    )
    return TopicPage(
        kind="technique",
        id=id,
        title=row["title"],
        lines=(*lines, *fixes, *verdicts((id,), context), *answers, *figures),
    )


def verdicts(ids: Sequence[str], context: TopicContext) -> tuple[tuple[str, str], ...]:
    """What the arithmetic says here of the rungs that try these techniques."""
    rungs = {rung for id in ids for rung in _rungs(id)}
    if not rungs:
        return ()
    found = [rung for rung in context.recommendations if rung.rung in rungs]
    if len(found) == 1:
        return ((found[0].verdict, found[0].reason),)
    return tuple((rung.verdict, f"{rung.title}: {rung.reason}") for rung in found)


def _command(text: str) -> str:
    """A command of planning, with MODEL where it names none."""
    name, _, rest = text.partition(" ")
    model = "" if rest and not rest.startswith("-") else " MODEL"
    return f"ridgeline {name}{model} {rest}".rstrip()


def _gain(id: str, context: TopicContext) -> tuple[tuple[str, str], ...]:
    method = method_of(id)
    if method is None:
        return (("here", TERMS[rows()[id]["moves"]].judge(context.facts, None)),)
    return (("here", gain_here(method, context.facts)), ("share left", share_left(method)))


def method_of(id: str) -> Method | None:
    """The row of the field for the technique: of one of its names, or the first that it is.

    Without a share that is left, where rows of other names differ in it.
    """
    found = [row for row in method_rows().values() if id in row.ours]
    spelt = {_spelt(name) for name, known in names().items() if known == id}
    named = [row for row in found if any(_spelt(name) in spelt for name in (row.id, *row.also))]
    if named or not found:
        return named[0] if named else None
    first = next((row for row in found if row.ours[0] == id), found[0])
    alike = len({(row.moves, row.keeps) for row in found}) == 1
    return first if alike else msgspec.structs.replace(first, keeps=None)


def _spelt(name: str) -> str:
    return normalise(name).replace(" ", "")


def _rungs(id: str) -> set[str]:
    """The rungs that try the technique, or a variant of which quantises weights by it."""
    return {
        rung.id
        for rung in ladder.load_default_ladder().rungs
        if rung.technique == id or any(variant.get(ladder.MAKE) == id for variant in rung.variants)
    }
