"""Symptom -> cause -> fix, read from rules.toml and spoken only where the evidence holds."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec

from ridgeline.diagnose.conditions import Condition, Facts, all_hold, fill, parse


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One row. The texts may hold `{fact}` places; `rung` is the ladder row of the fix."""

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
    """A rule that spoke, with this run's numbers in it."""

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
    """Rules from TOML; a row with an unknown or missing key is an error that names it."""
    return tuple(_rule(row) for row in tomllib.loads(text).get("rule", ()))


def _rule(row: dict[str, Any]) -> Rule:
    known = set(Rule.__struct_fields__)
    if unknown := sorted(set(row) - known):
        raise ValueError(f"rule {row.get('id')!r}: unknown key {unknown[0]!r}")
    return Rule(**{**row, "evidence": tuple(parse(text) for text in row["evidence"])})


def advise(facts: Facts, rules: tuple[Rule, ...] | None = None) -> tuple[Advice, ...]:
    """Every rule whose evidence holds in these facts, in the order of the file."""
    chosen = shipped() if rules is None else rules
    return tuple(_advice(rule, facts) for rule in chosen if all_hold(rule.evidence, facts))


def _advice(rule: Rule, facts: Facts) -> Advice:
    texts = {
        name: fill(getattr(rule, name), facts)
        for name in ("symptom", "cause", "fix", "gain", "trade_off", "not_when")
    }
    evidence = tuple(condition.explain(facts) for condition in rule.evidence)
    return Advice(rule=rule.id, evidence=evidence, rung=rule.rung, **texts)
