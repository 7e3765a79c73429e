"""The waterfall: how the objective went from the baseline to the final configuration.

Bars chain the measured ratios; a rung that was not kept is a mark with its interval beside the
chain. The last bar is not the product of the others: it was measured again, against the baseline.
"""

from __future__ import annotations

import msgspec

from ridgeline.measure.report import svg
from ridgeline.measure.report.svg import Scale
from ridgeline.optimize.output import number_format
from ridgeline.optimize.report.style import VERDICT_CSS
from ridgeline.optimize.result import ConfigurationSummary, LadderResult, Trial
from ridgeline.stats import Interval

AXIS = {
    "goodput": "goodput: requests per second that met the SLO",
    "cost": "delivered: output tokens per second within the SLO",
    "latency": "speed: 1 / mean end-to-end latency (1/s)",
}
_WIDTH, _LABELS, _ROW, _TOP = 920, 285, 38, 14
_WIDEST = 20.0  # a whisker beyond this ratio is left to the table


class GainBar(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the waterfall: from `start` to `end`, an interval in the same unit, and words."""

    label: str
    start: float
    end: float
    css: str
    note: str
    tip: str = ""
    interval: tuple[float, float] | None = None
    strong: bool = False
    bar: bool = True


def climb(result: LadderResult) -> str:
    """The whole picture."""
    rows = _rows(result)
    reach = max(max(row.end, row.start, *(row.interval or ())) for row in rows)
    scale = Scale(low=0, high=1.12 * reach or 1.0, start=_LABELS, end=_WIDTH - 76)
    bottom = _TOP + _ROW * len(rows)
    axis = svg.x_axis(scale, _TOP, bottom, AXIS[result.provenance.objective])
    body = [_draw(row, scale, _TOP + _ROW * i) for i, row in enumerate(rows)]
    return svg.drawing(_WIDTH, bottom + 48, "Waterfall over the rungs", axis, *body)


def _rows(result: LadderResult) -> list[GainBar]:
    rows = [_whole("Baseline", result.baseline, "before")]
    level = result.baseline.measured.score
    for number, trial in enumerate(result.trials, 1):
        rows.append(_row(number, trial, level))
        if trial.verdict == "kept":
            level = rows[-1].end
    return [*rows, _whole("Final, measured again", result.final, "after")]


def _whole(label: str, standing: ConfigurationSummary, css: str) -> GainBar:
    score = number_format.rate(standing.measured.score)
    return GainBar(
        label=label,
        start=0.0,
        end=standing.measured.score,
        css=css,
        note=score,
        tip=f"{label}: {score}",
        strong=True,
    )


def _row(number: int, trial: Trial, level: float) -> GainBar:
    kept = trial.verdict == "kept"
    mid = trial.ratio.mid if trial.ratio else 1.0
    note = f"×{mid:.2f}" + ("" if kept else f"  {trial.verdict}")
    return GainBar(
        label=f"{number}  {_shortened(trial.label)}",
        start=level,
        end=level * mid,
        css=VERDICT_CSS[trial.verdict],
        note=note if trial.ratio else trial.verdict,
        tip=f"{trial.label}: {number_format.ratio(trial.ratio)}, {trial.verdict}",
        interval=_ends(trial.ratio, level),
        bar=kept,
    )


def _ends(ratio: Interval | None, level: float) -> tuple[float, float] | None:
    if ratio is None or ratio.high > _WIDEST:
        return None
    return level * ratio.low, level * ratio.high


def _draw(row: GainBar, scale: Scale, y: float) -> str:
    css = " strong" if row.strong else ""
    parts = [svg.text(_LABELS - 14, y + 23, row.label, f"row-label{css}", "end")]
    if not row.strong:
        parts.append(svg.line(scale(row.start), y - 6, scale(row.start), y + _ROW - 8, "guide"))
    if row.bar:
        bar = svg.rect(
            scale(row.start), y + 8, scale(row.end), _ROW - 16, f"bar {row.css}", row.tip
        )
        parts.append(bar)
    else:
        shape = svg.mark(
            "diamond", scale(row.end), y + _ROW / 2, 5, f"mark hollow {row.css}", row.tip
        )
        parts.append(shape)
    if row.interval is not None:
        parts.append(_whisker(scale, row.interval, y + _ROW / 2))
    right = max(row.start, row.end, *(row.interval or ()))
    parts.append(svg.text(scale(right) + 9, y + 23, row.note, f"value{css}"))
    return "".join(parts)


def _whisker(scale: Scale, interval: tuple[float, float], y: float) -> str:
    low, high = scale(interval[0]), scale(interval[1])
    return (
        svg.line(low, y, high, y, "whisker")
        + svg.line(low, y - 4, low, y + 4, "whisker")
        + svg.line(high, y - 4, high, y + 4, "whisker")
    )


def _shortened(label: str, limit: int = 36) -> str:
    plain = label.replace("max_num_batched_tokens=", "budget ").replace("max_num_seqs=", "seats ")
    return plain if len(plain) <= limit else plain[: limit - 1] + "…"
