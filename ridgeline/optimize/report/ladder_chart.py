"""Waterfall chart: how the objective went from the baseline to the final configuration.

Bars chain the measured ratios; a rung that was not kept is a mark with its interval next to the
chain. The last bar is not the product of the others: the final configuration was measured again,
against the baseline.
"""

from __future__ import annotations

import msgspec
from markupsafe import Markup

from ridgeline.optimize.output import number_format
from ridgeline.optimize.report.style import VERDICT_CSS
from ridgeline.optimize.result import ConfigurationSummary, LadderResult, Trial
from ridgeline.report import svg
from ridgeline.report.svg import Scale
from ridgeline.stats import Interval

AXIS = {
    "goodput": "goodput: requests per second that met the SLO",
    "cost": "delivered: output tokens per second within the SLO",
    "latency": "speed: 1 / mean end-to-end latency (1/s)",
}
SHORT_AXIS = {
    "goodput": "goodput (requests/s within the SLO)",
    "cost": "output tokens/s within the SLO",
    "latency": "1 / mean latency (1/s)",
}
TOP = 14
MAX_RATIO = 20.0  # a wider interval is only in the table


class GainBar(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the waterfall: from `start` to `end`, with its interval in the same unit."""

    label: str
    start: float
    end: float
    css: str
    note: str
    tip: str = ""
    interval: tuple[float, float] | None = None
    is_total: bool = False
    is_bar: bool = True


def ladder_chart(result: LadderResult) -> Markup:
    bars = _bars(result)
    reach = max(max(bar.end, bar.start, *(bar.interval or ())) for bar in bars)
    high = 1.12 * reach or 1.0

    def draw(width: int) -> Markup:
        # A narrow screen has no room for labels next to the bars: they go above.
        above = width < 600
        row, axis = (44, SHORT_AXIS) if above else (38, AXIS)
        left, right = (10, 84) if above else (285, 110)
        scale = Scale(low=0, high=high, start=left, end=width - right)
        bottom = TOP + row * len(bars)
        drawn = [_draw(bar, scale, TOP + row * i, row, above) for i, bar in enumerate(bars)]
        title = axis[result.provenance.objective]
        parts = (svg.x_axis(scale, TOP, bottom, title), *drawn)
        return svg.drawing(width, bottom + 48, "Waterfall over the rungs", *parts)

    return svg.figure(draw)


def _bars(result: LadderResult) -> list[GainBar]:
    bars = [_total_bar("Baseline", result.baseline, "before")]
    level = result.baseline.measured.score
    for number, trial in enumerate(result.trials, 1):
        bars.append(_trial_bar(number, trial, level))
        if trial.verdict == "kept":
            level = bars[-1].end
    label = "Final" if result.total is None else "Final, measured again"
    return [*bars, _total_bar(label, result.final, "after")]


def _total_bar(label: str, standing: ConfigurationSummary, css: str) -> GainBar:
    score = number_format.rate(standing.measured.score)
    return GainBar(
        label=label,
        start=0.0,
        end=standing.measured.score,
        css=css,
        note=score,
        tip=f"{label}: {score}",
        is_total=True,
    )


def _trial_bar(number: int, trial: Trial, level: float) -> GainBar:
    kept = trial.verdict == "kept"
    mid = trial.ratio.mid if trial.ratio else 1.0
    note = f"×{mid:.2f}" + ("" if kept else f"  {trial.verdict}")
    return GainBar(
        label=f"{number}  {_shorten(trial.label)}",
        start=level,
        end=level * mid,
        css=VERDICT_CSS[trial.verdict],
        note=note if trial.ratio else trial.verdict,
        tip=f"{trial.label}: {number_format.ratio(trial.ratio)}, {trial.verdict}",
        interval=_ends(trial.ratio, level),
        is_bar=kept,
    )


def _ends(ratio: Interval | None, level: float) -> tuple[float, float] | None:
    if ratio is None or ratio.high > MAX_RATIO:
        return None
    return level * ratio.low, level * ratio.high


def _draw(bar: GainBar, scale: Scale, y: float, height: float, above: bool) -> str:
    css = " strong" if bar.is_total else ""
    top, thickness = (y + 18, height - 26) if above else (y + 8, height - 16)
    middle = top + thickness / 2
    if above:
        label = svg.text(scale.start, y + 13, bar.label, f"row-label{css}")
    else:
        label = svg.text(scale.start - 14, middle + 4, bar.label, f"row-label{css}", "end")
    parts = [label]
    if not bar.is_total:
        parts.append(svg.line(scale(bar.start), y - 6, scale(bar.start), y + height - 8, "guide"))
    if bar.is_bar:
        ends = scale(bar.start), scale(bar.end)
        parts.append(svg.rect(ends[0], top, ends[1], thickness, f"bar {bar.css}", bar.tip))
    else:
        shape = f"mark hollow {bar.css}"
        parts.append(svg.mark("diamond", scale(bar.end), middle, 5, shape, bar.tip))
    if bar.interval is not None:
        parts.append(_whisker(scale, bar.interval, middle))
    right = max(bar.start, bar.end, *(bar.interval or ()))
    parts.append(svg.text(scale(right) + 9, middle + 4, bar.note, f"value{css}"))
    return "".join(parts)


def _whisker(scale: Scale, interval: tuple[float, float], y: float) -> str:
    low, high = scale(interval[0]), scale(interval[1])
    return (
        svg.line(low, y, high, y, "whisker")
        + svg.line(low, y - 4, low, y + 4, "whisker")
        + svg.line(high, y - 4, high, y + 4, "whisker")
    )


def _shorten(label: str, limit: int = 36) -> str:
    plain = label.replace("max_num_batched_tokens=", "budget ").replace("max_num_seqs=", "slots ")
    return plain if len(plain) <= limit else plain[: limit - 1] + "…"
