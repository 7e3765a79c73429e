"""Intervals against tables, verdicts against definitions, dollars by hand."""

from __future__ import annotations

import math
import random

import pytest

from ridgeline.optimize.cost import Price, cost_of
from ridgeline.optimize.stats import Interval, judge, mean_interval, ratio_interval, student_t


def test_student_t_is_the_tables() -> None:
    assert student_t(0.95, 3) == pytest.approx(4.303, abs=1e-3)
    assert student_t(0.99, 6) == pytest.approx(4.032, abs=1e-3)
    assert student_t(0.95, 1) == math.inf


def test_a_ratio_and_its_interval_by_hand() -> None:
    found = ratio_interval([math.log(2.0), math.log(2.0), math.log(2.0)], least_sd=0.1)
    assert found.mid == pytest.approx(2.0)
    half = 4.3027 * 0.1 / math.sqrt(3)
    assert found.low == pytest.approx(2 * math.exp(-half), rel=1e-3)
    assert found.high == pytest.approx(2 * math.exp(half), rel=1e-3)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng = random.Random(1)
    covered = 0
    for _ in range(2000):
        found = mean_interval([rng.gauss(0.3, 1.0) for _ in range(5)])
        covered += found.low <= 0.3 <= found.high
    assert 0.935 < covered / 2000 < 0.965


@pytest.mark.parametrize(
    ("low", "mid", "high", "outcome"),
    [
        (1.05, 1.2, 1.4, "gain"),
        (1.005, 1.01, 1.015, "nothing"),
        (0.7, 0.8, 0.95, "loss"),
        (0.98, 1.01, 1.05, "nothing"),
        (0.6, 0.99, 1.07, "nothing"),
        (0.9, 1.1, 1.3, "unclear"),
    ],
)
def test_what_an_interval_lets_one_say(low: float, mid: float, high: float, outcome: str) -> None:
    assert judge(Interval(low=low, mid=mid, high=high)) == outcome


def test_dollars_per_million_tokens() -> None:
    """$3.60 per hour is 0.1 cent per second; at 1,000 tokens/s that is $1 per million."""
    found = cost_of(Price(dollars_per_hour=3.6, notional=False), 1000.0, 3000.0)
    assert found.output_dollars_per_mtok == pytest.approx(1.0)
    assert found.total_dollars_per_mtok == pytest.approx(0.25)
    assert cost_of(Price(), 0.0, 0.0).output_dollars_per_mtok is None
