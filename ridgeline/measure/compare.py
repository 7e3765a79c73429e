"""Is B better than A? Paired, interleaved rounds, and a confidence interval of their ratio.

Machines drift: clocks, caches, neighbours. Measuring all of A and then all of B charges the drift
to one of them. So each round measures both, close together, in an order that alternates (A B, B
A, A B, …): a linear drift cancels, and what both share in a round cancels in its ratio.

The ratio of a round is log-transformed, since a speed-up of 2 and a slow-down of 2 are the same
distance from none; over the rounds the mean log-ratio has a Student t interval with n - 1 degrees
of freedom. With one round there is no interval, and with two it is wide: that is the truth about
two rounds.

It loses where a round is too short to be typical, and says nothing about whether the load was the
right one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, TypeVar

import msgspec

from ridgeline.errors import BadInput

Verdict = Literal["better", "worse", "inconclusive"]
Direction = Literal["higher", "lower"]
T = TypeVar("T")

MIN_ROUNDS_WITHOUT_RATIO = 3


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """B against A. `ratio` is the geometric mean of b/a, `low`..`high` its confidence interval."""

    ratio: float
    low: float
    high: float
    confidence: float
    num_rounds: int
    better_is: Direction
    verdict: Verdict

    def __str__(self) -> str:
        """`x1.25 [1.18, 1.33] at 95%: better`, as a change of the metric, not of its goodness."""
        interval = f"[{self.low:.3g}, {self.high:.3g}] at {self.confidence:.0%}"
        return f"x{self.ratio:.3g} {interval}: {self.verdict}"


def compare(
    a: Sequence[float],
    b: Sequence[float],
    *,
    better_is: Direction = "higher",
    confidence: float = 0.95,
    min_effect: float = 0.0,
) -> Comparison:
    """Judge B against A from one value per round of each, in order of rounds.

    "better" only where the whole interval lies beyond 1 by `min_effect` (0.02: two percent). A
    value of zero has no ratio: then B is judged better (worse) only where it was so in each of at
    least 3 rounds.
    """
    _check(a, b, confidence)
    if min(*a, *b) > 0:
        ratio, low, high = _interval(a, b, confidence)
    else:
        ratio, low, high = _signs(a, b)
    return Comparison(
        ratio=ratio,
        low=low,
        high=high,
        confidence=confidence,
        num_rounds=len(a),
        better_is=better_is,
        verdict=_verdict(low, high, better_is, min_effect),
    )


def _check(a: Sequence[float], b: Sequence[float], confidence: float) -> None:
    if len(a) != len(b) or not a:
        raise BadInput(
            "a comparison needs as many rounds of A as of B", value=f"{len(a)} and {len(b)}"
        )
    if not all(math.isfinite(value) and value >= 0 for value in (*a, *b)):
        raise BadInput("a comparison needs finite values, not negative", value=[*a, *b])
    if not 0 < confidence < 1:
        raise BadInput("confidence is a share", value=confidence, limit="(0, 1)")


def _interval(
    a: Sequence[float], b: Sequence[float], confidence: float
) -> tuple[float, float, float]:
    logs = [math.log(after / before) for before, after in zip(a, b, strict=True)]
    mean = statistics.fmean(logs)
    if len(logs) == 1:
        return math.exp(mean), 0.0, math.inf
    half = _t_quantile(len(logs) - 1, confidence) * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def _t_quantile(freedom: int, confidence: float) -> float:
    """Two-sided Student t quantile."""
    from scipy.special import stdtrit  # type: ignore[import-untyped, unused-ignore]

    return float(stdtrit(freedom, (1 + confidence) / 2))


def _signs(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, float]:
    """Where some value is zero: total over total, and an interval that only knows which side of
    1.
    """
    ratio = sum(b) / sum(a) if sum(a) > 0 else (math.inf if sum(b) > 0 else 1.0)
    if len(a) >= MIN_ROUNDS_WITHOUT_RATIO:
        if all(after > before for before, after in zip(a, b, strict=True)):
            return ratio, math.nextafter(1.0, 2.0), math.inf
        if all(after < before for before, after in zip(a, b, strict=True)):
            return ratio, 0.0, math.nextafter(1.0, 0.0)
    return ratio, 0.0, math.inf


def _verdict(low: float, high: float, better_is: Direction, min_effect: float) -> Verdict:
    if low > 1 + min_effect:
        return "better" if better_is == "higher" else "worse"
    if high < 1 / (1 + min_effect):
        return "worse" if better_is == "higher" else "better"
    return "inconclusive"


async def interleave(
    run_a: Callable[[int], Awaitable[T]],
    run_b: Callable[[int], Awaitable[T]],
    max_rounds: int,
    *,
    go_on: Callable[[Sequence[T], Sequence[T]], bool] = lambda a, b: True,
) -> tuple[list[T], list[T]]:
    """Measure A and B in rounds, in alternating order; each gets its round's number (use it as
    seed).

    After every round `go_on` may end it, say when a budget is spent. Stopping *because* the
    interval looks good inflates confidence: let it be decided by time.
    """
    a: list[T] = []
    b: list[T] = []
    for number in range(max_rounds):
        pair = ((run_a, a), (run_b, b))
        for run, results in pair if number % 2 == 0 else reversed(pair):
            results.append(await run(number))
        if not go_on(a, b):
            break
    return a, b
