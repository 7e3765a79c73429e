"""`ridgeline bench`: one run, or a series of runs."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
from rich.console import Console

from ridgeline.cli.params.invocation import Invocation
from ridgeline.cli.render.bench import print_bench
from ridgeline.cli.render.bench_series import print_series
from ridgeline.cli.render.live_progress import live_progress
from ridgeline.cli.validate.output_paths import check_file
from ridgeline.config.load import BenchOptions, BenchReport, BenchTarget, ReportLayout
from ridgeline.config.rules import refuse
from ridgeline.config.settings import Settings
from ridgeline.errors import BadInput
from ridgeline.measure.metrics.run_cost import cost_line
from ridgeline.measure.report.vllm_block import vllm_block
from ridgeline.measure.results import event_log_parquet
from ridgeline.report.files import write_file
from ridgeline.report.json_line import json_line
from ridgeline.workflows.bench.bench import BenchResult, bench
from ridgeline.workflows.bench.bench_series import BenchSeries, SeriesPlan, bench_series
from ridgeline.workflows.targets import RemoteServer, Target

NOTHING_SUCCEEDED = 1


class BenchOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """Files to write, the layout of the console report, and the machine's price per hour."""

    json: Path | None = None
    log: Path | None = None
    html: Path | None = None
    trace: Path | None = None
    layout: ReportLayout = "ridgeline"
    dollars_per_hour: float | None = None

    def check_writable(self) -> None:
        """BadInput, before anything is measured, for a path that cannot be written."""
        files = {
            "--output-json": self.json,
            "--log": self.log,
            "--html": self.html,
            "--trace": self.trace,
        }
        for flag, path in files.items():
            if path is not None:
                check_file(path, flag)
        if self.log is not None and event_log_parquet.is_parquet(self.log):
            event_log_parquet.load_pyarrow(self.log)

    def write(self, result: BenchResult | BenchSeries) -> None:
        """Write the result, the page and the trace."""
        if self.json is not None:
            write_file(self.json, [json_line(result.to_dict()).encode(), b"\n"])
        if self.html is not None:
            write_file(self.html, [result.to_html().encode()])
        if self.trace is not None:
            result.save_trace(self.trace)


def bench_command(call: Invocation) -> int:
    """`ridgeline bench`: one run, or a series of runs."""
    report, settings = call.read(BenchReport), call.read(Settings)
    options = msgspec.structs.replace(call.read(BenchOptions), seed=settings.seed)
    outputs = BenchOutputs(
        json=report.output_json,
        log=report.log,
        html=report.html,
        trace=report.trace,
        layout=report.layout,
        dollars_per_hour=report.price_per_hour,
    )
    target = bench_target(call)
    if report.num_runs is None and report.sweep is None and report.find_goodput is None:
        return run_bench(options, target, outputs)
    plan = SeriesPlan(
        num_runs=report.num_runs,
        rates=() if report.sweep is None else parse_rates(report.sweep),
        search=None if report.find_goodput is None else parse_range(report.find_goodput),
    )
    return run_bench_series(options, target, plan, outputs)


def bench_target(call: Invocation) -> Target:
    """The engine here, or the server at --url. Raises BadInput."""
    given = call.read(BenchTarget)
    if given.url is None:
        refuse(["--model"] if given.model and given.named_model else [], "with MODEL")
        return call.settings(given.model or given.named_model)
    refuse(["MODEL"] if given.model and not given.accelerator else [], "with --url")
    refuse(["--accelerator"] if given.accelerator and not given.model else [], "without MODEL")
    return RemoteServer(
        url=given.url,
        model=given.served_model_name or given.named_model,
        shape=given.model,
        accelerator=given.accelerator,
        endpoint=given.endpoint or "auto",
        api_key=given.api_key,
    )


def run_bench(
    options: BenchOptions, target: Target, outputs: BenchOutputs, console: Console | None = None
) -> int:
    """Measure, print and write; 1 if no request succeeded."""
    out = console or Console(highlight=False)
    outputs.check_writable()
    with live_progress() as observer:
        result = bench(
            options, target, dollars_per_hour=outputs.dollars_per_hour, observer=observer
        )
    if outputs.layout == "vllm":
        block = vllm_block(result.to_dict(), options.metrics, options.percentiles)
        out.print(block, markup=False)
    else:
        print_bench(result, out)
    if result.cost is not None:
        out.print(cost_line(result.cost), markup=False)
    outputs.write(result)
    if outputs.log is not None:
        result.save_log(outputs.log)
    return 0 if result.summary.num_ok else NOTHING_SUCCEEDED


def run_bench_series(
    options: BenchOptions,
    target: Target,
    plan: SeriesPlan,
    outputs: BenchOutputs,
    console: Console | None = None,
) -> int:
    """Measure, print and write; 1 if no request succeeded, or no rate of a search met the SLO."""
    out = console or Console(highlight=False)
    outputs.check_writable()
    with live_progress() as observer:
        series = bench_series(
            options,
            target,
            plan,
            log=outputs.log,
            dollars_per_hour=outputs.dollars_per_hour,
            observer=observer,
        )
    print_series(series, out)
    outputs.write(series)
    failed = plan.search is not None and series.knee is None
    return NOTHING_SUCCEEDED if failed or not series.shown_run.summary.num_ok else 0


def parse_rates(text: str) -> tuple[float, ...]:
    """`1,2,4`: positive rates."""
    return _numbers("--sweep", text, ",", "write e.g. 1,2,4,8")


def parse_range(text: str) -> tuple[float, float]:
    """`1:32`: the lowest and the highest rate to try."""
    low, high = (*_numbers("--find-goodput", text, ":", "write e.g. 1:32"), math.nan)[:2]
    if not low <= high:
        raise BadInput("--find-goodput needs a range", value=text, fix="write e.g. 1:32")
    return low, high


def _numbers(flag: str, text: str, separator: str, fix: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(part) for part in text.split(separator))
    except ValueError:
        numbers = (math.nan,)
    if not all(math.isfinite(x) and x > 0 for x in numbers):
        raise BadInput(f"{flag} needs positive numbers", value=text, fix=fix)
    return numbers
