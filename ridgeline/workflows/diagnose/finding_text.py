"""Findings and losses of a diagnosis in words, for the console and the page."""

from __future__ import annotations

from ridgeline.diagnose import LatencyLosses, RankedFinding
from ridgeline.diagnose.conditions import written

MIN_SHARE = 0.005  # smaller losses are not listed
NO_FINDING = "no cause accounts for enough of the latency to be worth fixing"


def finding_lines(finding: RankedFinding) -> dict[str, str]:
    """The details of a finding by name."""
    gain, more = finding.gain, finding.with_consequences - finding.gain.mid
    parts = []
    if gain.mid >= MIN_SHARE:
        parts.append(f"up to {gain.mid:.0%} of latency [{gain.low:.0%}, {gain.high:.0%}]")
    if more > 0.01:
        of = "" if parts else " of latency"
        parts.append(f"{'and ' if parts else ''}up to {more:.0%}{of} in consequences of this cause")
    evidence = ", ".join(f"{name} = {written(name, finding.evidence)}" for name in finding.evidence)
    return {
        "fix": finding.fix,
        "flag": finding.flag,
        "gain": ", ".join(parts) or "not seen in the latency",
        "trade-off": finding.trade_off,
        "will not help": finding.not_help,
        "evidence": evidence,
    }


def shares_line(losses: LatencyLosses) -> str:
    """The losses with their shares of all latency, largest first."""
    rows = sorted(losses.shares.items(), key=lambda item: -item[1].mid)
    return ", ".join(f"{name} {share.mid:.0%}" for name, share in rows if share.mid >= MIN_SHARE)


def no_finding(losses: LatencyLosses | None, missed_share: float = 0.0) -> str:
    """What is known without a finding: how many requests missed the SLO, and the largest loss."""
    missed = f"{missed_share:.0%} of the requests missed the SLO, and " if missed_share else ""
    text = missed + NO_FINDING
    if losses is not None:
        name, share = max(losses.shares.items(), key=lambda item: item[1].mid)
        text += f"; the largest part is {name.replace('_', ' ')} ({share.mid:.0%})"
    return text


def first_finding(
    findings: tuple[RankedFinding, ...],
    losses: LatencyLosses | None = None,
    missed_share: float = 0.0,
) -> str:
    """The most worthwhile finding as a sentence. `missed_share`: requests that missed the SLO."""
    if not findings:
        text = no_finding(losses, missed_share)
        return f"{text[0].upper()}{text[1:]} (`ridgeline diagnose`)."
    first = findings[0]
    return f"{first.verdict.capitalize()}: {first.sentence} {first.fix} Here: {first.flag}."
