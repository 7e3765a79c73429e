"""Rules from symptom to cause to fix, read from rules.toml; a rule needs its evidence to hold."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec

from ridgeline.diagnose.conditions import Condition, Facts, all_hold, fill, parse


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One rule.

    Its texts may contain `{fact}` placeholders; `rung`: the ladder row that applies the fix.
    """

    id: str
    symptom: str
    cause: str
    evidence: tuple[Condition, ...]
    fix: str
    gain: str
    trade_off: str
    not_when: str
    rung: str | None = None


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """A rule whose evidence holds, with the numbers of the run filled in."""

    rule: str
    symptom: str
    cause: str
    fix: str
    gain: str
    trade_off: str
    not_when: str
    evidence: tuple[str, ...]
    rung: str | None = None


@cache
def shipped() -> tuple[Rule, ...]:
    """The rules of this package."""
    return read(
        files("ridgeline.diagnose.rules").joinpath("rules.toml").read_text(encoding="utf-8")
    )


def read(text: str) -> tuple[Rule, ...]:
    """Parse rules from TOML.

    Raises ValueError for an unknown key and TypeError for a missing one.
    """
    return tuple(_rule(row) for row in tomllib.loads(text).get("rule", ()))


def _rule(row: dict[str, Any]) -> Rule:
    known = set(Rule.__struct_fields__)
    if unknown := sorted(set(row) - known):
        raise ValueError(f"rule {row.get('id')!r}: unknown key {unknown[0]!r}")
    return Rule(**{**row, "evidence": tuple(parse(text) for text in row["evidence"])})


def advise(facts: Facts, rules: tuple[Rule, ...] | None = None) -> tuple[Advice, ...]:
    """Advice from every rule whose evidence holds, in the order of the file."""
    chosen = shipped() if rules is None else rules
    return tuple(_advice(rule, facts) for rule in chosen if all_hold(rule.evidence, facts))


def _advice(rule: Rule, facts: Facts) -> Advice:
    texts = {
        name: fill(getattr(rule, name), facts)
        for name in ("symptom", "cause", "fix", "gain", "trade_off", "not_when")
    }
    evidence = tuple(condition.explain(facts) for condition in rule.evidence)
    return Advice(rule=rule.id, evidence=evidence, rung=rule.rung, **texts)
