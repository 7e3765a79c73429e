"""Charts of the bench page: timeline, latency against rate, one user against the whole device."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from markupsafe import Markup

from ridgeline.measure.metrics.latency import outcome
from ridgeline.measure.metrics.summary import Summary
from ridgeline.records import RunTrace
from ridgeline.report import svg
from ridgeline.report.numbers import rounded
from ridgeline.report.svg import Scale

LEFT, RIGHT, TOP, BOTTOM, HEIGHT = 54, 16, 34, 52, 300
MAX_ROWS = 200
BAR_CSS = {"ok": "after", "failed": "bad", "timeout": "bad", "cancelled": "flat"}


class SweepPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a sweep: its offered rate (requests/s), its summary, and whether the SLO held."""

    rate: float
    summary: Summary
    holds: bool | None


def timeline_stride(run: RunTrace) -> int:
    """The timeline shows every n-th request: the n."""
    return max(1, -(-len(run.requests) // MAX_ROWS))


def timeline_figure(run: RunTrace) -> Markup:
    """One bar per request, by arrival: grey until its first token, then coloured by its outcome."""
    return svg.figure(lambda width: _timeline(run, width)) if run.requests else Markup()


def _timeline(run: RunTrace, width: int) -> Markup:
    ordered = sorted(run.requests, key=lambda request: request.scheduled_s)
    rows = ordered[:: timeline_stride(run)]
    height = 20 + BOTTOM + max(60, 5 * len(rows))
    x = Scale(low=0.0, high=max(run.duration_s, 1e-6), start=14, end=width - RIGHT)
    parts = [svg.x_axis(x, 10, height - BOTTOM, "seconds since the run began")]
    step = (height - 20 - BOTTOM) / max(1, len(rows))
    for i, request in enumerate(rows):
        y = 14 + i * step
        end_s = request.finished_s or request.sent_s
        first_s = request.token_s[0] if request.token_s else end_s
        tip = f"{request.id}: {outcome(request)}, {request.output_tokens} tokens"
        thickness = max(1.5, step - 1)
        css = f"bar {BAR_CSS[outcome(request)]}"
        parts.append(svg.rect(x(request.scheduled_s), y, x(first_s), thickness, "bar before", tip))
        parts.append(svg.rect(x(first_s), y, x(end_s), thickness, css, tip))
    return svg.drawing(width, height, "Requests over time", *parts)


def latency_figure(points: Sequence[SweepPoint], knee: float | None) -> Markup:
    """p50 and p99 of TTFT by offered rate; `knee` is the largest rate that met the SLO."""
    return svg.figure(lambda width: _latency(points, knee, width))


def _latency(points: Sequence[SweepPoint], knee: float | None, width: int) -> Markup:
    p50, p99 = _ttft_ms(points, 50), _ttft_ms(points, 99)
    if len(p99) < 2:
        return Markup()
    x, y = _scales(p50 + p99, width)
    parts = [*_axes(x, y, width, "offered requests per second", "time to first token (ms)")]
    if knee is not None:
        parts.append(svg.line(x(knee), TOP, x(knee), HEIGHT - BOTTOM, "slo"))
        anchor, shift = ("end", -6) if x(knee) > 0.7 * width else ("start", 6)
        parts.append(
            svg.text(x(knee) + shift, TOP - 4, f"knee {rounded(knee)}/s", "slo-label", anchor)
        )
    for name, series, css in (("p50", p50, "cdf before"), ("p99", p99, "cdf after")):
        parts.append(svg.path([(x(a), y(b)) for a, b in series], css))
        parts.append(svg.text(x(series[-1][0]) - 4, y(series[-1][1]) - 8, name, "tick", "end"))
    for point, (rate, value) in zip(points, p99, strict=False):
        css = "mark bad" if point.holds is False else "mark good"
        parts.append(
            svg.mark(
                "circle",
                x(rate),
                y(value),
                5,
                css,
                f"{rounded(rate)}/s: {rounded(value, 4)} ms",
            )
        )
    return svg.drawing(width, HEIGHT, "Latency against rate", *parts)


def throughput_figure(points: Sequence[SweepPoint]) -> Markup:
    """Tokens per second of one user (1 / TPOT) against those of the whole device."""
    return svg.figure(lambda width: _throughput(points, width))


def _throughput(points: Sequence[SweepPoint], width: int) -> Markup:
    known = [
        point for point in points if point.summary.tpot is not None and point.summary.tpot.p(50) > 0
    ]
    series = [(1 / p.summary.tpot.p(50), p.summary.output_tok_s) for p in known if p.summary.tpot]
    if len(series) < 2:
        return Markup()
    x, y = _scales(series, width)
    parts = [*_axes(x, y, width, "tok/s per user (1 / TPOT p50)", "output tok/s of the device")]
    parts.append(svg.path([(x(a), y(b)) for a, b in series], "way"))
    for point, (a, b) in zip(known, series, strict=True):
        tip = (
            f"{rounded(point.rate)} requests/s: {rounded(a)} tok/s per user, {rounded(b, 4)} tok/s"
        )
        parts.append(svg.mark("circle", x(a), y(b), 5, "mark after", tip))
    return svg.drawing(width, HEIGHT, "Interactivity against throughput", *parts)


def _ttft_ms(points: Sequence[SweepPoint], q: float) -> list[tuple[float, float]]:
    return [
        (point.rate, 1000 * point.summary.ttft.p(q))
        for point in points
        if point.summary.ttft is not None
    ]


def _scales(series: Sequence[tuple[float, float]], width: int) -> tuple[Scale, Scale]:
    def scale(values: Sequence[float], start: float, end: float) -> Scale:
        low, high = min(values), max(values)
        if low > 0 and high > 20 * low:
            return Scale(low=low / 1.2, high=high * 1.2, start=start, end=end, log=True)
        return Scale(low=0.0, high=(high * 1.08) or 1.0, start=start, end=end)

    return (
        scale([a for a, _ in series], LEFT, width - RIGHT),
        scale([b for _, b in series], HEIGHT - BOTTOM, TOP),
    )


def _axes(x: Scale, y: Scale, width: int, x_title: str, y_title: str) -> tuple[str, str]:
    return (
        svg.x_axis(x, TOP, HEIGHT - BOTTOM, x_title),
        svg.y_axis(y, LEFT, width - RIGHT, y_title),
    )
