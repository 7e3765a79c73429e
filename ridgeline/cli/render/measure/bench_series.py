"""The console report of several benchmark runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console, JustifyMethod
from rich.table import Table

from ridgeline.cli.render.console import print_prose
from ridgeline.measure.metrics.run_cost import cost_line
from ridgeline.measure.report.charts import SweepPoint
from ridgeline.report.numbers import rounded
from ridgeline.stats import Interval
from ridgeline.workflows.bench.bench_series import BenchSeries
from ridgeline.workflows.bench.run_cells import figure_cells, observed_cells

Cells = Mapping[str, str]


def print_series(series: BenchSeries, out: Console) -> None:
    """The rates or the intervals, what was observed in each run, warnings and the cost."""
    labelled = [(label, observed_cells(run)) for label, run in series.labelled_runs()]
    if series.points:
        out.print(sweep_table(series.points, series.knee))
        rates = [run.options.request_rate for run in series.runs]
        order = sorted(range(len(rates)), key=rates.__getitem__)
        observed = observed_runs_table("req/s", [labelled[i] for i in order])
    else:
        out.print(intervals_table(series.intervals, len(series.runs)))
        observed = observed_runs_table("run", labelled)
    if observed is not None:
        out.print()
        out.print(observed)
    for number, run in enumerate(series.runs, 1):
        for reason in run.summary.validity.reasons:
            print_prose(out, f"! run {number} invalid: {reason}", "yellow")
    if series.cost is not None:
        print_prose(out, cost_line(series.cost))


def observed_runs_table(title: str, rows: Sequence[tuple[str, Cells]]) -> Table | None:
    """One row per run and a column per observed figure; None if nothing was observed."""
    names = dict.fromkeys(name for _, cells in rows for name in cells)
    if not names:
        return None
    table = _table(title, *names)
    for label, cells in rows:
        table.add_row(label, *(cells.get(name, "–") for name in names))
    return table


def sweep_table(points: Sequence[SweepPoint], knee: float | None) -> Table:
    """One row per rate; times in milliseconds."""
    points = sorted(points, key=lambda point: point.rate)
    rows = [(point.rate, figure_cells(point.summary)) for point in points]
    for _, cells in rows:
        del cells["tpot p99"]  # the table has to fit into 80 columns
    table = _table("req/s", *(rows[0][1] if rows else ()), "")
    for rate, cells in rows:
        table.add_row(rounded(rate), *cells.values(), "knee" if rate == knee else "")
    return table


def intervals_table(intervals: Mapping[str, Interval], count: int) -> Table:
    """Each figure's mean over the runs with its 95 % Student interval."""
    table = _table(f"over {count} runs", "mean", "95 % interval")
    table.columns[0].justify = "left"
    for name, interval in intervals.items():
        ends = f"[{rounded(interval.low, 4)}, {rounded(interval.high, 4)}]"
        table.add_row(name, rounded(interval.mid, 4), ends)
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        justify: JustifyMethod = "left" if column == "lost to" else "right"
        table.add_column(column, justify=justify, no_wrap=column != "lost to")
    return table
