"""The shape of a server's traffic: how long its requests are, how many come, and what they share.

No prompt is part of it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

import msgspec


class LengthProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Lengths in tokens: their mean, and one by one (`values`) or in bins.

    `counts[i]` are in (bounds[i - 1], bounds[i]]; the last count is of longer ones. All of them are
    empty where only the mean is known.
    """

    mean: float
    values: tuple[int, ...] = ()
    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()

    @classmethod
    def of(cls, lengths: tuple[int, ...]) -> LengthProfile:
        """The profile of lengths that are known one by one."""
        return cls(mean=sum(lengths) / len(lengths), values=lengths)

    @property
    def number(self) -> int:
        """How many requests it is of; 0 where only the mean is known."""
        return len(self.values) or sum(self.counts)

    def counts_within(self, bounds: Sequence[float]) -> list[int]:
        """Counts in bins of other bounds; a bin of its own belongs where its upper bound does."""
        ends: tuple[float, ...] = self.values or (*self.bounds, math.inf)
        numbers = (1,) * len(self.values) or self.counts
        counts = [0] * (len(bounds) + 1)
        for end, number in zip(ends, numbers, strict=True):
            counts[bisect_left(bounds, end)] += number
        return counts

    def quantile(self, share: float) -> float:
        """The length that `share` of the requests do not exceed; the mean where only it is known.

        Linear within a bin; an open last bin is taken to end at twice its lower bound.
        """
        if self.values:
            ordered = sorted(self.values)
            return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
        if not self.number:
            return self.mean
        edges = (0.0, *self.bounds, 2 * self.bounds[-1])
        wanted, below = share * self.number, 0
        for (low, high), count in zip(pairwise(edges), self.counts, strict=True):
            if count and below + count >= wanted:
                return low + (high - low) * max(0.0, wanted - below) / count
            below += count
        return edges[-1]

    @property
    def cv(self) -> float:
        """Coefficient of variation, from the middles of bins; 0 where only the mean is known."""
        if self.number < 2 or self.mean <= 0:
            return 0.0
        edges = (0.0, *self.bounds, 2 * self.bounds[-1]) if self.bounds else ()
        middles = [math.sqrt(max(1.0, low) * high) for low, high in pairwise(edges)]
        pairs: list[tuple[float, int]] = [(value, 1) for value in self.values]
        pairs = pairs or list(zip(middles, self.counts, strict=True))
        mean = sum(value * count for value, count in pairs) / self.number
        square = sum(count * (value - mean) ** 2 for value, count in pairs)
        return math.sqrt(square / self.number) / mean


class TrafficProfile(msgspec.Struct, frozen=True, kw_only=True):
    """The traffic of a while, or of a workload.

    `rate`: requests/s. `shared_share`: of the prompt tokens, those that repeat the start of an
    earlier prompt. Each is None where it is not known.
    """

    num_requests: int
    prompt: LengthProfile | None
    output: LengthProfile | None
    rate: float | None = None
    shared_share: float | None = None
