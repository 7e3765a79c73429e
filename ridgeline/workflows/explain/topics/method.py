"""Techniques of the field by any of their names, also those that Ridgeline does not have."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

import msgspec

from ridgeline.workflows.explain.topics import technique
from ridgeline.workflows.explain.topics.base import TopicContext, TopicPage
from ridgeline.workflows.explain.topics.cost_terms import TERMS


class Method(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row of methods.toml."""

    id: str
    does: str
    moves: str
    paper: str
    others: str
    hurts_when: str
    also: tuple[str, ...] = ()
    keeps: float | None = None
    ours: tuple[str, ...] = ()
    near: tuple[str, ...] = ()


@cache
def rows() -> Mapping[str, Method]:
    """The rows by id."""
    text = (
        files("ridgeline.workflows.explain.topics")
        .joinpath("methods.toml")
        .read_text(encoding="utf-8")
    )
    methods = msgspec.convert(tomllib.loads(text)["method"], tuple[Method, ...])
    return {method.id: method for method in methods}


def names() -> Mapping[str, str]:
    """Ids and other names."""
    return {name: row.id for row in rows().values() for name in (row.id, *row.also)}


def page(id: str, context: TopicContext) -> TopicPage:
    """What it does, which bound it moves and how far here, and who has it."""
    row = rows()[id]
    term = TERMS[row.moves]
    has = row.ours or row.near
    lines = (
        ("does", row.does),
        ("paper", row.paper),
        ("helps", term.title),
        ("here", term.judge(context.facts, row.keeps)),
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
