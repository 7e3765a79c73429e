"""The roofline: this machine's measured peaks, and every measured configuration by phase."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ridgeline.diagnose import RooflinePoint
from ridgeline.measure.report import svg
from ridgeline.measure.report.svg import Scale
from ridgeline.optimize.report.style import VERDICT_CSS
from ridgeline.optimize.result import LadderResult
from ridgeline.roofline import Peaks

PHASE_SHAPE = {"decode": "circle", "prefill": "square", "mixed": "diamond"}
_ROOF_WIDTH, _ROOF_HEIGHT = 920, 470
_LEFT, _RIGHT, _ROOF_TOP, _BOTTOM = 76, 24, 40, 56
_NEAR = 15.0  # pixels at which two marks hide each other


class Marked(NamedTuple):
    """A point, the number that it wears, and its class in the style sheet."""

    number: str
    css: str
    point: RooflinePoint


_LINE = 14  # from one label to the next


def roofline(result: LadderResult, peaks: Peaks) -> str:
    """Log-log: the machine's measured peaks, and every measured configuration by phase."""
    label = "Roofline of this machine with every measured configuration"
    note = "B baseline · F final · numbers: rungs of the table"
    return picture(_placed(result), peaks, label, note, _way_of(result))


def picture(
    marks: Sequence[Marked],
    peaks: Peaks,
    label: str,
    note: str,
    way: Sequence[RooflinePoint] = (),
) -> str:
    """Any points below the ceilings; later marks lie above earlier ones. `way` is drawn as a line.

    Marks that would hide each other stand aside, each with a line to its place.
    """
    x, y = _roof_scales([mark.point for mark in marks], peaks)
    bottom, right = _ROOF_HEIGHT - _BOTTOM, _ROOF_WIDTH - _RIGHT
    corners = [(x(point.intensity), y(point.achieved_flops_s / 1e9)) for point in way]
    places = _apart([(x(m.point.intensity), y(m.point.achieved_flops_s / 1e9)) for m in marks])
    parts = [
        svg.x_axis(x, _ROOF_TOP, bottom, "arithmetic intensity (FLOP per compulsory byte)"),
        svg.y_axis(y, _LEFT, right, "achieved (GFLOP/s)"),
        _ceiling_lines(x, y, peaks),
        svg.path(corners, "way") if len(corners) > 1 else "",
        *(svg.line(*true, *shown, "guide") for true, shown in places if true != shown),
        *(_roof_mark(mark, *shown) for mark, (_, shown) in zip(marks, places, strict=True)),
        _roof_legend(note),
    ]
    return svg.drawing(_ROOF_WIDTH, _ROOF_HEIGHT, label, *parts)


Place = tuple[float, float]


def _apart(places: Sequence[Place]) -> list[tuple[Place, Place]]:
    """Each place, and where its mark stands: to the right of those that it would hide."""
    found: list[tuple[Place, Place]] = []
    for x, y in places:
        at = x
        while any(math.dist((at, y), shown) < _NEAR for _, shown in found):
            at += 4.0
        found.append(((x, y), (at, y)))
    return found


def _placed(result: LadderResult) -> list[Marked]:
    """Drawn in this order, so that before and after stay on top."""
    found = [
        Marked(str(number), VERDICT_CSS[trial.verdict], point)
        for number, trial in enumerate(result.trials, 1)
        for point in trial.points
    ]
    found += [Marked("B", "before", point) for point in result.baseline.points]
    return found + [Marked("F", "after", point) for point in result.final.points]


def _roof_scales(points: Sequence[RooflinePoint], peaks: Peaks) -> tuple[Scale, Scale]:
    intensities = [point.intensity for point in points] or [peaks.ridge]
    speeds = [point.achieved_flops_s / 1e9 for point in points] or [peaks.flops_s / 1e10]
    top = max(peaks.all_flops_s.values()) / 1e9
    x = Scale(
        low=min(*intensities, peaks.ridge) / 3,
        high=max(*intensities, peaks.ridge) * 5,
        start=_LEFT,
        end=_ROOF_WIDTH - _RIGHT,
        log=True,
    )
    y = Scale(
        low=min(speeds) / 3,
        high=max(top, *speeds) * 2,
        start=_ROOF_HEIGHT - _BOTTOM,
        end=_ROOF_TOP,
        log=True,
    )
    return x, y


def _ceiling_lines(x: Scale, y: Scale, peaks: Peaks) -> str:
    bandwidth = peaks.bytes_s / 1e9
    parts, label_y = [], y.start
    for dtype, flop_s in sorted(peaks.all_flops_s.items(), key=lambda item: item[1]):
        peak = flop_s / 1e9
        ridge = max(peak / bandwidth, x.low)
        css = "roof" if dtype == peaks.dtype else "roof minor"
        parts.append(svg.path([(x(ridge), y(peak)), (x.end, y(peak))], css))
        name = f"{dtype}: {peak:.3g} GFLOP/s"
        label_y = min(y(peak) - 7, label_y - _LINE)  # peaks that are near each other: one per line
        parts.append(svg.text(x.end - 6, label_y, name, "roof-label", "end"))
    top = min(y.high, max(peaks.all_flops_s.values()) / 1e9)
    start = max(x.low, y.low / bandwidth)
    ends = [(start, start * bandwidth), (top / bandwidth, top)]
    parts.append(svg.path([(x(a), y(b)) for a, b in ends], "roof"))
    at = (start * ends[1][0]) ** 0.5
    words_ = f"read bandwidth {bandwidth:.3g} GB/s"
    parts.append(svg.text(x(at) + 12, y(at * bandwidth) + 16, words_, "roof-label"))
    return "".join(parts)


def _way_of(result: LadderResult) -> list[RooflinePoint]:
    """The way that decode took, from the baseline over each kept rung to the end."""
    chain = [result.baseline.points, *(trial.points for trial in result.kept), result.final.points]
    return [point for points in chain for point in points if point.phase == "decode"]


def _roof_mark(mark: Marked, x: float, y: float) -> str:
    point = mark.point
    tip = (
        f"{point.name}, {point.phase}: {point.intensity:.3g} FLOP/B, "
        f"{point.achieved_flops_s / 1e9:.3g} GFLOP/s, {100 * point.share_of_roof:.0f}% of its roof"
    )
    shape = svg.mark(PHASE_SHAPE[point.phase], x, y, 8.5, f"mark numbered {mark.css}", tip)
    return shape + svg.text(x, y + 3.7, mark.number, "mark-number", "middle")


def _roof_legend(note: str) -> str:
    parts, x = [], float(_LEFT + 150)
    for phase, shape in PHASE_SHAPE.items():
        parts.append(svg.mark(shape, x, 18, 6, "mark hollow plain"))
        parts.append(svg.text(x + 13, 22, phase, "tick"))
        x += 88
    parts.append(svg.text(x + 8, 22, note, "tick"))
    return "".join(parts)
