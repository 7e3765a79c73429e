"""Comparison of two sides of results, one outcome per metric.

Several runs per side: a run is one observation, because its requests share a queue. The interval is
Student's on the logarithms of the runs' statistics: paired by position if both sides have the same
number of runs, else Welch's.

One run per side: a block bootstrap. Consecutive requests met the same queue, so that blocks of √n
requests are drawn; if both runs have the same request ids, the same blocks of both. One run cannot
show how runs differ from each other. If the halves of a run differ as much as A from B, the run
drifted and the comparison is inconclusive.

The minimum detectable effect is found by 80 % of such comparisons: 2.8 standard errors.

Inconclusive, with the reason: different load, invalid runs, drift, and noise (an effect below the
detectable one, with an interval wider than the threshold).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import msgspec

from ridgeline.measure.results.result_file import LATENCIES, RATES, LoadedResult
from ridgeline.stats import (
    LogRatio,
    Outcome,
    compare_paired,
    compare_series,
    compare_unpaired,
    halves_differ,
    percentile,
    row_statistic,
)

POWER = 1.959963984540054 + 0.8416212335729143
LOAD_TOLERANCE = 0.02
MIN_SAMPLES = 20


class MetricComparison(msgspec.Struct, frozen=True, kw_only=True):
    """One metric. `ratio` is B/A with its 95 % interval; `reason` if inconclusive."""

    metric: str
    a: float
    b: float
    ratio: float
    low: float
    high: float
    p_value: float | None
    detectable: float | None
    outcome: Outcome
    reason: str = ""

    def __str__(self) -> str:
        shown = f"{self.metric}: {_value(self.metric, self.a)} → {_value(self.metric, self.b)}"
        if self.p_value is None or self.detectable is None:
            return f"{shown}, {_percent(self.ratio)}: inconclusive: {self.reason}"
        sign = "<" if self.p_value < 0.05 else ">"
        change = (
            f"{shown}, change [{_percent(self.low)} {_percent(self.ratio)} {_percent(self.high)}] "
            f"(p = {self.p_value:.3f} {sign} 0.05), detectable from {100 * self.detectable:.1f}%: "
        )
        return change + (f"inconclusive: {self.reason}" if self.reason else self.outcome)


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.2f}%"


def _value(metric: str, value: float) -> str:
    if metric.split("_")[0] in LATENCIES:
        return f"{1000 * value:.4g} ms"
    return f"{value:.4g}/s"


def load_differences(a: Sequence[LoadedResult], b: Sequence[LoadedResult]) -> tuple[str, ...]:
    """Why the two sides cannot be compared; () if they can."""
    reasons = [f"{r.source}: {reason}" for r in (*a, *b) for reason in r.invalid]
    first = a[0].load
    for other in (*a[1:], *b):
        for name in sorted(first.keys() & other.load.keys()):
            if not _is_close(first[name], other.load[name]):
                reasons.append(f"different load: {name} {first[name]} and {other.load[name]}")
    return tuple(dict.fromkeys(reasons))


def _is_close(x: str | float, y: str | float) -> bool:
    if isinstance(x, str) or isinstance(y, str):
        return str(x) == str(y)
    return math.isclose(x, y, rel_tol=LOAD_TOLERANCE)


def compare_results(
    a: Sequence[LoadedResult], b: Sequence[LoadedResult], *, threshold: float = 0.02
) -> tuple[MetricComparison, ...]:
    """Compare every statistic that both sides have. `threshold`: the change that matters."""
    names = [f"{metric}_{stat}" for metric in LATENCIES for stat in ("mean", "p50", "p99")]
    comparisons = []
    for name in (*names, *RATES):
        left, right = ([_figure(r, name) for r in side] for side in (a, b))
        values = [v for v in (*left, *right) if v is not None and v > 0]
        if len(values) == len(a) + len(b):
            pair = _MetricValues(name, [v for v in left if v], [v for v in right if v])
            comparisons.append(_compare(pair, a, b, threshold))
    return tuple(comparisons)


def _figure(result: LoadedResult, name: str) -> float | None:
    metric, _, stat = name.rpartition("_")
    values = result.samples.get(metric)
    if values and stat in ("mean", "p50", "p99"):
        return _statistic(values, stat)
    return result.figures.get(name)


def _statistic(values: Sequence[float], stat: str) -> float:
    return statistics.fmean(values) if stat == "mean" else percentile(values, float(stat[1:]))


class _MetricValues(msgspec.Struct, frozen=True):
    name: str
    a: list[float]
    b: list[float]


def _compare(
    pair: _MetricValues, a: Sequence[LoadedResult], b: Sequence[LoadedResult], threshold: float
) -> MetricComparison:
    ratio = _geometric(pair.b) / _geometric(pair.a)
    base: dict[str, Any] = {
        "metric": pair.name,
        "a": _geometric(pair.a),
        "b": _geometric(pair.b),
        "ratio": ratio,
    }
    if len(pair.a) > 1 and len(pair.b) > 1:
        tested: tuple[LogRatio, float] | None = (_of_runs(pair), 0.0)
    else:
        tested = _of_requests(pair, a, b)
    if tested is None:
        unknown: dict[str, Any] = {
            "low": 0.0,
            "high": math.inf,
            "p_value": None,
            "detectable": None,
        }
        reason = "noise is unknown for a single run without samples per request"
        return MetricComparison(**base, **unknown, outcome="inconclusive", reason=reason)
    spread, drift = tested
    outcome, reason = _outcome(pair.name, spread, drift, threshold)
    return MetricComparison(
        **base,
        low=math.exp(spread.low),
        high=math.exp(spread.high),
        p_value=spread.p_value,
        detectable=math.exp(POWER * spread.error) - 1,
        outcome=outcome,
        reason=reason,
    )


def _geometric(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def _outcome(name: str, spread: LogRatio, drift: float, threshold: float) -> tuple[Outcome, str]:
    limit = math.log1p(threshold)
    if drift > max(abs(spread.mid), limit):
        return "inconclusive", "a run drifted by as much as the sides differ"
    if (spread.low > 0 and spread.high > limit) or (spread.high < 0 and spread.low < -limit):
        grew = spread.mid > 0
        better = grew == (name in RATES)
        return ("improved" if better else "regressed"), ""
    if spread.low > -limit and spread.high < limit:
        return "unchanged", ""
    if POWER * spread.error > limit:
        return "inconclusive", f"too noisy to detect a change of {100 * threshold:g}%"
    return "unchanged", ""


def _of_runs(pair: _MetricValues) -> LogRatio:
    test = compare_paired if len(pair.a) == len(pair.b) else compare_unpaired
    return test(pair.a, pair.b)


def _of_requests(
    pair: _MetricValues, a: Sequence[LoadedResult], b: Sequence[LoadedResult]
) -> tuple[LogRatio, float] | None:
    """The test over the requests of one run a side, and by how much a run drifted."""
    metric, _, stat = pair.name.rpartition("_")
    if len(a) > 1 or len(b) > 1:
        return None
    left, right = a[0].samples.get(metric, ()), b[0].samples.get(metric, ())
    if min(len(left), len(right)) < MIN_SAMPLES:
        return None
    paired = bool(a[0].ids) and a[0].ids == b[0].ids and len(left) == len(right)
    ratio = compare_series(left, right, row_statistic(stat), paired=paired)
    return ratio, max(_drift(left, stat), _drift(right, stat))


def _drift(values: Sequence[float], stat: str) -> float:
    """|log ratio| of the second half to the first; 0 unless the halves differ significantly.

    A run under an ever longer queue drifts in every statistic.
    """
    if not halves_differ(values):
        return 0.0
    half = len(values) // 2
    first, second = _statistic(values[:half], stat), _statistic(values[half:], stat)
    return abs(math.log(second / first)) if first > 0 and second > 0 else math.inf
