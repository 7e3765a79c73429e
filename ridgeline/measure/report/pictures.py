"""The pictures of a bench report: when what happened, latency against rate, user against device."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ridgeline.measure.metrics import outcome
from ridgeline.measure.report import svg
from ridgeline.measure.report.svg import Scale
from ridgeline.measure.summary import Summary
from ridgeline.records import RunTrace

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 1000, 64, 24, 34, 52
MOST_ROWS = 200
_KINDS = {"ok": "after", "failed": "bad", "timeout": "bad", "cancelled": "flat"}


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a sweep: its offered rate, what came of it, and whether the promise held."""

    rate: float
    summary: Summary
    holds: bool | None


def each_shown(run: RunTrace) -> int:
    """Of how many requests the timeline shows one."""
    return max(1, -(-len(run.requests) // MOST_ROWS))


def timeline(run: RunTrace) -> str:
    """One line per request, by arrival: grey until its first token, then coloured by its end.
    Of many, every nth from the first to the last (`each_shown`)."""
    rows = sorted(run.requests, key=lambda request: request.scheduled_s)[:: each_shown(run)]
    height = TOP + BOTTOM + max(60, 5 * len(rows))
    x = Scale(low=0.0, high=max(run.duration_s, 1e-6), start=LEFT, end=WIDTH - RIGHT)
    parts = [svg.x_axis(x, TOP, height - BOTTOM, "seconds since the run began")]
    step = (height - TOP - BOTTOM) / max(1, len(rows))
    for i, request in enumerate(rows):
        y = TOP + i * step
        end_s = request.finished_s or request.sent_s
        first_s = request.token_s[0] if request.token_s else end_s
        tip = f"{request.id}: {outcome(request)}, {request.output_tokens} tokens"
        thick = max(1.5, step - 1)
        css = f"bar {_KINDS[outcome(request)]}"
        parts.append(svg.rect(x(request.scheduled_s), y, x(first_s), thick, "bar before", tip))
        parts.append(svg.rect(x(first_s), y, x(end_s), thick, css, tip))
    return svg.drawing(WIDTH, height, "Requests over time", *parts)


def latency_against_rate(points: Sequence[Point], knee: float | None) -> str:
    """p50 and p99 of TTFT by offered rate; the knee is the largest rate that held."""
    p50, p99 = _ttft(points, 50), _ttft(points, 99)
    if len(p99) < 2:
        return ""
    parts = [*_axes(p50 + p99, "offered requests per second", "time to first token (ms)")]
    x, y = _scales(p50 + p99)
    if knee is not None:
        parts.append(svg.line(x(knee), TOP, x(knee), 300 - BOTTOM, "slo"))
        parts.append(svg.text(x(knee) + 6, TOP - 4, f"knee {knee:.3g}/s", "slo-label"))
    for name, series, css in (("p50", p50, "cdf before"), ("p99", p99, "cdf after")):
        parts.append(svg.path([(x(a), y(b)) for a, b in series], css))
        parts.append(svg.text(x(series[-1][0]) - 4, y(series[-1][1]) - 8, name, "tick", "end"))
    for point, (rate, value) in zip(points, p99, strict=False):
        css = "mark bad" if point.holds is False else "mark good"
        parts.append(svg.mark("circle", x(rate), y(value), 5, css, f"{rate:.3g}/s: {value:.4g} ms"))
    return svg.drawing(WIDTH, 300, "Latency against rate", *parts)


def user_against_device(points: Sequence[Point]) -> str:
    """Tokens per second for one user (1 / TPOT) against those of the whole machine."""
    series = [
        (1 / point.summary.tpot.p(50), point.summary.output_tok_s)
        for point in points
        if point.summary.tpot is not None and point.summary.tpot.p(50) > 0
    ]
    if len(series) < 2:
        return ""
    x, y = _scales(series)
    parts = [*_axes(series, "tok/s per user (1 / TPOT p50)", "output tok/s of the device")]
    parts.append(svg.path([(x(a), y(b)) for a, b in series], "way"))
    for point, (a, b) in zip(points, series, strict=False):
        tip = f"{point.rate:.3g} requests/s: {a:.3g} tok/s/user, {b:.4g} tok/s"
        parts.append(svg.mark("circle", x(a), y(b), 5, "mark after", tip))
    return svg.drawing(WIDTH, 300, "Interactivity against throughput", *parts)


def _ttft(points: Sequence[Point], q: float) -> list[tuple[float, float]]:
    return [
        (point.rate, 1000 * point.summary.ttft.p(q))
        for point in points
        if point.summary.ttft is not None
    ]


def _scales(series: Sequence[tuple[float, float]]) -> tuple[Scale, Scale]:
    def scale(values: Sequence[float], start: float, end: float) -> Scale:
        low, high = min(values), max(values)
        if low > 0 and high > 20 * low:
            return Scale(low=low / 1.2, high=high * 1.2, start=start, end=end, log=True)
        return Scale(low=0.0, high=(high * 1.08) or 1.0, start=start, end=end)

    return (
        scale([a for a, _ in series], LEFT, WIDTH - RIGHT),
        scale([b for _, b in series], 300 - BOTTOM, TOP),
    )


def _axes(series: Sequence[tuple[float, float]], x_title: str, y_title: str) -> tuple[str, str]:
    x, y = _scales(series)
    return (
        svg.x_axis(x, TOP, 300 - BOTTOM, x_title),
        svg.y_axis(y, LEFT, WIDTH - RIGHT, y_title),
    )
