"""The end of a search on the console: headline, ladder, what was left out, what to run next."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ridgeline.cli.render.optimize_progress import VERDICT_STYLES
from ridgeline.optimize.output import number_format
from ridgeline.optimize.output.headline import headline
from ridgeline.optimize.result import ConfigurationSummary, LadderResult, Trial


def print_search(console: Console, result: LadderResult, paths: Sequence[Path]) -> None:
    """The whole report. `paths`: the files that were written."""
    console.print()
    console.print(Text(headline(result), style="bold"))
    for summary in (result.baseline, result.final):
        console.print(_configuration(summary), soft_wrap=True)
    console.print()
    if result.trials:
        console.print(_ladder(result))
    for reason, labels in _left_out(result).items():
        text = f"  not tried: {', '.join(labels)}: {reason}"
        console.print(Text(text, style="dim"), soft_wrap=True)
    console.print(Text("\nWhat to run next", style="bold"))
    folder = paths[0].parent if paths else Path()
    for step in result.next_steps:
        line = step.replace("--config ridgeline.toml", f"--config {folder / 'ridgeline.toml'}")
        console.print(Text(f"  {line}"), soft_wrap=True)
    provenance = result.provenance
    spent = f"{result.ended}; {provenance.spent_s:.0f} of {provenance.budget_s:.0f} s used"
    written = f"\n{spent}. Written: {', '.join(map(str, paths))}"
    console.print(Text(written, style="dim"), soft_wrap=True)


def _left_out(result: LadderResult) -> dict[str, list[str]]:
    """The rungs that were left out, by their reason."""
    labels: dict[str, list[str]] = {}
    for left_out in result.not_tried:
        labels.setdefault(left_out.reason, []).append(left_out.label)
    return labels


def _configuration(summary: ConfigurationSummary) -> Text:
    measured = summary.measured
    text = Text(f"  {summary.label:<9}", style="bold")
    text.append(
        f"{number_format.rate(measured.goodput_req_s)} req/s within the SLO · "
        f"TTFT p95 {number_format.duration(measured.ttft_p95_s)} · "
        f"TPOT p95 {number_format.duration(measured.tpot_p95_s)} · "
        f"{number_format.cost(summary.cost)} per 1M output tokens\n{'':<11}",
        style="default",
    )
    text.append(summary.finding.sentence, style="dim")
    return text


def _ladder(result: LadderResult) -> Table:
    """One row per trial; the reasons were printed during the search and are in the report."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("Rung", "Predicted", "Ratio [95% CI]", "req/s", "Tokens", "Verdict"):
        table.add_column(name, overflow="fold")
    for trial in result.trials:
        table.add_row(*_trial_cells(trial))
    return table


def _trial_cells(trial: Trial) -> tuple[Text, ...]:
    return (
        Text(trial.label),
        Text(f"{trial.predicted.gain:.2f}x", style="dim"),
        Text(number_format.ratio(trial.ratio)),
        Text(number_format.change(trial.before, trial.after)),
        Text(number_format.quality(trial), style="dim"),
        Text(trial.verdict, style=VERDICT_STYLES.get(trial.verdict, "yellow")),
    )
