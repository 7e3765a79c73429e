"""Metrics: their definition, what decides them, their bound here, and what they are lost to."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

import msgspec

from ridgeline.diagnose.conditions import fill
from ridgeline.diagnose.rules.causes import shipped_causes
from ridgeline.workflows.explain.topics.base import Known, Page


class Metric(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row of metrics.toml; see its head."""

    id: str
    title: str
    also: tuple[str, ...]
    says: str
    decided_by: str
    here: str
    helps: tuple[str, ...]
    not_help: str
    losses: tuple[str, ...]


@cache
def rows() -> Mapping[str, Metric]:
    """The rows by id."""
    text = (
        files("ridgeline.workflows.explain.topics")
        .joinpath("metrics.toml")
        .read_text(encoding="utf-8")
    )
    found = msgspec.convert(tomllib.loads(text)["metric"], tuple[Metric, ...])
    return {each.id: each for each in found}


def names() -> Mapping[str, str]:
    """Ids, titles and what others call them."""
    return {name: row.id for row in rows().values() for name in (row.id, row.title, *row.also)}


def page(id: str, known: Known) -> Page:
    """The metric, with this place's bound in it."""
    row = rows()[id]
    lost = [each for each in shipped_causes() if each.loss in row.losses]
    lines = (
        ("is", row.says),
        ("decided by", row.decided_by),
        ("here", fill(row.here, known.facts)),
        ("helps", ", ".join(row.helps)),
        ("does not", row.not_help),
        *(("lost to", f"{each.id} ({each.verdict}): {each.fix}") for each in lost),
        ("defined in", "docs/concepts/measurements.md"),
    )
    return Page(kind="metric", id=id, title=row.title, lines=lines)
