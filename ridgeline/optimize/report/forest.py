"""One cell of the ladder's table: a ratio with its interval, next to the predicted ratio."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from ridgeline.optimize.output import number_format
from ridgeline.optimize.report.style import VERDICT_CSS
from ridgeline.optimize.result import Trial
from ridgeline.report import svg
from ridgeline.report.svg import Scale


def forest_cell(trial: Trial, low: float, high: float) -> Markup:
    """The ratio with its interval on a log axis, the prediction as a hollow mark, 1 as a line."""
    scale = Scale(low=low, high=high, start=6, end=174, log=True)
    parts = [svg.line(scale(1), 2, scale(1), 28, "guide")]
    predicted = f"predicted {trial.predicted.gain:.2f}x"
    parts.append(
        svg.mark("diamond", scale(trial.predicted.gain), 15, 4, "mark hollow predicted", predicted)
    )
    if trial.ratio is not None:
        css = VERDICT_CSS[trial.verdict]
        bounded = max(trial.ratio.low, low), min(trial.ratio.high, high)
        parts.append(svg.line(scale(bounded[0]), 15, scale(bounded[1]), 15, f"whisker {css}"))
        tip = number_format.ratio(trial.ratio)
        parts.append(svg.mark("circle", scale(trial.ratio.mid), 15, 4.5, f"mark {css}", tip))
    return svg.drawing(180, 30, f"ratio {number_format.ratio(trial.ratio)}", *parts)


def forest_range(trials: Sequence[Trial]) -> tuple[float, float]:
    """One axis for all rows, so that they can be compared by eye."""
    values = [trial.predicted.gain for trial in trials]
    for trial in trials:
        if trial.ratio is not None:
            values += [trial.ratio.mid, max(trial.ratio.low, 0.1), min(trial.ratio.high, 20.0)]
    return min([0.7, *values]) / 1.1, max([1.4, *values]) * 1.1
