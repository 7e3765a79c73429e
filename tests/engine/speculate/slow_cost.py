"""What a step takes, the plain way: what `native/speculation/drafts.h` is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from ridgeline.engine.speculate.depth_control.step_cost import KNOTS

Points = Sequence[tuple[int, float]]


def between(points: Points, x: float) -> float:
    """Piecewise linear; below the first point as there, beyond the last along the last piece."""
    if x < points[0][0]:
        return points[0][1]
    if len(points) == 1:
        return points[0][1] * x / points[0][0]
    for (x0, y0), (x1, y1) in pairwise(points):
        if x < x1 or x1 == points[-1][0]:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    raise AssertionError


class Factor:
    def __init__(self) -> None:
        self.by, self.num = 1.0, 1.0

    def move(self, ratio: float, least: float, most: float = 1.0, share: float = 1.0) -> float:
        way = min(most, max(least, 1 / (self.num + (ratio > 1))))
        step = 1 + share * way * (ratio - 1)
        self.num += share
        self.by *= step
        return step


class SlowStepCost:
    """As `StepTimeCurve`. `grid`: seconds by (runs, rows), none larger than one with more rows."""

    def __init__(self, grid: Mapping[tuple[int, int], float]) -> None:
        self.points: dict[int, list[tuple[int, float]]] = {}
        for (runs, rows), seconds in sorted(grid.items()):
            self.points.setdefault(runs, []).append((rows, seconds))
        self.machine, self.drafted = Factor(), Factor()
        self.plain: dict[int, Factor] = {}
        self.depths: dict[int, list[Factor]] = {}

    def at_start(self, runs: int, rows: int) -> float:
        if len(self.points) == 1 or runs <= min(self.points):
            return between(self.points[min(self.points)], rows)
        low = max(b for b in self.points if b <= runs)
        high = min((b for b in self.points if b >= runs), default=low)
        first, second = (between(self.points[b], rows) for b in (low, high))
        return first if low == high else first + (second - first) * (runs - low) / (high - low)

    def seconds(self, runs: int, rows: int) -> float:
        start = self.at_start(runs, rows) * self.machine.by
        if rows <= runs:
            return start * (self.plain[runs].by if runs in self.plain else 1.0)
        start *= self.drafted.by
        if runs not in self.depths:
            return start
        knots = [(k, f.by) for k, f in zip(KNOTS, self.depths[runs], strict=True)]
        return start * between(knots, min(rows / runs, KNOTS[-1]))

    def line(self, runs: int, first: int, count: int) -> list[float]:
        each = [self.seconds(runs, rows) for rows in range(first, first + count)]
        return [min(each[i:]) for i in range(count)]

    def learn(self, runs: int, rows: int, seconds: float) -> None:
        ratio = seconds / self.seconds(runs, rows)
        if ratio > 10:
            return
        ratio = min(2.0, ratio)
        if rows <= runs:
            ratio /= self.machine.move(ratio, 0.03, 0.03)
            self.plain.setdefault(runs, Factor()).move(ratio, 0.15)
            return
        ratio /= self.drafted.move(ratio, 0.03, 0.25)
        factors = self.depths.setdefault(runs, [Factor() for _ in KNOTS])
        shares = self._knot_shares(min(rows / runs, KNOTS[-1]))
        for place, share in shares.items():
            factors[place].move(ratio, 0.15, share=share)
        shown = sum(factors[place].by * share for place, share in shares.items())
        for place, factor in enumerate(factors):
            if place not in shares:
                factor.by += 0.02 * (shown - factor.by)
        known = [place for place, factor in enumerate(factors) if factor.num > 1]
        for place, factor in enumerate(factors):
            if factor.num == 1:
                factor.by = factors[min(known, key=lambda other: abs(other - place))].by

    def _knot_shares(self, depth: float) -> dict[int, float]:
        """The knots on either side, and the weight of each."""
        for place, (k0, k1) in enumerate(pairwise(KNOTS)):
            if k0 <= depth < k1:
                share = (depth - k0) / (k1 - k0)
                return {place: 1 - share, place + 1: share}
        return {len(KNOTS) - 1: 1.0}
