"""Rank the rules by the latency losses of a run.

The score of a rule is the share of its own loss in the total latency plus the shares of the losses
that it explains, so that a queue behind slow steps counts towards the reason why they are slow.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec

from ridgeline.diagnose.conditions import Condition, Facts, all_hold, fill, named_in, parse
from ridgeline.diagnose.losses.latency_losses import LatencyLosses
from ridgeline.diagnose.rules.rulebook import LossCondition, Rule, Server, Verdict, shipped_rules
from ridgeline.stats import Interval


class RankedFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A rule that holds, with the numbers of the run. `cause`: its name.

    `gain`: upper bound of the share of latency that a fix recovers. `with_consequences`: the same
    including the losses that the rule explains.
    """

    cause: str
    verdict: Verdict
    sentence: str
    gain: Interval
    with_consequences: float
    evidence: dict[str, Any]
    fix: str
    flag: str
    trade_off: str
    not_help: str


@cache
def _conditions(texts: tuple[str, ...]) -> tuple[Condition, ...]:
    return tuple(map(parse, texts))


def findings(
    losses: LatencyLosses, facts: Facts, server: Server = "ridgeline"
) -> tuple[RankedFinding, ...]:
    """All rules that hold, the one with the largest loss (with consequences) first."""
    known = {**facts, **{f"loss_{name}_share": s.mid for name, s in losses.shares.items()}}
    ranked = [
        (observed.first, _ranked(rule, observed, losses.shares, known, server))
        for rule in shipped_rules()
        if (observed := rule.losses) is not None and _holds(observed, losses.shares, known)
    ]
    ranked.sort(key=lambda pair: (not pair[0], -pair[1].with_consequences))
    return tuple(finding for _, finding in ranked)


def _holds(observed: LossCondition, shares: Mapping[str, Interval], facts: Facts) -> bool:
    if shares[observed.loss].mid < observed.least:
        return False
    if observed.unless and all_hold(_conditions(observed.unless), facts) is True:
        return False
    return all_hold(_conditions(observed.when), facts) is True


def _ranked(
    rule: Rule,
    observed: LossCondition,
    shares: Mapping[str, Interval],
    facts: Facts,
    server: Server,
) -> RankedFinding:
    own = shares[observed.loss]
    names = {condition.name for condition in _conditions(observed.when)}
    names |= named_in(observed.sentence) | {f"loss_{observed.loss}_share"}
    return RankedFinding(
        cause=rule.id,
        verdict=rule.verdict,
        sentence=fill(observed.sentence, facts),
        gain=own,
        with_consequences=own.mid + sum(shares[loss].mid for loss in observed.explains),
        evidence={name: facts[name] for name in sorted(names) if name in facts},
        fix=rule.fix,
        flag=rule.flag_for(server),
        trade_off=rule.trade_off,
        not_help=rule.not_help,
    )
