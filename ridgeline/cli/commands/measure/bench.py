"""`ridgeline bench`: one run, or a series of runs."""

from __future__ import annotations

import msgspec
from rich.console import Console

from ridgeline.cli.params.invocation import Invocation
from ridgeline.cli.render.console import ReportConsole
from ridgeline.cli.render.live_progress import live_progress
from ridgeline.cli.render.measure.bench import print_bench
from ridgeline.cli.render.measure.bench_series import print_series
from ridgeline.config.load import BenchOptions, BenchReport, BenchTarget
from ridgeline.config.settings import Settings
from ridgeline.report.files import write_file
from ridgeline.report.json_line import json_line
from ridgeline.workflows.bench.bench import BenchResult, bench, check_outputs
from ridgeline.workflows.bench.bench_series import (
    BenchSeries,
    SeriesPlan,
    bench_series,
    series_plan,
)
from ridgeline.workflows.targets import Target, bench_target

NOTHING_SUCCEEDED = 1


def bench_command(call: Invocation) -> int:
    """`ridgeline bench`: one run, or a series of runs."""
    report, settings = call.read(BenchReport), call.read(Settings)
    options = msgspec.structs.replace(call.read(BenchOptions), seed=settings.seed)
    target, plan = bench_target(call.read(BenchTarget), call.engine_settings), series_plan(report)
    if plan is None:
        return run_bench(options, target, report)
    return run_bench_series(options, target, plan, report)


def run_bench(
    options: BenchOptions, target: Target, report: BenchReport, console: Console | None = None
) -> int:
    """Measure, print and write; 1 if no request succeeded."""
    check_outputs(report)
    with live_progress() as observer:
        result = bench(options, target, dollars_per_hour=report.price_per_hour, observer=observer)
    _write(result, report)  # before printing, which a closed pipe ends
    if report.log is not None:
        result.save_log(report.log)
    if report.json:
        print(json_line(result.to_dict()))
    else:
        print_bench(result, console or ReportConsole(), report.layout)
    return 0 if result.summary.num_ok else NOTHING_SUCCEEDED


def run_bench_series(
    options: BenchOptions,
    target: Target,
    plan: SeriesPlan,
    report: BenchReport,
    console: Console | None = None,
) -> int:
    """Measure, print and write; 1 if no request succeeded, or no rate of a search met the SLO."""
    check_outputs(report)
    with live_progress() as observer:
        series = bench_series(
            options,
            target,
            plan,
            log=report.log,
            dollars_per_hour=report.price_per_hour,
            observer=observer,
        )
    _write(series, report)
    if report.json:
        print(json_line(series.to_dict()))
    else:
        print_series(series, console or ReportConsole())
    failed = plan.search is not None and series.knee is None
    return NOTHING_SUCCEEDED if failed or not series.shown_run.summary.num_ok else 0


def _write(result: BenchResult | BenchSeries, report: BenchReport) -> None:
    if report.output_json is not None:
        write_file(report.output_json, [json_line(result.to_dict()).encode(), b"\n"])
    if report.html is not None:
        write_file(report.html, [result.to_html().encode()])
    if report.trace is not None:
        result.save_trace(report.trace)
