"""Percentiles, confidence intervals and tests for small numbers of noisy measurements.

numpy and scipy do the arithmetic; both are imported on first use, because importing `scipy.stats`
takes a second. Ratios are compared on a logarithmic scale, where a speed-up of 2 and a slow-down
of 2 are equally far from no change.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from ridgeline.report.numbers import rounded

Outcome = Literal["improved", "regressed", "unchanged", "inconclusive"]
"""Every comparison ends in one of these four."""

LEVEL = 0.95
UNBOUNDED = 1e9  # stands for an unbounded end of an interval, because JSON has no infinity
NUM_DRAWS = 1000


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """An estimate and its confidence interval, in the unit of the estimate."""

    low: float
    mid: float
    high: float
    level: float = LEVEL

    def __str__(self) -> str:
        high = "∞" if self.high >= UNBOUNDED else rounded(self.high)
        return f"{rounded(self.mid)} [{rounded(self.low)}, {high}]"


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0 to 100), linear between order statistics as `numpy.percentile`.

    Next to an infinite value (a request that failed counts as one) there is nothing to interpolate:
    the larger neighbour is returned. Raises ValueError for no values.
    """
    import numpy as np

    if not len(values):
        raise ValueError("the percentile of no values is undefined")
    with np.errstate(invalid="ignore"):  # inf - inf
        value = float(np.percentile(values, q))
    return float(np.percentile(values, q, method="higher")) if math.isnan(value) else value


def student_t(level: float, num_samples: int) -> float:
    """Half-width of a two-sided Student interval in standard errors; infinite below two samples."""
    from scipy.special import stdtrit

    return math.inf if num_samples < 2 else float(stdtrit(num_samples - 1, (1 + level) / 2))


def normal_z(level: float) -> float:
    """Half-width of a two-sided normal interval in standard errors."""
    return statistics.NormalDist().inv_cdf((1 + level) / 2)


class Prior(msgspec.Struct, frozen=True):
    """A variance known from earlier samples, and the degrees of freedom that it is worth."""

    variance: float = 0.0
    freedom: int = 0


NO_PRIOR = Prior()


def mean_interval(
    samples: Sequence[float],
    *,
    level: float = LEVEL,
    least_sd: float = 0.0,
    widen: float = 1.0,
    prior: Prior = NO_PRIOR,
) -> Interval:
    """Student's interval of a mean; unbounded for a single sample.

    `least_sd` is the resolution of the instrument. `widen` multiplies the half-width, for samples
    that are not quite independent. `prior` moderates the variance: the weighted mean of both
    estimates by their degrees of freedom (Smyth, "Linear models and empirical Bayes methods",
    2004).
    """
    count = len(samples)
    mean = math.fsum(samples) / count
    if count < 2:
        return Interval(low=-UNBOUNDED, mid=mean, high=UNBOUNDED, level=level)
    squares = math.fsum((x - mean) ** 2 for x in samples)
    freedom = count - 1 + prior.freedom
    variance = (squares + prior.freedom * prior.variance) / freedom
    half = widen * student_t(level, freedom + 1) * math.sqrt(max(variance, least_sd**2) / count)
    return Interval(low=mean - half, mid=mean, high=mean + half, level=level)


def difference_interval(
    before: Sequence[float], after: Sequence[float], *, level: float = LEVEL
) -> Interval:
    """Student's interval of mean(after) - mean(before), unpaired, with a pooled variance.

    One value on one side is enough: the spread then comes from the other side.
    """
    means = [math.fsum(side) / len(side) for side in (before, after)]
    freedom = len(before) + len(after) - 2
    mid = means[1] - means[0]
    if freedom < 1:
        return Interval(low=-UNBOUNDED, mid=mid, high=UNBOUNDED, level=level)
    sides = zip((before, after), means, strict=True)
    squares = math.fsum((x - mean) ** 2 for side, mean in sides for x in side)
    error = math.sqrt(squares / freedom * (1 / len(before) + 1 / len(after)))
    half = student_t(level, freedom + 1) * error
    return Interval(low=mid - half, mid=mid, high=mid + half, level=level)


def ratio_interval(
    log_ratios: Sequence[float],
    *,
    level: float = LEVEL,
    least_sd: float = 0.0,
    widen: float = 1.0,
    prior: Prior = NO_PRIOR,
) -> Interval:
    """Interval of a ratio, from the logarithms of its samples (see `mean_interval`)."""
    logs = mean_interval(log_ratios, level=level, least_sd=least_sd, widen=widen, prior=prior)
    return Interval(
        low=math.exp(logs.low),
        mid=math.exp(logs.mid),
        high=math.exp(logs.high) if logs.high < 700 else math.inf,
        level=level,
    )


def add_log_error(ratio: Interval, standard_error: float) -> Interval:
    """Widen a ratio's interval by an independent normal error of its logarithm."""
    more = normal_z(ratio.level) * standard_error
    down = math.hypot(math.log(ratio.mid / ratio.low), more)
    up = math.hypot(math.log(ratio.high / ratio.mid), more)
    return Interval(
        low=ratio.mid * math.exp(-down),
        mid=ratio.mid,
        high=ratio.mid * math.exp(up) if up < 700 else math.inf,
        level=ratio.level,
    )


def wilson_interval(successes: int, total: int, level: float = LEVEL) -> Interval:
    """Wilson's score interval of a proportion (1927), sound for small counts and near 0 and 1."""
    if total == 0:
        return Interval(low=0.0, mid=0.0, high=1.0, level=level)
    z, share = normal_z(level), successes / total
    centre = share + z * z / (2 * total)
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    # Rounding must not push an end past the proportion itself.
    low, high = (centre - half) / scale, (centre + half) / scale
    return Interval(
        low=max(0.0, min(share, low)), mid=share, high=min(1.0, max(share, high)), level=level
    )


def proportion_upper_bound(successes: int, total: int, level: float = LEVEL) -> float:
    """One-sided upper bound of a proportion, exact for any count (Clopper and Pearson, 1934)."""
    from scipy.special import betaincinv

    if successes >= total:
        return 1.0
    return float(betaincinv(successes + 1, total - successes, level))


def ratio_of_sums_interval(parts: Sequence[float], totals: Sequence[float]) -> Interval:
    """Sum of `parts` over sum of `totals`, with its bootstrap interval over the pairs."""
    mid = math.fsum(parts) / math.fsum(totals)
    if len(parts) < 2:
        return Interval(low=mid, mid=mid, high=mid)
    from scipy.stats import bootstrap

    result = bootstrap(
        (parts, totals),
        lambda part, total, axis: part.sum(axis=axis) / total.sum(axis=axis),
        paired=True,
        vectorized=True,
        n_resamples=NUM_DRAWS,
        batch=max(1, 10_000_000 // len(parts)),
        confidence_level=LEVEL,
        method="percentile",
        random_state=0,
    )
    interval = result.confidence_interval
    return Interval(low=float(interval.low), mid=mid, high=float(interval.high))


class LogRatio(msgspec.Struct, frozen=True):
    """The logarithm of B/A: estimate, standard error, 95 % interval and two-sided p-value."""

    mid: float
    error: float
    low: float
    high: float
    p_value: float


def compare_paired(a: Sequence[float], b: Sequence[float]) -> LogRatio:
    """Paired t-test of the logarithms of B and A. Both have the same length, at least 2."""
    from scipy import stats

    before, after = [math.log(x) for x in a], [math.log(x) for x in b]
    differences = [y - x for x, y in zip(before, after, strict=True)]
    error = float(stats.sem(differences))
    return _log_ratio(statistics.fmean(differences), error, lambda: stats.ttest_rel(after, before))


def compare_unpaired(a: Sequence[float], b: Sequence[float]) -> LogRatio:
    """Welch's t-test of the logarithms of B and A. Both have at least 2 values."""
    from scipy import stats

    before, after = [math.log(x) for x in a], [math.log(x) for x in b]
    mid = statistics.fmean(after) - statistics.fmean(before)
    error = math.hypot(float(stats.sem(before)), float(stats.sem(after)))
    return _log_ratio(mid, error, lambda: stats.ttest_ind(after, before, equal_var=False))


def _log_ratio(mid: float, error: float, test: Callable[[], Any]) -> LogRatio:
    """`test` is not run on values without scatter, for which it is undefined."""
    if error < 1e-12:
        return LogRatio(mid, 1e-12, mid, mid, 1.0 if abs(mid) < 1e-12 else 0.0)
    result = test()
    interval = result.confidence_interval(LEVEL)
    return LogRatio(mid, error, float(interval.low), float(interval.high), float(result.pvalue))


def add_error(ratio: LogRatio, standard_error: float) -> LogRatio:
    """The ratio with an independent normal error added to its own."""
    error = math.hypot(ratio.error, standard_error)
    more = normal_z(LEVEL) * standard_error
    distribution = statistics.NormalDist()
    return LogRatio(
        mid=ratio.mid,
        error=error,
        low=ratio.mid - math.hypot(ratio.mid - ratio.low, more),
        high=ratio.mid + math.hypot(ratio.high - ratio.mid, more),
        p_value=min(1.0, max(ratio.p_value, 2 * distribution.cdf(-abs(ratio.mid) / error))),
    )


def hochberg(p_values: Sequence[float | None]) -> list[float | None]:
    """p-values of several tests, corrected for their number (Hochberg 1988); None: no test.

    The largest stays, the next is multiplied by two, and so on down to the smallest; none exceeds a
    larger one. Valid for tests that depend on each other positively, as metrics of one run do.
    """
    order = sorted(((p, i) for i, p in enumerate(p_values) if p is not None), reverse=True)
    corrected: list[float | None] = [None] * len(p_values)
    smallest = 1.0
    for rank, (p, i) in enumerate(order, 1):
        smallest = min(smallest, rank * p)
        corrected[i] = smallest
    return corrected


def compare_series(
    a: Sequence[float], b: Sequence[float], statistic: Statistic, *, paired: bool
) -> LogRatio:
    """Circular block bootstrap of `statistic` over two series of dependent values.

    Consecutive requests met the same queue, so that blocks of √n of them are drawn instead of
    single ones (Politis & Romano 1992; `scipy.stats.bootstrap` draws single observations only).
    `paired`: the same blocks are drawn from both. The seed is fixed.
    """
    import numpy as np

    rng = np.random.default_rng(0)
    chosen = _blocks(rng, len(a))
    others = chosen if paired else _blocks(rng, len(b))
    before = statistic(np.asarray(a)[chosen])
    after = statistic(np.asarray(b)[others])
    sound = (before > 0) & (after > 0)  # the others have no ratio
    draws = [float(x) for x in np.log(after[sound] / before[sound])]
    mid = math.log(float(statistic(np.asarray(b)[None])[0] / statistic(np.asarray(a)[None])[0]))
    wrong = sum((draw <= 0) if mid > 0 else (draw >= 0) for draw in draws) / len(draws)
    low, high = percentile(draws, 2.5), percentile(draws, 97.5)
    return LogRatio(mid, statistics.stdev(draws), low, high, min(1.0, 2 * wrong))


Statistic = Callable[[Any], Any]
"""(draws, values) array → one number per draw."""


def row_statistic(name: str) -> Statistic:
    """`mean`, or `p50`, `p99`, … of every row of an array."""
    import numpy as np

    if name == "mean":
        return lambda rows: rows.mean(axis=1)
    return lambda rows: np.percentile(rows, float(name.removeprefix("p")), axis=1)


def _blocks(rng: Any, count: int) -> Any:
    """NUM_DRAWS rows of `count` indices, in circular blocks of √count."""
    import numpy as np

    size = max(1, round(math.sqrt(count)))
    starts = rng.integers(0, count, (NUM_DRAWS, -(-count // size)))
    spread = starts[:, :, None] + np.arange(size)
    return spread.reshape(NUM_DRAWS, -1)[:, :count] % count


def halves_differ(values: Sequence[float], alpha: float = 0.01) -> bool:
    """Whether a series drifted: Mann-Whitney's rank test of its first half against its second."""
    from scipy.stats import mannwhitneyu

    half = len(values) // 2
    test = mannwhitneyu(values[:half], values[half:], method="asymptotic", use_continuity=False)
    return bool(test.pvalue <= alpha)
