"""Outcomes against their definitions, dollars by hand."""

from __future__ import annotations

import pytest

from ridgeline.optimize.comparison.outcome import outcome_of
from ridgeline.optimize.cost import MachinePrice, cost_of
from ridgeline.stats import Interval


@pytest.mark.parametrize(
    ("low", "mid", "high", "outcome"),
    [
        (1.05, 1.2, 1.4, "improved"),
        (1.005, 1.01, 1.015, "unchanged"),
        (0.7, 0.8, 0.95, "regressed"),
        (0.98, 1.01, 1.05, "unchanged"),
        (0.6, 0.99, 1.07, "unchanged"),
        (0.9, 1.1, 1.3, "inconclusive"),
    ],
)
def test_verdict_from_an_interval(low: float, mid: float, high: float, outcome: str) -> None:
    assert outcome_of(Interval(low=low, mid=mid, high=high)) == outcome


def test_dollars_per_million_tokens() -> None:
    """$3.60 per hour is 0.1 cent per second; at 1,000 tokens/s that is $1 per million."""
    found = cost_of(MachinePrice(dollars_per_hour=3.6, notional=False), 1000.0, 3000.0)
    assert found.output_dollars_per_mtok == pytest.approx(1.0)
    assert found.total_dollars_per_mtok == pytest.approx(0.25)
    assert cost_of(MachinePrice(), 0.0, 0.0).output_dollars_per_mtok is None
