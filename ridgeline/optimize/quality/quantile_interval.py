"""Confidence interval of an extreme quantile, by counting the values beyond it.

Of N positions about N/1000 lie above the 99.9th percentile; that count is Poisson distributed. So a
value that only `few` positions exceed is above the quantile unless the count is unusually small,
and one that `many` exceed is below it. Nothing is assumed about the shape of the tail. With too few
positions nothing bounds the quantile from above, and the interval says so (`UNBOUNDED`).

Large values come in bursts (one hard passage, several positions). The counts per window estimate
the clustering, and the evidence shrinks by that factor (the design effect of cluster sampling).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.stats import LEVEL, UNBOUNDED, Interval

Array = NDArray[np.floating[Any]]


def quantile_interval(windows: Sequence[Array], share: float, level: float = LEVEL) -> Interval:
    """Interval of the value exceeded by `share` of all positions. `windows`: the values of each
    window.
    """
    values = np.sort(np.concatenate(windows))[::-1]
    expected = share * len(values)
    mid = float(values[min(len(values) - 1, int(expected))])
    burst = _burst([int((window > mid).sum()) for window in windows])
    few, many = _count_interval(expected / burst, level)
    top, bottom = math.floor(few * burst) - 1, math.ceil(many * burst)
    return Interval(
        low=float(values[bottom]) if bottom < len(values) else 0.0,
        mid=mid,
        high=float(values[top]) if top >= 0 else UNBOUNDED,
        level=level,
    )


def _burst(counts: Sequence[int]) -> float:
    """Variance over mean of the counts per window; at least 1."""
    mean = sum(counts) / len(counts)
    if len(counts) < 2 or mean == 0:
        return 1.0
    return max(1.0, float(np.var(counts, ddof=1)) / mean)


def _count_interval(expected: float, level: float) -> tuple[int, int]:
    """Counts between which a Poisson variable of this mean stays with probability `level`."""
    from scipy.special import pdtr

    tail = (1 - level) / 2
    few = 0
    while pdtr(few, expected) <= tail:
        few += 1
    many = few
    while pdtr(many, expected) < 1 - tail:
        many += 1
    return few, many
