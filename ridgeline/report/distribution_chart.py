"""Chart of one or two latency distributions with the SLO as a line."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from ridgeline.report import svg
from ridgeline.report.svg import Scale

PAIR_WIDTH, HEIGHT, TOP, BOTTOM, LEFT, RIGHT = 460, 290, 34, 52, 46, 16


def distribution_figure(
    name: str, before: Sequence[float], after: Sequence[float], limit_s: float | None
) -> Markup:
    """Empirical distribution functions in milliseconds; either sample may be empty.

    The x axis is logarithmic if values span more than a factor of 20. Empty without values.
    """
    values = [1000 * value for value in (*before, *after) if value > 0]
    if not values:
        return Markup()
    limit = None if not limit_s else 1000 * limit_s
    return svg.figure(
        lambda width: _draw(width, name, (before, after), values, limit), wide=PAIR_WIDTH
    )


def _draw(
    width: int,
    name: str,
    samples: tuple[Sequence[float], Sequence[float]],
    values: Sequence[float],
    limit: float | None,
) -> Markup:
    bounds = [*values, *([limit] if limit else [])]
    log = max(bounds) > 20 * min(bounds)
    low, high = (min(bounds) / 1.1 if log else 0.0), max(bounds) * 1.08
    right, bottom = width - RIGHT, HEIGHT - BOTTOM
    x = Scale(low=low, high=high, start=LEFT, end=right, log=log)
    y = Scale(low=0, high=1, start=bottom, end=TOP)
    parts = [
        svg.x_axis(x, TOP, bottom, f"{name} (ms)" + (", log scale" if log else "")),
        svg.y_axis(y, LEFT, right, "share of requests", "%"),
    ]
    if limit:
        parts.append(svg.line(x(limit), TOP, x(limit), bottom, "slo"))
        anchor, shift = ("end", -6) if x(limit) > width * 0.7 else ("start", 6)
        label = f"SLO {limit:g} ms"
        parts.append(svg.text(x(limit) + shift, TOP - 5, label, "slo-label", anchor))
    parts += [_steps(samples[0], x, y, "cdf before"), _steps(samples[1], x, y, "cdf after")]
    return svg.drawing(width, HEIGHT, f"Distribution of {name}", *parts)


def _steps(samples: Sequence[float], x: Scale, y: Scale, css: str) -> str:
    ordered = sorted(1000 * value for value in samples if value > 0)
    if not ordered:
        return ""
    corners = [(x(ordered[0]), y(0))]
    for rank, value in enumerate(ordered, 1):
        corners += [(x(value), corners[-1][1]), (x(value), y(rank / len(ordered)))]
    return svg.path(corners, css)
