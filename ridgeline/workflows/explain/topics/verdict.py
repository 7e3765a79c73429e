"""Verdicts of `diagnose` and headlines of `bench`: the rules of the rule book behind them."""

from __future__ import annotations

from collections.abc import Mapping

from ridgeline.diagnose.rules.rulebook import Rule, shipped_rules
from ridgeline.workflows.explain.topics.base import TopicContext, TopicPage

_OTHER_NAMES = {
    "not bound at this load": "not-bound",
    "not bound": "not-bound",
    "memory-bound": "bandwidth-bound",
    "bandwidth": "bandwidth-bound",
    "compute": "compute-bound",
    "overhead": "overhead-bound",
}


def names() -> Mapping[str, str]:
    """Names of rules, their verdicts, and the bounds that headlines begin with."""
    words = {word: word for rule in shipped_rules() for word in _words(rule)}
    return _OTHER_NAMES | words


def page(id: str, context: TopicContext) -> TopicPage:
    """All rules of a verdict or a bound, or one rule."""
    rules = [rule for rule in shipped_rules() if id in _words(rule)]
    lines = tuple(line for rule in rules for line in _lines(rule))
    return TopicPage(kind="verdict", id=id, title=id, lines=lines)


def _words(rule: Rule) -> set[str]:
    words = {rule.id, rule.verdict}
    return words | ({f"{rule.headline.bound}-bound"} if rule.headline else set())


def _lines(rule: Rule) -> tuple[tuple[str, str], ...]:
    flags = "; ".join(f"{server}: {flag}" for server, flag in rule.flag.items())
    return (
        (rule.id, rule.verdict),
        *_conditions(rule),
        ("fix", rule.fix),
        ("flag", flags),
        ("trade-off", rule.trade_off),
        ("will not help", rule.not_help),
        ("not when", rule.not_when),
        ("also explains", ", ".join(rule.losses.explains) if rule.losses else ""),
    )


def _conditions(rule: Rule) -> tuple[tuple[str, str], ...]:
    """When the rule holds, by the place from which it is observed."""
    losses, figures, headline, alert = rule.losses, rule.figures, rule.headline, rule.alert
    lines = []
    if losses:
        least = f"{losses.loss} takes at least {losses.least:.0%} of all latency"
        lines.append(("diagnose", ", ".join((least, *losses.when))))
    if figures:
        lines.append(("advice of optimize", ", ".join(figures.when)))
    if headline:
        share = f"{headline.share} is the largest such share"
        lines.append(("headline of bench", ", ".join(headline.when) or share))
    if alert:
        expr = alert.expr.replace("{", "").replace("}", "")
        lines.append(("alert", f"{expr} for {alert.lasts}"))
    return tuple(lines)
