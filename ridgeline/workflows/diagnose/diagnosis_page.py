"""Pages of a diagnosis and of an operator profile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from markupsafe import Markup

from ridgeline.diagnose.roofline.operators import PhaseTable, Profile
from ridgeline.report.html import HtmlTable, render_page
from ridgeline.report.numbers import rounded
from ridgeline.report.roofline_chart import PHASE_LEGEND, Mark, roofline_figure
from ridgeline.roofline import Peaks, RooflinePoint
from ridgeline.workflows.diagnose.finding_text import finding_lines, no_finding, shares_line
from ridgeline.workflows.diagnose.profile_cells import COLUMNS, operator_cells, total_cells

if TYPE_CHECKING:
    from ridgeline.workflows.diagnose.diagnose_run import Diagnosis

CSS = {"prefill": "flat", "decode": "after", "mixed": "before"}
PHASE_MARK = {"prefill": "P", "decode": "D", "mixed": "M"}
KEY = f"{PHASE_LEGEND}\nP, D, M: whole phases"


def diagnosis_page(diagnosis: Diagnosis) -> str:
    """The losses, the findings, and the phases under the roofline."""
    assert diagnosis.losses is not None
    roof = diagnosis.roof
    figure, intro = Markup(), ""
    if roof is not None and roof.points:
        marks = [Mark(PHASE_MARK[point.phase], CSS[point.phase], point) for point in roof.points]
        figure = roofline_figure(marks, roof.peaks, "The roofline")
        intro = _roofline_intro(roof.peaks, roof.note)
    nothing = no_finding(diagnosis.losses)
    return render_page(
        "workflows/diagnose/diagnosis.html",
        title=f"Ridgeline: {diagnosis.target}",
        eyebrow="Ridgeline · diagnosis",
        heading=diagnosis.target,
        lede=f"{diagnosis.losses.num_requests} requests. Where latency went: "
        f"{shares_line(diagnosis.losses)}.",
        findings=[
            {
                "verdict": finding.verdict,
                "sentence": finding.sentence,
                "details": [(name, text) for name, text in finding_lines(finding).items() if text],
            }
            for finding in diagnosis.findings
        ],
        no_finding=f"{nothing[0].upper()}{nothing[1:]}.",
        roofline=figure,
        roofline_intro=intro,
        roofline_key=KEY,
    )


def profile_page(profile: Profile) -> str:
    """A roofline and a table per phase; a row's number is that of its mark."""
    return render_page(
        "workflows/diagnose/profile.html",
        title=f"Ridgeline: {profile.target}",
        eyebrow="Ridgeline · profile by operator",
        heading=profile.target,
        lede="",
        phases=[_phase(profile, phase) for phase in profile.phases],
        stands_out=profile.stands_out,
    )


def _phase(profile: Profile, phase: PhaseTable) -> dict[str, object]:
    points = [point for point in profile.points if point.phase == phase.phase]
    marks = _numbered_marks(phase, points)
    title = f"{phase.phase[:1].upper()}{phase.phase[1:]}: {phase.what}"
    return {
        "name": phase.phase,
        "title": title,
        "roofline": roofline_figure(marks, profile.peaks, title),
        "roofline_intro": _roofline_intro(profile.peaks),
        "roofline_key": f"{KEY} · numbers: rows of the table",
        "operators": _operators(phase, marks),
        "operators_intro": f"{rounded(1e3 * phase.pass_s, 4)} ms per pass, "
        f"{rounded(1e3 * phase.plain_s, 4)} without timing its operators; "
        f"mean of the middle half of {phase.num_passes} passes.",
    }


def _numbered_marks(phase: PhaseTable, points: Sequence[RooflinePoint]) -> list[Mark]:
    """Operators by the number of their row; the whole phase is drawn last, on top."""
    rows = {row.title: str(number) for number, row in enumerate(phase.rows, 1)}
    css = CSS[phase.phase]
    marks = [Mark(rows[point.name], css, point) for point in points if point.name in rows]
    whole = [
        Mark(PHASE_MARK[point.phase], "good", point)
        for point in points
        if point.name == phase.phase
    ]
    return [*marks, *whole]


def _roofline_intro(peaks: Peaks, note: str = "") -> str:
    intro = (
        f"Peaks from {peaks.source}. Left of the ridge ({rounded(peaks.ridge)} FLOP per byte) "
        f"bandwidth is the limit, right of it {peaks.dtype} compute."
    )
    return f"{intro} {note[:1].upper()}{note[1:]}." if note else intro


def _operators(phase: PhaseTable, marks: Sequence[Mark]) -> HtmlTable:
    numbers = {mark.number for mark in marks}
    rows = []
    for number, cells in enumerate([*map(operator_cells, phase.rows), total_cells(phase)], 1):
        rows.append((str(number) if str(number) in numbers else "", *cells))
    return HtmlTable(columns=("", *COLUMNS), rows=rows, num_text=2)
