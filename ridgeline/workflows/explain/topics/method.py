"""Techniques of the field by any of their names, also those that Ridgeline does not have."""

from __future__ import annotations

from collections.abc import Mapping

from ridgeline.workflows.explain.topics import technique
from ridgeline.workflows.explain.topics.base import TopicContext, TopicPage
from ridgeline.workflows.explain.topics.cost_terms import TERMS
from ridgeline.workflows.explain.topics.method_rows import gain_here, rows, share_left


def names() -> Mapping[str, str]:
    """Ids and other names."""
    return {name: row.id for row in rows().values() for name in (row.id, *row.also)}


def page(id: str, context: TopicContext) -> TopicPage:
    """What it does, which bound it moves and how far here, and who has it."""
    row = rows()[id]
    has = row.ours or row.near
    lines = (
        ("does", row.does),
        ("paper", row.paper),
        ("helps", TERMS[row.moves].title),
        ("here", gain_here(row, context.facts)),
        ("share left", share_left(row)),
        ("hurts when", row.hurts_when),
        *(("in Ridgeline", _switch_of(name)) for name in row.ours),
        *(("nearest here", _switch_of(name)) for name in row.near),
        ("in Ridgeline", "" if has else "not a technique of its engine"),
        ("others", row.others),
        *technique.verdicts(has, context),
        ("see", ", ".join(f"ridgeline explain {name}" for name in has)),
    )
    return TopicPage(kind="method", id=id, title=row.id, lines=lines)


def _switch_of(name: str) -> str:
    row = technique.rows()[name]
    return f"{row['title']}: {row['switch']}"
