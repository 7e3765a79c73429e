"""A roofline chart as text: ceilings as lines, points as letters, with a legend."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from itertools import pairwise

from ridgeline.report.numbers import rounded
from ridgeline.roofline import Peaks, RooflinePoint

WIDTH, HEIGHT, MARGIN = 62, 15, 9
MARKS = string.ascii_letters
WHOLE_RUN = "whole run"


def roofline_text(points: Sequence[RooflinePoint], peaks: Peaks) -> tuple[str, ...]:
    """Draw GFLOP/s over FLOP per byte on log-log axes. Returns () if there are no points.

    If several points fall on the same character, the letter of the first is drawn; the legend lists
    all of them.
    """
    if not points:
        return ()
    plot = _Plot(points, peaks)
    plot.roof(peaks)
    for letter, point in reversed([*zip(MARKS, points, strict=False)]):
        plot.put(point.intensity, point.achieved_flops_s, letter)
    names = [_label(point) for point in points]
    width = max(map(len, names)) + 1
    legend = [
        _legend_row(letter, f"{name:<{width}}", point, peaks)
        for letter, name, point in zip(MARKS, names, points, strict=False)
    ]
    head = f"   {'':<{width}}{'FLOP/byte':>10}{'GFLOP/s':>13}   of its roof"
    return (*plot.lines(), "", head, *legend)


def _label(point: RooflinePoint) -> str:
    named = point.phase in point.name or point.name == WHOLE_RUN
    return point.name if named else f"{point.phase}: {point.name}"


def _legend_row(letter: str, name: str, point: RooflinePoint, peaks: Peaks) -> str:
    side = "bandwidth" if point.intensity < peaks.ridge else "compute"
    return (
        f"{letter}  {name}{rounded(point.intensity):>10}{rounded(point.achieved_flops_s / 1e9):>13}"
        f"{point.share_of_roof:>7.0%} ({side})"
    )


class _Plot:
    """A grid of characters with row 0 at the top."""

    def __init__(self, points: Sequence[RooflinePoint], peaks: Peaks) -> None:
        across = [point.intensity for point in points] + [peaks.ridge]
        up = [point.achieved_flops_s for point in points] + [max(peaks.all_flops_s.values())]
        self.x0, self.x1 = math.log10(min(across) / 2), math.log10(max(across) * 2.5)
        self.y0, self.y1 = math.log10(min(up) / 2), math.log10(max(up) * 1.6)
        self.rows = [[" "] * WIDTH for _ in range(HEIGHT)]

    def column(self, intensity: float) -> int:
        share = (math.log10(intensity) - self.x0) / (self.x1 - self.x0)
        return min(WIDTH - 1, max(0, round(share * (WIDTH - 1))))

    def row(self, flop_s: float) -> int:
        share = (math.log10(flop_s) - self.y0) / (self.y1 - self.y0)
        return HEIGHT - 1 - round(share * (HEIGHT - 1))

    def put(self, intensity: float, flop_s: float, mark: str) -> None:
        row = self.row(flop_s)
        if 0 <= row < HEIGHT:
            self.rows[row][self.column(intensity)] = mark

    def roof(self, peaks: Peaks) -> None:
        """Draw the bandwidth slope up to every peak.

        The peak of the model's dtype is a solid line.
        """
        for dtype, peak in peaks.all_flops_s.items():
            flat = "─" if dtype == peaks.dtype else "╌"
            for column in range(self.column(peak / peaks.bytes_s), WIDTH):
                self.put(self._intensity(column), peak, flat)
        top = max(peaks.all_flops_s.values())
        heights = [min(top, self._intensity(column) * peaks.bytes_s) for column in range(WIDTH)]
        for column, (here, then) in enumerate(pairwise([*heights, top])):
            if here < top:
                for row in range(self.row(then) + 1, self.row(here) + 1):
                    if 0 <= row < HEIGHT:
                        self.rows[row][column] = "/"
                self.put(self._intensity(column), here, "/")

    def _intensity(self, column: int) -> float:
        return float(10 ** (self.x0 + (self.x1 - self.x0) * column / (WIDTH - 1)))

    def lines(self) -> tuple[str, ...]:
        """The grid with its axes, labelled at powers of ten."""
        labels = {
            self.row(10.0**e): f"{10.0 ** (e - 9):g}" for e in self._decades(self.y0, self.y1)
        }
        body = [
            f"{labels.get(number, ''):>{MARGIN - 2}} │" + "".join(row).rstrip()
            for number, row in enumerate(self.rows)
        ]
        below = [" "] * (WIDTH + 8)
        for exponent in self._decades(self.x0, self.x1):
            text, at = f"{10.0**exponent:g}", self.column(10.0**exponent)
            below[at : at + len(text)] = text
        return (
            f"{'GFLOP/s':>{MARGIN - 2}}",
            *body,
            " " * (MARGIN - 1) + "└" + "─" * WIDTH,
            " " * MARGIN + "".join(below).rstrip() + "  FLOP/byte",
        )

    @staticmethod
    def _decades(low: float, high: float) -> range:
        return range(math.ceil(low), math.floor(high) + 1)
