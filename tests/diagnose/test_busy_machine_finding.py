"""A busy machine is the first finding; a missed SLO never goes without a word."""

from __future__ import annotations

from ridgeline.diagnose.losses.latency_losses import LOSSES, LatencyLosses
from ridgeline.diagnose.rules.findings import findings
from ridgeline.diagnose.rules.rulebook import shipped_rules
from ridgeline.records import BUSY_SHARE
from ridgeline.stats import Interval
from ridgeline.workflows.diagnose.finding_text import finding_lines, first_finding


def losses(**shares: float) -> LatencyLosses:
    return LatencyLosses(
        shares={
            name: Interval(low=share, mid=share, high=share)
            for name in LOSSES
            for share in [shares.get(name, 0.0)]
        },
        num_requests=40,
        total_s=10.0,
    )


def test_busy_machine_is_found_first() -> None:
    facts = {"machine_taken_share": 0.84, "gap_p50_s": 0.01, "plan_p50_s": 0.0, "step_p50_s": 0.02}
    ranked = findings(losses(host=0.6), facts)
    assert ranked[0].cause == "machine-busy"
    assert "84" in ranked[0].sentence
    assert len(ranked) > 1
    gains = [finding_lines(finding)["gain"] for finding in ranked]
    assert "not seen" in gains[0] and gains[1].startswith("up to 60% of latency")


def test_finding_and_comparison_draw_the_same_line() -> None:
    rule = next(rule for rule in shipped_rules() if rule.id == "machine-busy")
    assert rule.losses is not None and rule.headline is not None
    assert rule.losses.when == rule.headline.when == (f"machine_taken_share > {BUSY_SHARE:g}",)


def test_quiet_machine_is_no_finding() -> None:
    assert not findings(losses(decode=0.75), {"machine_taken_share": 0.04})


def test_missed_slo_without_a_cause_is_reported_with_its_largest_part() -> None:
    text = first_finding((), losses(decode=0.75), 0.28)
    assert text.startswith("28% of the requests missed the SLO")
    assert "the largest part is decode (75%)" in text
