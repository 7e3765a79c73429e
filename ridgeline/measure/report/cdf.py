"""Distribution functions before and after, with the promise as a line."""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.measure.report import svg
from ridgeline.measure.report.svg import Scale

_CDF_WIDTH, _CDF_HEIGHT = 450, 290


def distribution(
    name: str, before: Sequence[float], after: Sequence[float], limit_s: float | None
) -> str:
    """Two empirical distribution functions in ms, and the promise as a line."""
    everything = [1000 * value for value in (*before, *after) if value > 0]
    if not everything:
        return ""
    bounds = [*everything, *([1000 * limit_s] if limit_s else [])]
    log = max(bounds) > 20 * min(bounds)
    x = Scale(
        low=min(bounds) / 1.1 if log else 0.0,
        high=max(bounds) * 1.08,
        start=58,
        end=_CDF_WIDTH - 18,
        log=log,
    )
    y = Scale(low=0, high=1, start=_CDF_HEIGHT - 52, end=34)
    parts = [
        svg.x_axis(x, 34, _CDF_HEIGHT - 52, f"{name} (ms)" + (", log scale" if log else "")),
        svg.y_axis(y, 58, _CDF_WIDTH - 18, "share of requests", "%"),
    ]
    if limit_s:
        parts.append(svg.line(x(1000 * limit_s), 34, x(1000 * limit_s), _CDF_HEIGHT - 52, "slo"))
        left = x(1000 * limit_s) > _CDF_WIDTH * 0.8
        words_, anchor = f"SLO {1000 * limit_s:g} ms", "end" if left else "start"
        shift = -6 if left else 6
        parts.append(svg.text(x(1000 * limit_s) + shift, 30, words_, "slo-label", anchor))
    parts += [_steps(before, x, y, "cdf before"), _steps(after, x, y, "cdf after")]
    return svg.drawing(_CDF_WIDTH, _CDF_HEIGHT, f"Distribution of {name} before and after", *parts)


def _steps(samples: Sequence[float], x: Scale, y: Scale, css: str) -> str:
    ordered = sorted(1000 * value for value in samples if value > 0)
    if not ordered:
        return ""
    corners = [(x(ordered[0]), y(0))]
    for rank, value in enumerate(ordered, 1):
        corners += [(x(value), corners[-1][1]), (x(value), y(rank / len(ordered)))]
    return svg.path(corners, css)
