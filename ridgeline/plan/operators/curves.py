"""Interpolation of measured times: linear between logarithms, by size beyond the ends.

Times of kernels span five decades and are close to powers of the size between two measured sizes.
Below the smallest size a kernel takes its fixed time, above the largest it grows with the size.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence

import msgspec


class Curve(msgspec.Struct, frozen=True):
    """Measured seconds by size, in ascending order of size."""

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    @classmethod
    def of(cls, points: Mapping[float, float]) -> Curve:
        """The curve through {size: seconds}."""
        ordered = sorted(points.items())
        return cls(tuple(x for x, _ in ordered), tuple(y for _, y in ordered))

    def at(self, size: float) -> float:
        """Seconds at a size."""
        sizes, seconds = self.sizes, self.seconds
        if size <= sizes[0]:
            return seconds[0]
        if size >= sizes[-1]:
            return seconds[-1] * size / sizes[-1]
        high = bisect_left(sizes, size)
        return between(size, (sizes[high - 1], sizes[high]), (seconds[high - 1], seconds[high]))


class CurveFamily(msgspec.Struct, frozen=True):
    """Curves by a second size, such as the time by context length for each batch."""

    sizes: tuple[float, ...]
    curves: tuple[Curve, ...]

    @classmethod
    def of(cls, points: Mapping[tuple[float, float], float]) -> CurveFamily:
        """The family through {(second size, size): seconds}."""
        rows: dict[float, dict[float, float]] = {}
        for (outer, inner), seconds in points.items():
            rows.setdefault(outer, {})[inner] = seconds
        ordered = sorted(rows.items())
        return cls(tuple(x for x, _ in ordered), tuple(Curve.of(row) for _, row in ordered))

    def at(self, outer: float, inner: float) -> float:
        """Seconds at a pair of sizes."""
        low, high = neighbours(self.sizes, outer)
        at_low = self.curves[low].at(inner)
        if low == high:
            return at_low * max(1.0, outer / self.sizes[-1])
        sizes = self.sizes[low], self.sizes[high]
        return between(outer, sizes, (at_low, self.curves[high].at(inner)))


def neighbours(sizes: Sequence[float], size: float) -> tuple[int, int]:
    """Indices of the sizes around `size`; twice the same at and beyond the ends."""
    high = bisect_left(sizes, size)
    if high == len(sizes):
        return high - 1, high - 1
    return (high, high) if high == 0 or sizes[high] == size else (high - 1, high)


def between(size: float, sizes: tuple[float, float], seconds: tuple[float, float]) -> float:
    """Seconds at a size between two, on the line through their logarithms."""
    share = math.log(size / sizes[0]) / math.log(sizes[1] / sizes[0])
    return math.exp((1 - share) * math.log(seconds[0]) + share * math.log(seconds[1]))
