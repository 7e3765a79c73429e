"""Comparison of two sides of results, one outcome per metric.

Several runs per side: a run is one observation, because its requests share a queue. The interval is
Student's on the logarithms of the runs' statistics: paired by position if both sides have the same
number of runs, else Welch's.

One run per side: a block bootstrap. Consecutive requests met the same queue, so that blocks of √n
requests are drawn; if both runs have the same request ids, the same blocks of both. One run cannot
show how runs differ from each other: a change must also exceed what two runs of one configuration
are assumed to differ by on a quiet machine (`RUN_TO_RUN`, `QUEUE_EXCESS`). If the halves of a run
differ as much as A from B, the run drifted and the comparison is inconclusive.

Every metric is a chance to be wrong: a metric has changed only if its p-value survives Hochberg's
correction (Hochberg 1988), which allows for metrics that move together. The mean latencies, which
vary least, share four fifths of the 5 %, all other metrics the rest.

The minimum detectable effect is found by 80 % of such comparisons: 2.8 standard errors.

Inconclusive, with the reason: different load, invalid runs, a busy machine, drift, and noise (an
effect below the detectable one, with an interval wider than the threshold).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import msgspec

from ridgeline.measure.results.result_file import LATENCIES, RATES, LoadedResult
from ridgeline.records import BUSY_SHARE
from ridgeline.report.numbers import rounded
from ridgeline.stats import (
    LogRatio,
    Outcome,
    add_error,
    compare_paired,
    compare_series,
    compare_unpaired,
    halves_differ,
    hochberg,
    percentile,
    row_statistic,
)

POWER = 1.959963984540054 + 0.8416212335729143
LOAD_TOLERANCE = 0.02
MIN_SAMPLES = 20
ALPHA = 0.05
QUEUE_EXCESS = 0.8
"""What blocks miss of the dependence in a queue, in standard errors of the bootstrap. Assumed, not
measured on servers: generated runs with a correlation of 0.7 from request to request differ 1.3
times as much as the bootstrap says."""
RUN_TO_RUN = 0.015
"""Standard deviation of a metric's logarithm from run to run of one configuration on a quiet
machine, beyond what its requests explain. Assumed: it differs by machine, and repeated runs measure
it."""
HEADLINES = ("ttft_mean", "tpot_mean", "e2e_mean")
HEADLINE_SHARE = 0.8
"""Of the 5 % of false alarms that a comparison may raise, the share of the headlines."""


class MetricComparison(msgspec.Struct, frozen=True, kw_only=True):
    """One metric.

    `ratio` is B/A with its 95 % interval; `p_value` is corrected for the number of metrics;
    `reason` if inconclusive. `holds_below`: with one run per side, the change is seen as long as
    runs of one configuration differ by less than this (standard deviation of the logarithm).
    """

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
    holds_below: float | None = None

    def __str__(self) -> str:
        shown = f"{self.metric}: {_value(self.metric, self.a)} → {_value(self.metric, self.b)}"
        if self.p_value is None or self.detectable is None:
            return f"{shown}, {_percent(self.ratio)}: inconclusive: {self.reason}"
        sign = "<" if self.p_value < ALPHA else ">"
        change = (
            f"{shown}, change [{_percent(self.low)} {_percent(self.ratio)} {_percent(self.high)}] "
            f"(p = {self.p_value:.3f} {sign} 0.05), detectable from {100 * self.detectable:.1f}%: "
        )
        holds = ""
        if self.holds_below is not None:
            holds = f", if runs of one configuration differ by less than {self.holds_below:.1%}"
        return change + (f"inconclusive: {self.reason}" if self.reason else self.outcome + holds)


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.2f}%"


def _value(metric: str, value: float) -> str:
    if metric.split("_")[0] in LATENCIES:
        return f"{rounded(1000 * value, 4)} ms"
    return f"{rounded(value, 4)}/s"


def load_differences(a: Sequence[LoadedResult], b: Sequence[LoadedResult]) -> tuple[str, ...]:
    """Why the two sides cannot be compared; () if they can."""
    reasons = [f"{r.source}: {reason}" for r in (*a, *b) for reason in r.invalid]
    reasons += [busy_reason(r) for r in (*a, *b) if r.is_busy]
    first = a[0].load
    for other in (*a[1:], *b):
        for name in sorted(first.keys() & other.load.keys()):
            if not _is_close(first[name], other.load[name]):
                reasons.append(
                    f"different load: {name} {first[name]} and {other.load[name]}; run both with "
                    "the same --workload, --num-prompts, arrivals and --seed"
                )
    return tuple(dict.fromkeys(reasons))


def busy_reason(result: LoadedResult) -> str:
    """Why the figures of a run under the load of other processes cannot be compared."""
    return (
        f"{result.source}: the machine was busy ({result.busy_share:.0%} of the CPU taken by other "
        f"work; at most {BUSY_SHARE:.0%} is comparable); measure again on a quiet machine"
    )


def _is_close(x: str | float, y: str | float) -> bool:
    if isinstance(x, str) or isinstance(y, str):
        return str(x) == str(y)
    return math.isclose(x, y, rel_tol=LOAD_TOLERANCE)


def compare_results(
    a: Sequence[LoadedResult], b: Sequence[LoadedResult], *, threshold: float = 0.02
) -> tuple[MetricComparison, ...]:
    """Compare every statistic that both sides have. `threshold`: the change that matters."""
    names = [f"{metric}_{stat}" for metric in LATENCIES for stat in ("mean", "p50", "p99")]
    tested: list[_Tested] = []
    for name in (*names, *RATES):
        left, right = ([_figure(r, name) for r in side] for side in (a, b))
        values = [v for v in (*left, *right) if v is not None and v > 0]
        if len(values) == len(a) + len(b):
            pair = _MetricValues(name, [v for v in left if v], [v for v in right if v])
            tested.append(_test(pair, a, b))
    p_values = _corrected(tested)
    return tuple(_conclude(test, p_values[test.pair.name], threshold) for test in tested)


def _corrected(tested: Sequence[_Tested]) -> dict[str, float | None]:
    """p-values by metric, corrected within the headlines and within the rest."""
    own = {t.pair.name: None if t.change is None else t.change.p_value for t in tested}
    headlines = [name for name, p_value in own.items() if name in HEADLINES and p_value is not None]
    others = [name for name in own if name not in headlines]
    corrected = dict(own)
    for names, share in ((headlines, HEADLINE_SHARE), (others, 1 - HEADLINE_SHARE)):
        share = share if headlines and any(own[name] is not None for name in others) else 1.0
        for name, p_value in zip(names, hochberg([own[name] for name in names]), strict=True):
            corrected[name] = None if p_value is None else min(1.0, p_value / share)
    return corrected


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


class _Tested(msgspec.Struct, frozen=True):
    """The test of one metric.

    `spread` without what runs of one configuration differ by, `change` with it; None without a
    test, for the reason `why_not`. `drift`: by how much a run drifted.
    """

    pair: _MetricValues
    spread: LogRatio | None
    change: LogRatio | None
    drift: float
    why_not: str = ""


def _test(pair: _MetricValues, a: Sequence[LoadedResult], b: Sequence[LoadedResult]) -> _Tested:
    if len(pair.a) > 1 and len(pair.b) > 1:
        spread = _of_runs(pair)
        return _Tested(pair, spread, spread, 0.0)
    tested = _of_requests(pair, a, b)
    if isinstance(tested, str):
        return _Tested(pair, None, None, 0.0, tested)
    spread, drift = tested
    queues = QUEUE_EXCESS * spread.error
    return _Tested(
        pair, spread, add_error(spread, math.hypot(queues, math.sqrt(2) * RUN_TO_RUN)), drift
    )


def _conclude(test: _Tested, p_value: float | None, threshold: float) -> MetricComparison:
    pair = test.pair
    base: dict[str, Any] = {
        "metric": pair.name,
        "a": _geometric(pair.a),
        "b": _geometric(pair.b),
        "ratio": _geometric(pair.b) / _geometric(pair.a),
    }
    if test.spread is None or test.change is None or p_value is None:
        unknown: dict[str, Any] = {
            "low": 0.0,
            "high": math.inf,
            "p_value": None,
            "detectable": None,
        }
        return MetricComparison(**base, **unknown, outcome="inconclusive", reason=test.why_not)
    outcome, reason = _outcome(test, test.spread, test.change, p_value, threshold)
    return MetricComparison(
        **base,
        low=math.exp(test.spread.low),
        high=math.exp(test.spread.high),
        p_value=p_value,
        detectable=math.exp(POWER * test.spread.error) - 1,
        outcome=outcome,
        reason=reason,
        holds_below=_holds_below(test, test.spread, threshold) if not reason else None,
    )


def _holds_below(test: _Tested, spread: LogRatio, threshold: float) -> float | None:
    """The run-to-run deviation at which a change of single runs would no longer be seen."""
    if len(test.pair.a) > 1 or not _is_beyond(spread, math.log1p(threshold)):
        return None
    queues = QUEUE_EXCESS * spread.error
    low, high = RUN_TO_RUN, abs(spread.mid)
    if high <= low:
        return None
    for _ in range(20):
        middle = (low + high) / 2
        error = math.hypot(queues, math.sqrt(2) * middle)
        if _is_beyond(add_error(spread, error), math.log1p(threshold)):
            low = middle
        else:
            high = middle
    return low


def _geometric(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def _outcome(
    test: _Tested, spread: LogRatio, change: LogRatio, p_value: float, threshold: float
) -> tuple[Outcome, str]:
    limit = math.log1p(threshold)
    if test.drift > max(abs(spread.mid), limit):
        return "inconclusive", "a run drifted by as much as the sides differ"
    if _is_beyond(spread, limit):
        if not _is_beyond(change, limit):
            return (
                "inconclusive",
                "one configuration may differ as much from run to run; repeat",
            )
        if p_value >= ALPHA:
            return "inconclusive", "not significant among the metrics compared"
        grew = spread.mid > 0
        better = grew == (test.pair.name in RATES)
        return ("improved" if better else "regressed"), ""
    if spread.low > -limit and spread.high < limit:
        return "unchanged", ""
    if POWER * spread.error > limit:
        return "inconclusive", f"too noisy to detect a change of {100 * threshold:g}%"
    return "unchanged", ""


def _is_beyond(ratio: LogRatio, limit: float) -> bool:
    """Whether the interval excludes no change, and reaches beyond the change that matters."""
    return (ratio.low > 0 and ratio.high > limit) or (ratio.high < 0 and ratio.low < -limit)


def _of_runs(pair: _MetricValues) -> LogRatio:
    test = compare_paired if len(pair.a) == len(pair.b) else compare_unpaired
    return test(pair.a, pair.b)


def _of_requests(
    pair: _MetricValues, a: Sequence[LoadedResult], b: Sequence[LoadedResult]
) -> tuple[LogRatio, float] | str:
    """The test over the requests of one run a side, and by how much a run drifted; or why not."""
    metric, _, stat = pair.name.rpartition("_")
    if len(a) > 1 or len(b) > 1:
        return "one side has a single run: repeat it as often as the other"
    left, right = a[0].samples.get(metric, ()), b[0].samples.get(metric, ())
    fewest = min(len(left), len(right))
    if not fewest:
        return "noise is unknown for a single run without samples per request"
    if fewest < MIN_SAMPLES:
        return f"{fewest} requests are too few to know the noise; a run needs {MIN_SAMPLES}"
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
