"""Roofline chart: the measured peaks of a machine, and points below them by phase."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from ridgeline.report import svg
from ridgeline.report.numbers import rounded
from ridgeline.report.svg import Scale
from ridgeline.roofline import Peaks, RooflinePoint

PHASE_SHAPE = {"decode": "circle", "prefill": "square", "mixed": "diamond"}
PHASE_LEGEND = "● decode   ■ prefill   ◆ mixed"
HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 470, 62, 16, 34, 56
TOO_NEAR = 15.0  # pixels at which one mark hides another
LABEL_HEIGHT = 14


class Mark(NamedTuple):
    """A point, the number written on it, and its class in the style sheet."""

    number: str
    css: str
    point: RooflinePoint


def roofline_figure(
    marks: Sequence[Mark], peaks: Peaks, label: str, path: Sequence[RooflinePoint] = ()
) -> Markup:
    """Log-log chart; later marks are drawn above earlier ones. `path` is drawn as a line.

    A mark that would hide an earlier one is moved aside, with a line to its true place.
    """
    return svg.figure(lambda width: _draw(width, marks, peaks, label, path))


def _draw(
    width: int,
    marks: Sequence[Mark],
    peaks: Peaks,
    label: str,
    path: Sequence[RooflinePoint],
) -> Markup:
    x, y = _scales(width, [mark.point for mark in marks], peaks)
    bottom, right = HEIGHT - BOTTOM, width - RIGHT
    corners = [(x(point.intensity), y(point.achieved_flops_s / 1e9)) for point in path]
    true = [(x(m.point.intensity), y(m.point.achieved_flops_s / 1e9)) for m in marks]
    places = _spread(true, right)
    title = "arithmetic intensity (FLOP per byte)"
    parts = [
        svg.x_axis(x, TOP, bottom, title),
        svg.y_axis(y, LEFT, right, "achieved (GFLOP/s)"),
        _ceilings(x, y, peaks),
        svg.path(corners, "way") if len(corners) > 1 else "",
        *(svg.line(*place, *shown, "guide") for place, shown in places if place != shown),
        *(_draw_mark(mark, *shown) for mark, (_, shown) in zip(marks, places, strict=True)),
    ]
    return svg.drawing(width, HEIGHT, label, *parts)


Place = tuple[float, float]


def _spread(places: Sequence[Place], right: float) -> list[tuple[Place, Place]]:
    """(true place, place of the mark) of each.

    A mark is moved right until it hides no earlier one, and down if that would cross `right`.
    """
    placed: list[tuple[Place, Place]] = []
    for true in places:
        x, y = true
        while any(math.dist((x, y), shown) < TOO_NEAR for _, shown in placed):
            x, y = (x + 4.0, y) if x + 4.0 <= right else (true[0], y + TOO_NEAR)
        placed.append((true, (x, y)))
    return placed


def _scales(width: int, points: Sequence[RooflinePoint], peaks: Peaks) -> tuple[Scale, Scale]:
    intensities = [point.intensity for point in points] or [peaks.ridge]
    speeds = [point.achieved_flops_s / 1e9 for point in points] or [peaks.flops_s / 1e10]
    top = max(peaks.all_flops_s.values()) / 1e9
    x = Scale(
        low=min(*intensities, peaks.ridge) / 3,
        high=max(*intensities, peaks.ridge) * 5,
        start=LEFT,
        end=width - RIGHT,
        log=True,
    )
    y = Scale(
        low=min(speeds) / 3, high=max(top, *speeds) * 2, start=HEIGHT - BOTTOM, end=TOP, log=True
    )
    return x, y


def _ceilings(x: Scale, y: Scale, peaks: Peaks) -> str:
    bandwidth = peaks.bytes_s / 1e9
    parts, label_y = [], y.start
    for dtype, flops_s in sorted(peaks.all_flops_s.items(), key=lambda item: item[1]):
        peak = flops_s / 1e9
        ridge = max(peak / bandwidth, x.low)
        css = "roof" if dtype == peaks.dtype else "roof minor"
        parts.append(svg.path([(x(ridge), y(peak)), (x.end, y(peak))], css))
        label_y = min(y(peak) - 7, label_y - LABEL_HEIGHT)  # labels of close peaks must not overlap
        name = f"{dtype}: {rounded(peak)} GFLOP/s"
        parts.append(svg.text(x.end - 6, label_y, name, "roof-label", "end"))
    top = min(y.high, max(peaks.all_flops_s.values()) / 1e9)
    start = max(x.low, y.low / bandwidth)
    ends = [(start, start * bandwidth), (top / bandwidth, top)]
    parts.append(svg.path([(x(a), y(b)) for a, b in ends], "roof"))
    at = (start * ends[1][0]) ** 0.5
    label = f"read bandwidth {rounded(bandwidth)} GB/s"
    parts.append(svg.text(x(at) + 12, y(at * bandwidth) + 16, label, "roof-label"))
    return "".join(parts)


def _draw_mark(mark: Mark, x: float, y: float) -> str:
    point = mark.point
    tip = (
        f"{point.name}, {point.phase}: {rounded(point.intensity)} FLOP/B, "
        f"{rounded(point.achieved_flops_s / 1e9)} GFLOP/s, "
        f"{100 * point.share_of_roof:.0f}% of its roof"
    )
    shape = svg.mark(PHASE_SHAPE[point.phase], x, y, 8.5, f"mark numbered {mark.css}", tip)
    return shape + svg.text(x, y + 3.7, mark.number, "mark-number", "middle")
