"""Enough statistics to refuse to conclude from noise.

Two configurations are measured in rounds, each round under the same load and the same seed, so
that what the round had in common (its prompts, its arrivals, the machine's mood) cancels in the
ratio. The ratio of a round is one observation, whatever number of requests is inside it: requests
of one run share a queue and are not independent. The interval is Student's, on the logarithm of
the ratio.

Looking after every round and stopping at the first significant one would find gains in noise. Looks
before the last therefore ask for 99 % and the last one for 95 % (the idea of Haybittle and Peto).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

Outcome = Literal["gain", "loss", "nothing", "unclear"]
LEVEL = 0.95
INTERIM_LEVEL = 0.99
LEAST_GAIN = 0.02  # a smaller gain is not worth a change, however surely it is known
UNBOUNDED = 1e9  # an end of an interval that nothing bounds: infinity is not JSON
WORTHWHILE = 0.08  # a rung that surely brings less than this is called "no gain"


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """An estimate and its confidence interval, in the unit of the estimate."""

    low: float
    mid: float
    high: float
    level: float = LEVEL

    def __str__(self) -> str:
        high = "∞" if self.high >= UNBOUNDED else f"{self.high:.3g}"
        return f"{self.mid:.3g} [{self.low:.3g}, {high}]"


def student_t(level: float, num_samples: int) -> float:
    """Half-width of a two-sided interval in standard errors; infinite under two samples."""
    from scipy.special import stdtrit  # type: ignore[import-untyped]

    return math.inf if num_samples < 2 else float(stdtrit(num_samples - 1, (1 + level) / 2))


class Prior(msgspec.Struct, frozen=True):
    """What earlier samples scattered: a variance, worth so many degrees of freedom."""

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
    """Student's interval of a mean. `least_sd`: what the instrument cannot resolve.

    `widen` multiplies the half-width, for samples that are not quite independent. A `prior`
    moderates the variance (Smyth 2004): both estimates, weighed by their degrees of freedom.
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


def ratio_interval(
    log_ratios: Sequence[float],
    *,
    level: float = LEVEL,
    least_sd: float = 0.0,
    widen: float = 1.0,
    prior: Prior = NO_PRIOR,
) -> Interval:
    """Interval of a ratio from the logarithms of the rounds' ratios."""
    logs = mean_interval(log_ratios, level=level, least_sd=least_sd, widen=widen, prior=prior)
    return Interval(
        low=math.exp(logs.low),
        mid=math.exp(logs.mid),
        high=math.exp(logs.high) if logs.high < 700 else math.inf,
        level=level,
    )


def widened(ratio: Interval, standard_error: float) -> Interval:
    """A ratio's interval with an independent error of its logarithm added."""
    from scipy.special import ndtri

    more = float(ndtri((1 + ratio.level) / 2)) * standard_error
    down = math.hypot(math.log(ratio.mid / ratio.low), more)
    up = math.hypot(math.log(ratio.high / ratio.mid), more)
    return Interval(
        low=ratio.mid * math.exp(-down),
        mid=ratio.mid,
        high=ratio.mid * math.exp(up) if up < 700 else math.inf,
        level=ratio.level,
    )


def judge(ratio: Interval) -> Outcome:
    """What an interval of new/old (more is better) lets one say."""
    if ratio.low > 1 and ratio.mid > 1 + LEAST_GAIN:
        return "gain"
    if ratio.high < 1 and ratio.mid < 1 / (1 + LEAST_GAIN):
        return "loss"
    return "nothing" if ratio.high <= 1 + WORTHWHILE else "unclear"
