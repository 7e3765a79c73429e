"""Errors, statuses and failures: their meaning, how they are reported, and how to fix them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

import msgspec

from ridgeline.diagnose.conditions import fill
from ridgeline.workflows.explain.topics.base import TopicContext, TopicPage


class ErrorRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row of errors.toml."""

    id: str
    also: tuple[str, ...]
    means: str
    reported_as: str
    fix: str
    here: str


@cache
def rows() -> Mapping[str, ErrorRow]:
    """The rows by id."""
    text = (
        files("ridgeline.workflows.explain.topics")
        .joinpath("errors.toml")
        .read_text(encoding="utf-8")
    )
    errors = msgspec.convert(tomllib.loads(text)["error"], tuple[ErrorRow, ...])
    return {error.id: error for error in errors}


def names() -> Mapping[str, str]:
    """Classes, types and statuses."""
    return {name: row.id for row in rows().values() for name in (row.id, *row.also)}


def page(id: str, context: TopicContext) -> TopicPage:
    """The error, with the limits of this configuration."""
    row = rows()[id]
    lines = (
        ("means", row.means),
        ("reported as", row.reported_as),
        ("fix", row.fix),
        ("here", fill(row.here, context.facts) if row.here else ""),
    )
    return TopicPage(kind="error", id=id, title=id, lines=lines)
