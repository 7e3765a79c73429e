"""Metrics: definition, what determines them, their bound here, and what they are lost to."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

import msgspec

from ridgeline.diagnose.conditions import fill
from ridgeline.diagnose.rules.rulebook import shipped_rules
from ridgeline.workflows.explain.topics.base import TopicContext, TopicPage


class MetricRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row of metrics.toml."""

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
def rows() -> Mapping[str, MetricRow]:
    """The rows by id."""
    text = (
        files("ridgeline.workflows.explain.topics")
        .joinpath("metrics.toml")
        .read_text(encoding="utf-8")
    )
    metrics = msgspec.convert(tomllib.loads(text)["metric"], tuple[MetricRow, ...])
    return {metric.id: metric for metric in metrics}


def names() -> Mapping[str, str]:
    """Ids, titles and other names."""
    return {name: row.id for row in rows().values() for name in (row.id, row.title, *row.also)}


def page(id: str, context: TopicContext) -> TopicPage:
    """The metric, with its bound for this configuration."""
    row = rows()[id]
    rules = [rule for rule in shipped_rules() if rule.losses and rule.losses.loss in row.losses]
    lines = (
        ("is", row.says),
        ("determined by", row.decided_by),
        ("here", fill(row.here, context.facts)),
        ("helps", ", ".join(row.helps)),
        ("does not help", row.not_help),
        *(("lost to", f"{rule.id} ({rule.verdict}): {rule.fix}") for rule in rules),
        ("defined in", "docs/concepts/measurements.md"),
    )
    return TopicPage(kind="metric", id=id, title=row.title, lines=lines)
