"""Roofline chart: the measured peaks of a machine, and points below them by phase."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
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
MARK_SIZE = 8.5
LABEL_HEIGHT, CHARACTER_WIDTH = 14, 6.8  # pixels of a label, about


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
        *_roofs(x, y, peaks),
        *_roof_labels(x, y, peaks, [shown for _, shown in places]),
        svg.path(corners, "way") if len(corners) > 1 else "",
        *(svg.line(*place, *shown, "guide") for place, shown in places if place != shown),
        *(_draw_mark(mark, *shown) for mark, (_, shown) in zip(marks, places, strict=True)),
    ]
    return svg.drawing(width, HEIGHT, label, *parts)


Place = tuple[float, float]


class Box(NamedTuple):
    """A rectangle in pixels."""

    left: float
    top: float
    right: float
    bottom: float

    @staticmethod
    def of_text(text: str, place: Place, anchor: str) -> Box:
        x, y = place
        width = CHARACTER_WIDTH * len(text)
        left = x - width if anchor == "end" else x
        return Box(left, y - LABEL_HEIGHT + 3, left + width, y + 3)

    def holds(self, other: Box) -> bool:
        fits_across = self.left <= other.left and other.right <= self.right
        return fits_across and self.top <= other.top and other.bottom <= self.bottom

    def overlaps(self, other: Box) -> bool:
        is_across = self.left < other.right and other.left < self.right
        return is_across and self.top < other.bottom and other.top < self.bottom


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


def _slope(x: Scale, y: Scale, peaks: Peaks) -> tuple[Place, Place]:
    """The ends of the bandwidth roof."""
    bandwidth = peaks.bytes_s / 1e9
    top = min(y.high, max(peaks.all_flops_s.values()) / 1e9)
    start = max(x.low, y.low / bandwidth)
    return (x(start), y(start * bandwidth)), (x(top / bandwidth), y(top))


def _levels(x: Scale, y: Scale, peaks: Peaks) -> list[tuple[str, float, float]]:
    """(dtype, x of the ridge, y) of each arithmetic roof, the lowest first."""
    ordered = sorted(peaks.all_flops_s.items(), key=lambda item: item[1])
    return [
        (dtype, x(max(flops_s / peaks.bytes_s, x.low)), y(flops_s / 1e9))
        for dtype, flops_s in ordered
    ]


def _between(start: Place, end: Place, count: int) -> list[Place]:
    """Places at equal distances between two others."""
    shares = [i / count for i in range(1, count)]
    (a, b), (c, d) = start, end
    return [(a + share * (c - a), b + share * (d - b)) for share in shares]


def _roofs(x: Scale, y: Scale, peaks: Peaks) -> Iterator[str]:
    for dtype, ridge, level in _levels(x, y, peaks):
        css = "roof" if dtype == peaks.dtype else "roof minor"
        yield svg.path([(ridge, level), (x.end, level)], css)
    yield svg.path(_slope(x, y, peaks), "roof")


def _roof_labels(x: Scale, y: Scale, peaks: Peaks, marks: Sequence[Place]) -> Iterator[str]:
    """The names of the roofs, next to them, where they hide no mark and no other name, and cross no
    roof if possible."""
    margin = MARK_SIZE + 2
    taken = [Box(a - margin, b - margin, a + margin, b + margin) for a, b in marks]
    levels, (start, end) = _levels(x, y, peaks), _slope(x, y, peaks)
    lines = [Box(ridge, level, x.end, level) for _, ridge, level in levels]
    lines += [Box(*place, *place) for place in _between(start, end, 80)]
    inside = Box(x.start, y.end - LABEL_HEIGHT, x.end, y.start)

    def label(text: str, places: Iterable[tuple[Place, str]]) -> str:
        def obstacles(own: tuple[Box, Place, str]) -> tuple[int, bool]:
            return sum(map(own[0].overlaps, taken)), any(map(own[0].overlaps, lines))

        boxes = [(Box.of_text(text, place, anchor), place, anchor) for place, anchor in places]
        kept = [own for own in boxes if inside.holds(own[0])] or boxes
        box, place, anchor = min(kept, key=obstacles)
        taken.append(box)
        return svg.text(*place, text, "roof-label", anchor)

    for dtype, _, level in levels:
        heights = (level - 7, level - 7 - LABEL_HEIGHT, level + 16, level - 7 - 2 * LABEL_HEIGHT)
        ends = [x.end - 6 - shift for shift in range(0, int(x.end - x.start), 12)]
        places = [((end, height), "end") for height in heights for end in ends]
        yield label(f"{dtype}: {rounded(peaks.all_flops_s[dtype] / 1e9)} GFLOP/s", places)
    middle = (start[0] + end[0]) / 2
    along = sorted(_between(start, end, 20), key=lambda place: abs(place[0] - middle))
    below = [((a + 12, b + 16 + drop), "start") for drop in range(0, 60, 12) for a, b in along]
    above = [((a - 8, b - 6 - rise), "end") for rise in range(0, 60, 12) for a, b in along]
    yield label(f"read bandwidth {rounded(peaks.bytes_s / 1e9)} GB/s", below + above)


def _draw_mark(mark: Mark, x: float, y: float) -> str:
    point = mark.point
    tip = (
        f"{point.name}, {point.phase}: {rounded(point.intensity)} FLOP/B, "
        f"{rounded(point.achieved_flops_s / 1e9)} GFLOP/s, "
        f"{100 * point.share_of_roof:.0f}% of its roof"
    )
    shape = svg.mark(PHASE_SHAPE[point.phase], x, y, MARK_SIZE, f"mark numbered {mark.css}", tip)
    return shape + svg.text(x, y + 3.7, mark.number, "mark-number", "middle")
