"""The table of `ridgeline lab casestudy`, 80 columns wide."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from ridgeline.workflows.lab.case_study import CaseStudy
from ridgeline.workflows.lab.study_rows import COLUMNS, NOTE, conditions, remarks, stage_row


def print_case_study(study: CaseStudy, out: Console) -> None:
    """The conditions, a row per stage that ran, what each is or why it did not run."""
    out.print(conditions(study), markup=False)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "stage" else "right", no_wrap=True)
    for stage in study.stages:
        if stage.rounds:
            table.add_row(*stage_row(study, stage))
    if study.first is not None:
        out.print(table)
        out.print(NOTE, style="dim", markup=False)
    for line in remarks(study):
        out.print(f"- {line}", markup=False)
    out.print(f"again: {study.command}", markup=False, soft_wrap=True)
