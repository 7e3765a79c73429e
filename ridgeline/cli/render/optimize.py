"""The end of a climb on the terminal: headline, ladder, what was left out, what to run next."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ridgeline.optimize.output import number_format
from ridgeline.optimize.report.page import headline
from ridgeline.optimize.result import ConfigurationSummary, LadderResult, Trial

STYLES = {"kept": "green", "regressed": "red", "crashed": "red", "cannot run": "red"}


def show(console: Console, result: LadderResult, paths: Sequence[Path]) -> None:
    """Print everything that a reader wants at once."""
    console.print()
    console.print(Text(headline(result), style="bold"))
    for standing in (result.baseline, result.final):
        console.print(_standing(standing), soft_wrap=True)
    console.print()
    if result.trials:
        console.print(_ladder(result))
    for left in result.not_tried:
        console.print(
            Text(f"  not tried: {left.label}: {left.reason}", style="dim"), soft_wrap=True
        )
    console.print(Text("\nWhat to run next", style="bold"))
    folder = paths[0].parent if paths else Path()
    for step in result.next_steps:
        line = step.replace("--config ridgeline.toml", f"--config {folder / 'ridgeline.toml'}")
        console.print(Text(f"  {line}"), soft_wrap=True)
    told = result.provenance
    spent = f"{result.ended}; {told.spent_s:.0f} of {told.budget_s:.0f} s used"
    console.print(
        Text(f"\n{spent}. Written: {', '.join(map(str, paths))}", style="dim"), soft_wrap=True
    )


def _standing(standing: ConfigurationSummary) -> Text:
    found = standing.measured
    text = Text(f"  {standing.label:<9}", style="bold")
    text.append(
        f"{number_format.rate(found.goodput_req_s)} req/s within the SLO · "
        f"TTFT p95 {number_format.duration(found.ttft_p95_s)} · TPOT p95 {number_format.duration(found.tpot_p95_s)}"
        f" · {number_format.cost(standing.cost)} per 1M output tokens\n{'':<11}",
        style="default",
    )
    text.append(standing.finding.sentence, style="dim")
    return text


def _ladder(result: LadderResult) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("Rung", "Predicted", "Ratio [95% CI]", "req/s", "Tokens", "Verdict"):
        table.add_column(name, overflow="fold")
    for trial in result.trials:
        table.add_row(*_row(trial))
    return table  # the reasons went by while it ran, and stand in the report


def _row(trial: Trial) -> tuple[Text, ...]:
    style = STYLES.get(trial.verdict, "yellow")
    return (
        Text(trial.label),
        Text(f"{trial.predicted.gain:.2f}x", style="dim"),
        Text(number_format.ratio(trial.ratio)),
        Text(number_format.change(trial.before, trial.after)),
        Text(number_format.quality(trial), style="dim"),
        Text(trial.verdict, style=style),
    )
