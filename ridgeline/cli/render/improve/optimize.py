"""The end of a search on the console: headline, ladder, what was left out, what to run next."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ridgeline.cli.render.console import print_prose
from ridgeline.cli.render.improve.optimize_progress import VERDICT_STYLES
from ridgeline.optimize.cost import MachinePrice
from ridgeline.optimize.output import number_format
from ridgeline.optimize.output.headline import headline
from ridgeline.optimize.result import ConfigurationSummary, LadderResult, Trial, by_reason

RUNG, HEADINGS = "Rung", ("Predicted", "Ratio [95% CI]", "req/s", "Verdict")
LABEL = re.compile(r"(.*?)(?: \(([^()]*=[^()]*)\))?")
MIN_RUNG = 14  # columns
INDENT = 11  # columns: the label of a configuration


def print_search(console: Console, result: LadderResult, paths: Sequence[Path]) -> None:
    """The whole report. `paths`: the files that were written."""
    console.print()
    if result.provenance.is_twin:
        print_prose(console, f"On a {result.provenance.server}: its device is only modelled.")
    print_prose(console, headline(result), "bold")
    for summary in (result.baseline, result.final):
        print_prose(console, _configuration(summary, result.price), column=INDENT)
    console.print()
    if result.trials:
        print_ladder(console, result.trials)
    for reason, labels in by_reason(result.not_tried).items():
        text = f"  not tried: {'; '.join(labels)}: {reason}"
        print_prose(console, text, "dim", column=4)
    console.print(Text("\nWhat to run next", style="bold"))
    folder = paths[0].parent if paths else Path()
    for step in result.next_steps:
        line = step.replace("--config ridgeline.toml", f"--config {folder / 'ridgeline.toml'}")
        console.print(Text(f"  {line}"), soft_wrap=True)
    provenance = result.provenance
    spent = f"{result.ended}; {provenance.spent_s:.0f} of {provenance.budget_s:.0f} s used"
    written = f"\n{spent}. Written: {', '.join(map(str, paths))}"
    print_prose(console, written, "dim")


def _configuration(summary: ConfigurationSummary, price: MachinePrice) -> Text:
    """Goodput, latencies, and cost if the user named a price; then what bounds them."""
    measured = summary.measured
    cost = "" if price.notional else f" · {number_format.cost(summary.cost)} per 1M output tokens"
    text = Text(f"  {summary.label:<9}", style="bold")
    text.append(
        f"{number_format.rate(measured.goodput_req_s)} req/s within the SLO · "
        f"TTFT p95 {number_format.duration(measured.ttft_p95_s)} · "
        f"TPOT p95 {number_format.duration(measured.tpot_p95_s)}{cost}\n{'':<{INDENT}}",
        style="default",
    )
    text.append(summary.finding.sentence, style="dim")
    return text


def print_ladder(console: Console, trials: Sequence[Trial]) -> None:
    """Two lines per trial: its rung and figures, then its flags and what its tokens showed.

    The reasons were printed during the search, and are in the report.
    """
    rows = [_figures(trial) for trial in trials]
    widths = [max(map(len, column)) for column in zip(HEADINGS, *rows, strict=True)]
    room = max(MIN_RUNG, console.width - sum(widths) - 2 * len(widths))
    widest = max(len(_title(trial)[0]) for trial in trials)
    table_widths = [min(room, max(widest, len(RUNG))), *widths]
    console.print(_row([Text(name, style="dim") for name in (RUNG, *HEADINGS)], table_widths))
    for trial, (predicted, ratio, change, verdict) in zip(trials, rows, strict=True):
        title, settings = _title(trial)
        verdict_style = VERDICT_STYLES.get(trial.verdict, "yellow")
        cells = [
            Text(title),
            Text(predicted, style="dim"),
            Text(ratio),
            Text(change),
            Text(verdict, style=verdict_style),
        ]
        console.print(_row(cells, table_widths))
        details = " · ".join(filter(None, (settings, number_format.quality(trial))))
        print_prose(console, f"  {details}", "dim", column=4)


def _title(trial: Trial) -> tuple[str, str]:
    """The name of the rung, and the settings that its label has in brackets."""
    found = LABEL.fullmatch(trial.label)
    return (found[1], found[2] or "") if found else (trial.label, "")


def _figures(trial: Trial) -> tuple[str, ...]:
    return (
        f"{trial.predicted.gain:.2f}x",
        number_format.ratio(trial.ratio),
        number_format.change(trial.before, trial.after),
        trial.verdict,
    )


def _row(cells: Sequence[Text], widths: Sequence[int]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for place, width in enumerate(widths):
        table.add_column(width=width, no_wrap=place > 0)  # a rung's name folds, figures do not
    table.add_row(*cells)
    return table
