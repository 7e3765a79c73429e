"""The verdict on a run: what bounds it, in one sentence with its evidence.

The order of the rule book matters. If the machine was busy or the client at its limit, every other
number describes that; if the KV cache is too small, the engine does work twice; if requests queue,
faster steps would not remove the wait at once. Only then does it matter which side of the roofline
the steps are on.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ridgeline.diagnose.conditions import Facts, Value, all_hold, fill, named_in, parse
from ridgeline.diagnose.rules.rulebook import Bound, Headline, shipped_rules
from ridgeline.report.numbers import rounded
from ridgeline.roofline import Peaks, RooflinePoint

ALWAYS_SHOWN = ("idle_share", "mbu_share", "mfu_share")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A bound, a sentence that explains it, and the facts it is based on."""

    bound: Bound
    sentence: str
    evidence: dict[str, Value]


def verdict(facts: Facts) -> Finding:
    """The bound of a run, from the facts of `ridgeline.diagnose.facts.facts_of`."""
    headlines = [rule.headline for rule in shipped_rules() if rule.headline is not None]
    for headline in headlines:
        conditions = tuple(map(parse, headline.when))
        if conditions and all_hold(conditions, facts):
            names = {condition.name for condition in conditions}
            return _finding(headline, sorted(names | named_in(headline.sentence)), facts)
    by_share = {headline.share: headline for headline in headlines if headline.share is not None}
    shares = {name: _number(facts, name) for name in by_share}
    if not any(shares.values()):
        return Finding(
            bound="unknown",
            sentence="The bound is unknown: this server reports nothing about its steps.",
            evidence={},
        )
    largest = by_share[max(shares, key=lambda name: shares[name])]
    return _finding(largest, (*by_share, *ALWAYS_SHOWN), facts)


def verdict_of_point(point: RooflinePoint, peaks: Peaks) -> Finding:
    """The bound of one phase: its side of the ridge, or overhead below half of its roof."""
    side: Bound = "bandwidth" if point.intensity < peaks.ridge else "compute"
    bound: Bound = side if point.share_of_roof >= 0.5 else "overhead"
    sentence = (
        f"{point.phase}: {rounded(point.intensity)} FLOP/byte ({side} side; "
        f"ridge at {rounded(peaks.ridge)}), {rounded(point.achieved_flops_s / 1e9)} GFLOP/s = "
        f"{100 * point.share_of_roof:.0f}% of its roof"
    )
    if bound == "overhead":
        sentence += ", so the rest is overhead"
    evidence: dict[str, Value] = {
        "intensity": point.intensity,
        "achieved_flops_s": point.achieved_flops_s,
        "roof_flops_s": point.roof_flops_s,
    }
    return Finding(bound=bound, sentence=sentence + ".", evidence=evidence)


def _finding(headline: Headline, evidence: Iterable[str], facts: Facts) -> Finding:
    return Finding(
        bound=headline.bound,
        sentence=fill(headline.sentence, facts),
        evidence={name: facts[name] for name in evidence if name in facts},
    )


def _number(facts: Facts, name: str) -> float:
    value = facts.get(name)
    return float(value) if isinstance(value, int | float) else 0.0
