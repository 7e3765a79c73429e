"""Verdicts of `ridgeline diagnose`, and the causes behind them."""

from __future__ import annotations

from collections.abc import Mapping

from ridgeline.diagnose.rules.causes import Cause, shipped_causes
from ridgeline.workflows.explain.topics.base import Known, Page


def names() -> Mapping[str, str]:
    """Verdicts and ids of causes."""
    found = {each.id: each.id for each in shipped_causes()}
    return found | {each.verdict: each.verdict for each in shipped_causes()}


def page(id: str, known: Known) -> Page:
    """All causes of a verdict, or one cause."""
    causes = [each for each in shipped_causes() if id in (each.id, each.verdict)]
    lines = tuple(line for cause in causes for line in _lines(cause))
    return Page(kind="verdict", id=id, title=id, lines=lines)


def _lines(cause: Cause) -> tuple[tuple[str, str], ...]:
    evidence = [f"its share of all latency is at least {cause.least:.0%}", *cause.when]
    flags = "; ".join(f"{server}: {flag}" for server, flag in cause.flag.items())
    return (
        (cause.id, cause.verdict),
        ("found when", ", ".join(evidence)),
        ("mend", cause.fix),
        ("flag", flags),
        ("costs", cause.trade_off),
        ("does not", cause.not_help),
        ("explains", ", ".join(cause.explains)),
    )
