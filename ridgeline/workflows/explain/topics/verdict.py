"""Verdicts of `ridgeline diagnose`, and the causes behind them."""

from __future__ import annotations

from collections.abc import Mapping

from ridgeline.diagnose.rules.causes import Cause, shipped_causes
from ridgeline.workflows.explain.topics.base import TopicContext, TopicPage


def names() -> Mapping[str, str]:
    """Verdicts and ids of causes."""
    ids = {shipped_cause.id: shipped_cause.id for shipped_cause in shipped_causes()}
    return ids | {
        shipped_cause.verdict: shipped_cause.verdict for shipped_cause in shipped_causes()
    }


def page(id: str, context: TopicContext) -> TopicPage:
    """All causes of a verdict, or one cause."""
    causes = [
        shipped_cause
        for shipped_cause in shipped_causes()
        if id in (shipped_cause.id, shipped_cause.verdict)
    ]
    lines = tuple(line for cause in causes for line in _lines(cause))
    return TopicPage(kind="verdict", id=id, title=id, lines=lines)


def _lines(cause: Cause) -> tuple[tuple[str, str], ...]:
    evidence = [f"its share of all latency is at least {cause.least:.0%}", *cause.when]
    flags = "; ".join(f"{server}: {flag}" for server, flag in cause.flag.items())
    return (
        (cause.id, cause.verdict),
        ("found when", ", ".join(evidence)),
        ("fix", cause.fix),
        ("flag", flags),
        ("trade-off", cause.trade_off),
        ("will not help", cause.not_help),
        ("also explains", ", ".join(cause.explains)),
    )
