"""The rules that the figures of a run call for."""

from __future__ import annotations

import msgspec

from ridgeline.diagnose.conditions import Facts, all_hold, fill, parse
from ridgeline.diagnose.rules.rulebook import FigureCondition, Rule, shipped_rules


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """A rule whose condition on figures holds, with the numbers of the run filled in."""

    rule: str
    symptom: str
    cause: str
    fix: str
    gain: str
    trade_off: str
    not_when: str
    evidence: tuple[str, ...]
    rung: str | None = None


def advise(facts: Facts, rules: tuple[Rule, ...] | None = None) -> tuple[Advice, ...]:
    """Advice from every rule that the figures call for, in the order of the rule book."""
    chosen = shipped_rules() if rules is None else rules
    return tuple(
        _advice(rule, observed, facts)
        for rule in chosen
        if (observed := rule.figures) is not None
        and all_hold(tuple(map(parse, observed.when)), facts)
    )


def _advice(rule: Rule, observed: FigureCondition, facts: Facts) -> Advice:
    return Advice(
        rule=rule.id,
        symptom=fill(observed.symptom, facts),
        cause=fill(observed.cause, facts),
        fix=rule.fix,
        gain=fill(observed.gain, facts),
        trade_off=rule.trade_off,
        not_when=rule.not_when,
        evidence=tuple(parse(text).explain(facts) for text in observed.when),
        rung=rule.rung,
    )
