"""What `ridgeline diagnose` found as one self-contained page: no script, nothing fetched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

from ridgeline.diagnose import Ranked, RooflinePoint
from ridgeline.diagnose.profile import PhaseTable, Profile
from ridgeline.optimize.report.roof import Marked, picture
from ridgeline.roofline import Peaks
from ridgeline.workflows.diagnose.finding_text import finding_lines, shares_line
from ridgeline.workflows.diagnose.profile_cells import COLUMNS, operator_cells, total_cells

if TYPE_CHECKING:
    from ridgeline.workflows.diagnose.diagnose_run import Diagnosis

CSS = {"prefill": "flat", "decode": "after", "mixed": "before"}
WHOLE = {"prefill": "P", "decode": "D", "mixed": "M"}
NOTE = "P, D, M: whole phases"


def diagnosis_page(found: Diagnosis) -> str:
    """The losses, the findings, and where the phases stand under the roofline."""
    assert found.blame is not None
    lede = f"{found.blame.num_requests} requests. Where latency went: {shares_line(found.blame)}."
    body = [_header("diagnosis", found.target, lede), *map(_finding, found.findings)]
    if not found.findings:
        body.append(_section("No finding", "No cause takes enough of the latency to be mended."))
    if found.roof is not None and found.roof.points:
        marks = [Marked(WHOLE[each.phase], CSS[each.phase], each) for each in found.roof.points]
        body.append(_roof(marks, found.roof.peaks, NOTE, more=found.roof.note))
    return _page(found.target, body)


def profile_page(found: Profile) -> str:
    """Both rooflines and tables; a row's number is that of its mark."""
    body = [_header("profile by operator", found.target, "")]
    for phase in found.phases:
        points = [point for point in found.points if point.phase == phase.phase]
        marks = _numbered(phase, points)
        title = f"{phase.phase[:1].upper()}{phase.phase[1:]}: {phase.what}"
        body.append(_roof(marks, found.peaks, f"{NOTE} · numbers: rows of the table", title))
        told = (
            f"{1e3 * phase.pass_s:.4g} ms a pass, {1e3 * phase.plain_s:.4g} without timing its "
            f"operators; mean of the middle half of {phase.num_passes} passes."
        )
        body.append(_section(f"Operators of {phase.phase}", told, _operators(phase, marks)))
    lines = "".join(f"<li>{escape(line)}</li>" for line in found.stands_out)
    body.append(_section("What stands out", "", f"<ul>{lines}</ul>"))
    return _page(found.target, body)


def _numbered(phase: PhaseTable, points: Sequence[RooflinePoint]) -> list[Marked]:
    """The whole phase on top; its operators by their row's number."""
    rows = {row.title: str(number) for number, row in enumerate(phase.rows, 1)}
    css = CSS[phase.phase]
    marks = [Marked(rows[each.name], css, each) for each in points if each.name in rows]
    whole = [Marked(WHOLE[each.phase], "good", each) for each in points if each.name == phase.phase]
    return [*marks, *whole]


def _roof(
    marks: Sequence[Marked],
    peaks: Peaks,
    note: str,
    title: str = "The roofline",
    more: str = "",
) -> str:
    drawn = picture(marks, peaks, title, note)
    told = (
        f"Peaks from {escape(peaks.source)}. Left of the ridge "
        f"({peaks.ridge:.3g} FLOP per byte) bandwidth is the limit, right of it arithmetic in "
        f"{escape(peaks.dtype)}." + (f" {escape(more[:1].upper() + more[1:])}." if more else "")
    )
    return _section(title, told, f'<div class="figure">{drawn}</div>')


def _operators(phase: PhaseTable, marks: Sequence[Marked]) -> str:
    head = "".join(f'<th class="num">{name}</th>' for name in COLUMNS[1:])
    shown = {mark.number for mark in marks}
    rows = []
    for number, (title, *figures) in enumerate(
        [*map(operator_cells, phase.rows), total_cells(phase)], 1
    ):
        label = str(number) if str(number) in shown else ""
        told = "".join(f'<td class="num">{escape(figure)}</td>' for figure in figures)
        rows.append(f'<tr><td class="num">{label}</td><td>{escape(title)}</td>{told}</tr>')
    return (
        f'<div class="scroll"><table><tr><th></th><th>operator</th>{head}</tr>'
        f"{''.join(rows)}</table></div>"
    )


def _finding(found: Ranked) -> str:
    rows = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>"
        for name, text in finding_lines(found).items()
        if text
    )
    return _section(escape(found.verdict), escape(found.sentence), f"<dl>{rows}</dl>")


def _header(what: str, target: str, lede: str) -> str:
    told = f'<p class="lede">{escape(lede)}</p>' if lede else ""
    return (
        f'<header><div class="eyebrow">Ridgeline · {what}</div><h1>{escape(target)}</h1>'
        f"{told}</header>"
    )


def _section(title: str, lede: str, inner: str = "") -> str:
    return f"<section><h2>{title}</h2><p>{lede}</p>{inner}</section>"


def _page(target: str, body: Iterable[str]) -> str:
    style = files("ridgeline.measure.report").joinpath("style.css").read_text(encoding="utf-8")
    name = escape(f"Ridgeline: {target}")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name}</title><style>{style}</style></head><body><main>{''.join(body)}</main>"
        "</body></html>"
    )
