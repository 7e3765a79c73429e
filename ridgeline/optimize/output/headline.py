"""The result of a search in one line, for the terminal, the report and the configuration file.

What qualifies a gain is said before the gain: no trial, a closing measurement that contradicts the
trials, an SLO that was not met.
"""

from __future__ import annotations

from ridgeline.optimize.output import number_format
from ridgeline.optimize.result import LadderResult

OBJECTIVES = {"goodput": "goodput", "cost": "tokens per dollar", "latency": "speed"}


def headline(result: LadderResult) -> str:
    """The result in one line, with its interval."""
    if not result.trials:
        return f"No rung was tried: {_why_none(result)}"
    if result.reverted:
        return f"Nothing beat the baseline: {result.reverted}"
    if result.busy_share is not None and (not result.kept or result.total is None):
        doubt = f"the machine was busy ({result.busy_share:.0%} of the CPU taken)"
        return f"Inconclusive: {doubt}; {len(result.kept)} rung(s) kept"
    if result.ended == "budget spent" and all(t.verdict == "cut short" for t in result.trials):
        none = f"o rung came to a verdict: {_why_none(result)}"
        if result.slo_holds:
            return f"N{none}"
        return f"The SLO was not met: {_missed(result)}; n{none}"
    if not result.kept and not result.slo_holds:
        return f"The SLO was not met: {_missed(result)}; nothing beat the baseline ({result.ended})"
    if not result.kept:
        return f"Nothing beat the baseline on this machine ({result.ended})"
    if result.total is None:
        return (
            f"{len(result.kept)} rung(s) kept; the total was not measured against the baseline "
            f"({result.ended})"
        )
    gain = _gain(result)
    return gain if result.slo_holds else f"The SLO was not met: {_missed(result)}; {gain}"


def _why_none(result: LadderResult) -> str:
    if result.ended == "budget spent":
        left_s = result.provenance.budget_s - result.provenance.spent_s
        costs = f"a trial takes {result.trial_cost_s:.0f} s"
        if result.closing_cost_s:
            costs += f" and the closing measurement {result.closing_cost_s:.0f} s"
        return f"{costs}, and {max(0.0, left_s):.0f} s were left"
    return "none is predicted to gain" if result.ended == "no gain predicted" else result.ended


def _gain(result: LadderResult) -> str:
    assert result.total is not None
    what = OBJECTIVES[result.provenance.objective]
    low, high = result.total.low, result.total.high
    doubt = "" if low > 1 else ": not certain to be a gain"
    return f"{result.total.mid:.1f}× the {what} ({low:.1f} to {high:.1f}, 95% interval){doubt}"


def _missed(result: LadderResult) -> str:
    final = result.final.measured
    return (
        f"{number_format.share(final.attainment_share)} of the final requests met it "
        f"(TTFT p95 {number_format.duration(final.ttft_p95_s)}, "
        f"TPOT p95 {number_format.duration(final.tpot_p95_s)})"
    )
