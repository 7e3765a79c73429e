"""The page of a case study: its stages as tables, and a bar for the speed of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from markupsafe import Markup

from ridgeline.report import svg
from ridgeline.report.html import HtmlTable, render_page
from ridgeline.report.svg import Scale
from ridgeline.workflows.lab.study_rows import COLUMNS, NOTE, conditions, remarks, stage_row

if TYPE_CHECKING:
    from ridgeline.workflows.lab.case_study import CaseStudy


LEFT, RIGHT, ROW, TOP, BOTTOM = 92, 76, 30, 12, 44


def case_study_page(study: CaseStudy) -> str:
    """Self-contained HTML of a case study."""
    rows = [stage_row(study, stage) for stage in study.stages if stage.rounds]
    return render_page(
        "workflows/lab/case_study.html",
        title=f"Ridgeline case study: {study.model}",
        eyebrow="Ridgeline lab",
        heading=f"Case study: {study.model} on {study.device}",
        lede=f"{conditions(study)}.",
        speeds=svg.figure(lambda width: _bars(study, width)) if rows else Markup(),
        stages=HtmlTable(columns=COLUMNS, rows=rows),
        note=NOTE,
        remarks=remarks(study),
        command=study.command,
        date=study.date,
    )


def _bars(study: CaseStudy, width: int) -> Markup:
    """A bar from 0 to the median tok/s of each stage, with its range."""
    ran = [stage for stage in study.stages if stage.rounds]
    height = TOP + ROW * len(ran) + BOTTOM
    fastest = max(max(stage.values("tok_s")) for stage in ran)
    x = Scale(low=0.0, high=1.05 * fastest, start=LEFT, end=width - RIGHT)
    parts = [svg.x_axis(x, TOP, height - BOTTOM, "output tok/s, all sequences")]
    for index, stage in enumerate(ran):
        speeds, median = stage.values("tok_s"), stage.median("tok_s") or 0.0
        y = TOP + ROW * index
        tip = f"{stage.title}: {median:.1f} tok/s, {min(speeds):.1f} to {max(speeds):.1f}"
        parts.append(svg.text(LEFT - 8, y + 18, stage.name, "tick", anchor="end"))
        parts.append(svg.rect(LEFT, y + 6, x(median), ROW - 12, "bar after", tip))
        parts.append(svg.line(x(min(speeds)), y + ROW / 2, x(max(speeds)), y + ROW / 2, "whisker"))
        parts.append(svg.text(x(max(speeds)) + 6, y + 19, f"{median:.1f}", "tick"))
    return svg.drawing(width, height, "Speed of the stages", *parts)
