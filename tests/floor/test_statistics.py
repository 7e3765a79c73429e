"""Intervals against tables and simulations, tests against scipy, percentiles against numpy."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, ttest_ind

from ridgeline.stats import (
    NO_PRIOR,
    UNBOUNDED,
    Interval,
    Prior,
    add_log_error,
    compare_paired,
    compare_series,
    compare_unpaired,
    halves_differ,
    mean_interval,
    percentile,
    ratio_interval,
    ratio_of_sums_interval,
    row_statistic,
    student_t,
    wilson_interval,
)


def test_student_t_agrees_with_the_tables() -> None:
    assert student_t(0.95, 3) == pytest.approx(4.303, abs=1e-3)
    assert student_t(0.99, 6) == pytest.approx(4.032, abs=1e-3)
    assert student_t(0.95, 1) == math.inf


def test_ratio_interval_by_hand() -> None:
    interval = ratio_interval([math.log(2.0)] * 3, least_sd=0.1)
    half = 4.3027 * 0.1 / math.sqrt(3)
    assert interval.mid == pytest.approx(2.0)
    assert interval.low == pytest.approx(2 * math.exp(-half), rel=1e-3)
    assert interval.high == pytest.approx(2 * math.exp(half), rel=1e-3)


def test_single_sample_has_an_unbounded_interval() -> None:
    interval = mean_interval([3.0])
    assert (interval.low, interval.mid, interval.high) == (-UNBOUNDED, 3.0, UNBOUNDED)
    assert str(interval).endswith("∞]")


def test_mean_interval_covers_the_mean_at_its_level() -> None:
    rng = random.Random(1)
    covered = 0
    for _ in range(2000):
        interval = mean_interval([rng.gauss(0.3, 1.0) for _ in range(5)])
        covered += interval.low <= 0.3 <= interval.high
    assert 0.935 < covered / 2000 < 0.965


def test_prior_narrows_an_interval_of_few_samples() -> None:
    samples = [0.9, 1.1, 1.3]
    alone, moderated = mean_interval(samples), mean_interval(samples, prior=Prior(0.04, 20))
    assert mean_interval(samples, prior=NO_PRIOR) == alone
    assert moderated.mid == alone.mid
    assert moderated.high - moderated.low < 0.5 * (alone.high - alone.low)


def test_independent_log_error_adds_in_quadrature() -> None:
    ratio = Interval(low=1 / 1.3, mid=1.0, high=1.3)
    same = add_log_error(ratio, 0.0)
    assert (same.low, same.high) == pytest.approx((ratio.low, ratio.high))
    wider = add_log_error(ratio, 0.1)
    assert math.log(wider.high) == pytest.approx(math.hypot(math.log(1.3), 1.96 * 0.1), rel=1e-4)


@pytest.mark.slow
@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_interval_agrees_with_scipy(case: tuple[int, int]) -> None:
    successes, total = case
    expected = binomtest(successes, total).proportion_ci(0.95, method="wilson")
    interval = wilson_interval(successes, total)
    ends = (interval.low, interval.high)
    assert ends == pytest.approx((expected.low, expected.high), abs=1e-9)
    assert interval.low <= interval.mid <= interval.high


values = st.lists(st.floats(0, 1e6), min_size=1, max_size=50)


@pytest.mark.slow
@given(values, st.floats(0, 100))
def test_percentiles_are_those_of_numpy(values: list[float], q: float) -> None:
    assert percentile(values, q) == pytest.approx(np.percentile(values, q), abs=1e-6)


@pytest.mark.slow
@given(values, st.integers(1, 20), st.floats(0, 100))
def test_failing_never_improves_a_percentile(values: list[float], failed: int, q: float) -> None:
    with_failures = percentile([*values, *[math.inf] * failed], q)
    assert not math.isnan(with_failures)
    assert with_failures >= percentile(values, q) - 1e-6


def test_percentile_of_infinite_neighbours_is_the_larger() -> None:
    assert percentile([1.0, math.inf], 0) == 1.0
    assert percentile([1.0, math.inf], 1) == math.inf
    assert percentile([math.inf, math.inf], 50) == math.inf
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_share_of_a_total_with_its_bootstrap_interval() -> None:
    rng = random.Random(3)
    totals = [rng.uniform(1, 2) for _ in range(200)]
    interval = ratio_of_sums_interval([0.3 * t * rng.uniform(0.5, 1.5) for t in totals], totals)
    assert interval.low < interval.mid < interval.high
    assert interval.mid == pytest.approx(0.3, rel=0.1)
    assert interval.high - interval.low < 0.05
    one = ratio_of_sums_interval([1.0], [4.0])
    assert (one.low, one.mid, one.high) == (0.25, 0.25, 0.25)


def test_drift_shared_by_both_sides_cancels() -> None:
    drift = [1.0, 1.5, 2.5, 4.0]
    ratio = compare_paired(drift, [1.1 * d for d in drift])
    assert math.exp(ratio.mid) == pytest.approx(1.1)
    assert ratio.low > 0 and ratio.p_value == 0.0


def test_paired_interval_is_students() -> None:
    ratio = compare_paired([1.0, 1.0], [math.e, math.e**3])
    # Log-ratios 1 and 3: mean 2, standard error 1, t(1, 0.975) = 12.706.
    assert (ratio.mid, ratio.error) == pytest.approx((2.0, 1.0))
    assert (ratio.low, ratio.high) == pytest.approx((2 - 12.7062, 2 + 12.7062), abs=1e-3)


@pytest.mark.slow
def test_paired_interval_covers_the_ratio_at_its_level() -> None:
    rng = random.Random(4)
    covered = 0
    for _ in range(600):
        a = [math.exp(rng.gauss(0, 0.1)) for _ in range(4)]
        b = [1.3 * math.exp(rng.gauss(0, 0.1)) for _ in range(4)]
        ratio = compare_paired(a, b)
        covered += ratio.low <= math.log(1.3) <= ratio.high
    assert 0.92 < covered / 600 < 0.98


def test_unpaired_test_is_welchs() -> None:
    a, b = [1.0, 1.2, 0.9], [1.5, 1.4, 1.9, 1.6]
    ratio = compare_unpaired(a, b)
    expected = ttest_ind(np.log(b), np.log(a), equal_var=False)
    assert ratio.p_value == pytest.approx(expected.pvalue)
    assert ratio.mid / ratio.error == pytest.approx(expected.statistic)


def test_equal_values_do_not_differ() -> None:
    for test in (compare_paired, compare_unpaired):
        ratio = test([2.0, 2.0], [2.0, 2.0])
        assert (ratio.mid, ratio.p_value) == (0.0, 1.0)


positive = st.floats(1e-3, 1e3)


@pytest.mark.slow
@given(st.lists(st.tuples(positive, positive), min_size=2, max_size=8))
def test_swapping_the_sides_mirrors_the_ratio(pairs: list[tuple[float, float]]) -> None:
    a, b = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    there, back = compare_paired(a, b), compare_paired(b, a)
    assert there.mid == pytest.approx(-back.mid, abs=1e-9)
    assert there.low == pytest.approx(-back.high, rel=1e-6, abs=1e-9)
    assert there.p_value == pytest.approx(back.p_value, abs=1e-9)


def queue(rng: random.Random, factor: float, count: int = 400) -> list[float]:
    """Dependent latencies: the logarithm follows an autoregression."""
    level, series = 0.0, []
    for _ in range(count):
        level = 0.8 * level + rng.gauss(0, 0.1)
        series.append(factor * math.exp(level))
    return series


@pytest.mark.slow
def test_block_bootstrap_is_honest_about_dependent_requests() -> None:
    rng = random.Random(5)
    wrong = 0
    for _ in range(100):
        ratio = compare_series(queue(rng, 1), queue(rng, 1), row_statistic("mean"), paired=False)
        wrong += not ratio.low <= 0 <= ratio.high
    assert wrong <= 15  # drawing single requests would be wrong in about 50
    ratio = compare_series(queue(rng, 1), queue(rng, 1.5), row_statistic("p50"), paired=False)
    assert ratio.low > 0 and ratio.p_value < 0.05


def test_halves_of_a_series_differ_only_where_it_drifts() -> None:
    rng = random.Random(6)
    steady = [rng.lognormvariate(0, 0.3) for _ in range(200)]
    assert not halves_differ(steady)
    assert halves_differ([x * (1 + i / 200) for i, x in enumerate(steady)])
