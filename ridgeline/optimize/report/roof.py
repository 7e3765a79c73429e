"""The roofline: this machine's measured ceilings, and every measured configuration by phase."""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.diagnose import Ceilings, Point
from ridgeline.measure.report import svg
from ridgeline.measure.report.svg import Scale
from ridgeline.optimize.report.style import VERDICT_CSS
from ridgeline.optimize.result import LadderResult

PHASE_SHAPE = {"decode": "circle", "prefill": "square", "mixed": "diamond"}
_ROOF_WIDTH, _ROOF_HEIGHT = 920, 470
_LEFT, _RIGHT, _ROOF_TOP, _BOTTOM = 76, 24, 40, 56


def roofline(result: LadderResult, ceilings: Ceilings) -> str:
    """Log-log: the machine's measured ceilings, and every measured configuration by phase."""
    placed = _placed(result)
    x, y = _roof_scales([point for _, _, point in placed], ceilings)
    bottom, right = _ROOF_HEIGHT - _BOTTOM, _ROOF_WIDTH - _RIGHT
    parts = [
        svg.x_axis(x, _ROOF_TOP, bottom, "arithmetic intensity (FLOP per compulsory byte)"),
        svg.y_axis(y, _LEFT, right, "achieved (GFLOP/s)"),
        _ceiling_lines(x, y, ceilings),
        _path_of(result, x, y),
        *(_roof_mark(number, css, point, x, y) for number, css, point in placed),
        _roof_legend(),
    ]
    label = "Roofline of this machine with every measured configuration"
    return svg.drawing(_ROOF_WIDTH, _ROOF_HEIGHT, label, *parts)


def _placed(result: LadderResult) -> list[tuple[str, str, Point]]:
    """(number shown, style, point); drawn in this order, so that before and after stay on top."""
    found = [
        (str(number), VERDICT_CSS[trial.verdict], point)
        for number, trial in enumerate(result.trials, 1)
        for point in trial.points
    ]
    found += [("B", "before", point) for point in result.baseline.points]
    return found + [("F", "after", point) for point in result.final.points]


def _roof_scales(points: Sequence[Point], ceilings: Ceilings) -> tuple[Scale, Scale]:
    intensities = [point.intensity for point in points] or [ceilings.ridge]
    speeds = [point.achieved_flop_s / 1e9 for point in points] or [ceilings.peak_flop_s / 1e10]
    top = max(ceilings.compute_flop_s.values()) / 1e9
    x = Scale(
        low=min(*intensities, ceilings.ridge) / 3,
        high=max(*intensities, ceilings.ridge) * 5,
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


def _ceiling_lines(x: Scale, y: Scale, ceilings: Ceilings) -> str:
    bandwidth = ceilings.bandwidth_bytes_s / 1e9
    parts = []
    for dtype, flop_s in sorted(ceilings.compute_flop_s.items(), key=lambda item: item[1]):
        peak = flop_s / 1e9
        ridge = max(peak / bandwidth, x.low)
        css = "roof" if dtype == ceilings.dtype else "roof minor"
        parts.append(svg.path([(x(ridge), y(peak)), (x.end, y(peak))], css))
        name = f"{dtype}: {peak:.3g} GFLOP/s"
        parts.append(svg.text(x.end - 6, y(peak) - 7, name, "roof-label", "end"))
    top = min(y.high, max(ceilings.compute_flop_s.values()) / 1e9)
    start = max(x.low, y.low / bandwidth)
    ends = [(start, start * bandwidth), (top / bandwidth, top)]
    parts.append(svg.path([(x(a), y(b)) for a, b in ends], "roof"))
    at = (start * ends[1][0]) ** 0.5
    words_ = f"read bandwidth {bandwidth:.3g} GB/s"
    parts.append(svg.text(x(at) + 12, y(at * bandwidth) + 16, words_, "roof-label"))
    return "".join(parts)


def _path_of(result: LadderResult, x: Scale, y: Scale) -> str:
    """The way that decode took, from the baseline over each kept rung to the end."""
    chain = [result.baseline.points, *(trial.points for trial in result.kept), result.final.points]
    steps = [point for points in chain for point in points if point.phase == "decode"]
    corners = [(x(point.intensity), y(point.achieved_flop_s / 1e9)) for point in steps]
    return svg.path(corners, "way") if len(corners) > 1 else ""


def _roof_mark(number: str, css: str, point: Point, x: Scale, y: Scale) -> str:
    at = x(point.intensity), y(point.achieved_flop_s / 1e9)
    tip = (
        f"{point.name}, {point.phase}: {point.intensity:.3g} FLOP/B, "
        f"{point.achieved_flop_s / 1e9:.3g} GFLOP/s, {100 * point.share_of_roof:.0f}% of its roof"
    )
    shape = svg.mark(PHASE_SHAPE[point.phase], *at, 8.5, f"mark numbered {css}", tip)
    return shape + svg.text(at[0], at[1] + 3.7, number, "mark-number", "middle")


def _roof_legend() -> str:
    parts, x = [], float(_LEFT + 150)
    for phase, shape in PHASE_SHAPE.items():
        parts.append(svg.mark(shape, x, 18, 6, "mark hollow plain"))
        parts.append(svg.text(x + 13, 22, phase, "tick"))
        x += 88
    parts.append(svg.text(x + 8, 22, "B baseline · F final · numbers: rungs of the table", "tick"))
    return "".join(parts)
