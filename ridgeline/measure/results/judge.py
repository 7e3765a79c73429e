"""Is B different from A, and could this have been seen at all? One judgement per metric.

Several runs a side: a run is one observation (requests of one run share its queue), and the
interval is Student's on the logarithms of the runs' statistics: paired by position where there are
as many of each, else Welch's.

One run a side: a block bootstrap. Requests that come after each other met the same queue, so blocks
of sqrt(n) consecutive requests are drawn, not requests. Where both runs name the same requests the
draw is paired: the same blocks of both. One run cannot show how runs differ from each other, so a
run that changes by itself as much as A differs from B (its halves against each other) is called
drift, and nothing is concluded.

The minimum detectable effect is what 80 % of such comparisons would find: 2.8 standard errors.

Refused, with the reason: different load, invalid runs, drift, noise (an effect smaller than what
could be detected, with an interval wider than the threshold).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from ridgeline.measure.metrics import percentile
from ridgeline.measure.results.base import LATENCIES, RATES, Result

Outcome = Literal["improved", "regressed", "unchanged", "inconclusive"]

NUM_DRAWS = 1000
POWER = 1.959963984540054 + 0.8416212335729143
LOAD_TOLERANCE = 0.02
LEAST_SAMPLES = 20


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """One metric. `ratio` is B over A with its 95 % interval; `reason` where inconclusive."""

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
        told = (
            f"{shown}, change [{_percent(self.low)} {_percent(self.ratio)} {_percent(self.high)}] "
            f"(p = {self.p_value:.3f} {sign} 0.05), detectable from {100 * self.detectable:.1f}%: "
        )
        return told + (f"inconclusive: {self.reason}" if self.reason else self.outcome)


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.2f}%"


def _value(metric: str, value: float) -> str:
    if metric.split("_")[0] in LATENCIES:
        return f"{1000 * value:.4g} ms"
    return f"{value:.4g}/s"


def differences(a: Sequence[Result], b: Sequence[Result]) -> tuple[str, ...]:
    """Why the two sides cannot be compared at all; () where they can."""
    found = [f"{r.source}: {reason}" for r in (*a, *b) for reason in r.invalid]
    first = a[0].load
    for other in (*a[1:], *b):
        for name in sorted(first.keys() & other.load.keys()):
            if not _alike(first[name], other.load[name]):
                found.append(f"another load: {name} {first[name]} and {other.load[name]}")
    return tuple(dict.fromkeys(found))


def _alike(x: str | float, y: str | float) -> bool:
    if isinstance(x, str) or isinstance(y, str):
        return str(x) == str(y)
    return math.isclose(x, y, rel_tol=LOAD_TOLERANCE)


def judge(
    a: Sequence[Result], b: Sequence[Result], *, threshold: float = 0.02
) -> tuple[Judgement, ...]:
    """Every statistic that both sides have. `threshold`: the change that matters."""
    names = [f"{metric}_{stat}" for metric in LATENCIES for stat in ("mean", "p50", "p99")]
    found = []
    for name in (*names, *RATES):
        left, right = ([_figure(r, name) for r in side] for side in (a, b))
        values = [v for v in (*left, *right) if v is not None and v > 0]
        if len(values) == len(a) + len(b):
            pair = _Pair(name, [v for v in left if v], [v for v in right if v])
            found.append(_judge(pair, a, b, threshold))
    return tuple(found)


def _figure(result: Result, name: str) -> float | None:
    metric, _, stat = name.rpartition("_")
    values = result.samples.get(metric)
    if values and stat in ("mean", "p50", "p99"):
        return _statistic(values, stat)
    return result.figures.get(name)


def _statistic(values: Sequence[float], stat: str) -> float:
    return statistics.fmean(values) if stat == "mean" else percentile(values, float(stat[1:]))


class _Pair(msgspec.Struct, frozen=True):
    name: str
    a: list[float]
    b: list[float]


class _Spread(msgspec.Struct, frozen=True):
    """The logarithm of the ratio: its middle, standard error, and interval."""

    mid: float
    error: float
    low: float
    high: float
    p_value: float
    drift: float = 0.0


def _judge(pair: _Pair, a: Sequence[Result], b: Sequence[Result], threshold: float) -> Judgement:
    ratio = _geometric(pair.b) / _geometric(pair.a)
    base: dict[str, Any] = {
        "metric": pair.name,
        "a": _geometric(pair.a),
        "b": _geometric(pair.b),
        "ratio": ratio,
    }
    spread = _of_runs(pair) if len(pair.a) > 1 and len(pair.b) > 1 else _of_requests(pair, a, b)
    if spread is None:
        nothing: dict[str, Any] = {
            "low": 0.0,
            "high": math.inf,
            "p_value": None,
            "detectable": None,
        }
        reason = "one run without its requests cannot tell noise from change"
        return Judgement(**base, **nothing, outcome="inconclusive", reason=reason)
    outcome, reason = _outcome(pair.name, spread, threshold)
    return Judgement(
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


def _outcome(name: str, spread: _Spread, threshold: float) -> tuple[Outcome, str]:
    limit = math.log1p(threshold)
    if spread.drift > max(abs(spread.mid), limit):
        return "inconclusive", "a run drifted by as much as the two differ"
    if (spread.low > 0 and spread.high > limit) or (spread.high < 0 and spread.low < -limit):
        grew = spread.mid > 0
        better = grew == (name in RATES)
        return ("improved" if better else "regressed"), ""
    if spread.low > -limit and spread.high < limit:
        return "unchanged", ""
    if POWER * spread.error > limit:
        return "inconclusive", f"too noisy to see a change of {100 * threshold:g}%"
    return "unchanged", ""


def _of_runs(pair: _Pair) -> _Spread:
    from scipy.special import stdtr, stdtrit  # type: ignore[import-untyped, unused-ignore]

    a, b = [list(map(math.log, side)) for side in (pair.a, pair.b)]
    if len(a) == len(b):
        logs = [y - x for x, y in zip(a, b, strict=True)]
        mid, freedom = statistics.fmean(logs), float(len(logs) - 1)
        error = statistics.stdev(logs) / math.sqrt(len(logs))
    else:
        va, vb = statistics.variance(a) / len(a), statistics.variance(b) / len(b)
        mid, error = statistics.fmean(b) - statistics.fmean(a), math.sqrt(va + vb)
        below = va**2 / (len(a) - 1) + vb**2 / (len(b) - 1)
        freedom = (va + vb) ** 2 / below if below > 0 else float(len(a) + len(b) - 2)
    error = max(error, 1e-12)
    half = float(stdtrit(freedom, 0.975)) * error
    p_value = 2 * float(stdtr(freedom, -abs(mid) / error))
    return _Spread(mid, error, mid - half, mid + half, p_value)


def _of_requests(pair: _Pair, a: Sequence[Result], b: Sequence[Result]) -> _Spread | None:
    metric, _, stat = pair.name.rpartition("_")
    if len(a) > 1 or len(b) > 1:
        return None
    left, right = a[0].samples.get(metric, ()), b[0].samples.get(metric, ())
    if min(len(left), len(right)) < LEAST_SAMPLES:
        return None
    paired = bool(a[0].ids) and a[0].ids == b[0].ids and len(left) == len(right)
    draws = _block_draws(left, right, stat, paired)
    mid = math.log(pair.b[0] / pair.a[0])
    error = statistics.stdev(draws)
    wrong = sum((draw <= 0) if mid > 0 else (draw >= 0) for draw in draws) / len(draws)
    low, high = percentile(draws, 2.5), percentile(draws, 97.5)
    drift = max(_drift(left, stat), _drift(right, stat))
    return _Spread(mid, error, low, high, min(1.0, 2 * wrong), drift)


def _block_draws(
    left: Sequence[float], right: Sequence[float], stat: str, paired: bool
) -> list[float]:
    """Logarithms of the ratio in bootstrap draws of blocks; draws without a ratio are left out."""
    import numpy as np

    rng = np.random.default_rng(0)
    chosen = _blocks(rng, len(left))
    others = chosen if paired else _blocks(rng, len(right))
    sides = []
    for values, drawn in ((left, chosen), (right, others)):
        rows = np.asarray(values)[drawn]
        sides.append(
            rows.mean(axis=1) if stat == "mean" else np.percentile(rows, float(stat[1:]), axis=1)
        )
    sound = (sides[0] > 0) & (sides[1] > 0)
    return [float(x) for x in np.log(sides[1][sound] / sides[0][sound])]


def _blocks(rng: Any, count: int) -> Any:
    """NUM_DRAWS rows of `count` indices, in circular blocks of sqrt(count)."""
    import numpy as np

    size = max(1, round(math.sqrt(count)))
    starts = rng.integers(0, count, (NUM_DRAWS, -(-count // size)))
    spread = starts[:, :, None] + np.arange(size)
    return spread.reshape(NUM_DRAWS, -1)[:, :count] % count


def _drift(values: Sequence[float], stat: str) -> float:
    """How far the second half lies from the first beyond what chance explains; 0 where it does not.

    By Mann-Whitney's rank test at 1 %: a run under an ever longer queue drifts in every statistic.
    """
    from scipy.special import ndtr

    half = len(values) // 2
    first, second = values[:half], values[half:]
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = sum(rank for rank, i in enumerate(order, 1) if i < half)
    mean = half * (len(values) + 1) / 2
    deviation = math.sqrt(half * (len(values) - half) * (len(values) + 1) / 12)
    if 2 * float(ndtr(-abs(ranks - mean) / deviation)) > 0.01:
        return 0.0
    x, y = _statistic(first, stat), _statistic(second, stat)
    return abs(math.log(y / x)) if x > 0 and y > 0 else math.inf
