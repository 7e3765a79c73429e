"""Comparison of A and B: the interval covers, the verdict is cautious, the rounds alternate."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.errors import BadInput
from ridgeline.measure.compare import compare, interleave


def test_a_clear_gain():
    found = compare([1.0, 1.1, 0.9, 1.0], [2.0, 2.3, 1.8, 2.1])
    assert found.verdict == "better"
    assert found.ratio == pytest.approx(2.05, rel=0.02)
    assert 1.9 < found.low < found.ratio < found.high < 2.2
    assert str(found).startswith("x2.05 [")


def test_drift_that_both_share_cancels():
    drift = [1.0, 1.5, 2.5, 4.0]
    found = compare(drift, [1.1 * d for d in drift])
    assert found.ratio == pytest.approx(1.1)
    assert found.verdict == "better"


def test_the_direction_turns_the_verdict():
    a, b = [1.0, 1.1, 1.0], [2.0, 2.1, 2.1]
    assert compare(a, b, better_is="lower").verdict == "worse"
    assert compare(b, a, better_is="lower").verdict == "better"
    assert compare(b, a).verdict == "worse"


def test_noise_one_round_and_small_effects_conclude_nothing():
    assert compare([1.0, 2.0, 1.0], [2.0, 1.0, 1.1]).verdict == "inconclusive"
    one = compare([1.0], [9.0])
    assert (one.verdict, one.low, one.high) == ("inconclusive", 0.0, math.inf)
    a, b = [1.0, 1.0, 1.0], [1.011, 1.010, 1.012]
    assert compare(a, b).verdict == "better"
    assert compare(a, b, min_effect=0.02).verdict == "inconclusive"
    assert compare(a, a).verdict == "inconclusive"


def test_the_interval_is_students(monkeypatch):
    found = compare([1.0, 1.0], [math.e, math.e**3], confidence=0.95)
    # log-ratios 1 and 3: mean 2, standard error 1, t(1, 0.975) = 12.706
    assert math.log(found.low) == pytest.approx(2 - 12.7062, abs=1e-3)
    assert math.log(found.high) == pytest.approx(2 + 12.7062, abs=1e-3)


def test_the_interval_covers_as_often_as_it_says():
    rng = random.Random(4)
    covered = 0
    for _ in range(600):
        a = [math.exp(rng.gauss(0, 0.1)) for _ in range(4)]
        b = [1.3 * math.exp(rng.gauss(0, 0.1)) for _ in range(4)]
        found = compare(a, b)
        covered += found.low <= 1.3 <= found.high
    assert 0.92 < covered / 600 < 0.98


def test_zeros_have_no_ratio_but_may_be_beaten():
    gained = compare([0.0, 0.0, 0.0], [1.0, 2.0, 1.0])
    assert (gained.verdict, gained.ratio) == ("better", math.inf)
    assert compare([1.0, 2.0, 1.0], [0.0, 0.0, 1e-3]).verdict == "worse"
    assert compare([0.0, 0.0], [1.0, 1.0]).verdict == "inconclusive"  # too few rounds
    assert compare([0.0, 0.0, 1.0], [1.0, 1.0, 1.0]).verdict == "inconclusive"
    assert compare([0.0], [0.0]).ratio == 1.0


@pytest.mark.parametrize(
    ("a", "b"), [([], []), ([1.0], [1.0, 2.0]), ([-1.0], [1.0]), ([math.nan], [1.0])]
)
def test_values_without_sense_are_refused(a, b):
    with pytest.raises(BadInput):
        compare(a, b)
    with pytest.raises(BadInput):
        compare([1.0], [1.0], confidence=1.0)


positive = st.floats(1e-3, 1e3)


@given(st.lists(st.tuples(positive, positive), min_size=2, max_size=8))
def test_swapping_the_sides_mirrors_the_result(pairs):
    a, b = [p[0] for p in pairs], [p[1] for p in pairs]
    there, back = compare(a, b), compare(b, a)
    assert there.ratio == pytest.approx(1 / back.ratio)
    assert there.low == pytest.approx(1 / back.high if back.high < math.inf else 0.0, rel=1e-6)
    mirror = {"better": "worse", "worse": "better", "inconclusive": "inconclusive"}
    assert back.verdict == mirror[there.verdict]


async def test_rounds_alternate_and_may_end_early():
    order = []

    def side(name):
        async def run(number):
            order.append(f"{name}{number}")
            return float(number)

        return run

    a, b = await interleave(side("a"), side("b"), 9, go_on=lambda a, b: len(a) < 3)
    assert order == ["a0", "b0", "b1", "a1", "a2", "b2"]
    assert a == b == [0.0, 1.0, 2.0]
