"""`ridgeline bench`: one run, or a series of runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
from rich.console import Console

from ridgeline.cli.params.engine import refuse
from ridgeline.cli.render.bench import print_bench
from ridgeline.cli.render.bench_series import print_series
from ridgeline.cli.render.live_progress import live_progress
from ridgeline.cli.validate.output_paths import check_file
from ridgeline.errors import BadInput
from ridgeline.measure.bench_options import BenchOptions
from ridgeline.measure.metrics.run_cost import cost_line
from ridgeline.measure.report.vllm_block import vllm_block
from ridgeline.measure.results import event_log_parquet
from ridgeline.report.files import write_file
from ridgeline.report.json_line import json_line
from ridgeline.workflows.bench.bench import BenchResult, bench
from ridgeline.workflows.bench.bench_series import BenchSeries, SeriesPlan, bench_series
from ridgeline.workflows.targets import Target

NOTHING_SUCCEEDED = 1


class BenchOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """Files to write, the layout of the console report, and the machine's price per hour."""

    json: Path | None = None
    log: Path | None = None
    html: Path | None = None
    trace: Path | None = None
    layout: Literal["ridgeline", "vllm"] = "ridgeline"
    dollars_per_hour: float | None = None

    def check_writable(self) -> None:
        """BadInput, before anything is measured, for a path that cannot be written."""
        files = {"--json": self.json, "--log": self.log, "--html": self.html, "--trace": self.trace}
        for flag, path in files.items():
            if path is not None:
                check_file(path, flag)
        if self.log is not None and event_log_parquet.wanted(self.log):
            event_log_parquet.require(self.log)

    def write(self, result: BenchResult | BenchSeries) -> None:
        """Write the result, the page and the trace."""
        if self.json is not None:
            write_file(self.json, [json_line(result.to_dict()).encode(), b"\n"])
        if self.html is not None:
            write_file(self.html, [result.to_html().encode()])
        if self.trace is not None:
            result.save_trace(self.trace)


def run_bench_options(
    options: BenchOptions, target: Target, report: Mapping[str, Any], rate_given: bool
) -> int:
    """One run or a series, by the report flags that were given; the exit code."""
    outputs = BenchOutputs(
        **{name: report.get(name) for name in ("json", "log", "html", "trace")},
        layout=report.get("layout", "ridgeline"),
        dollars_per_hour=report.get("price_per_hour"),
    )
    given = [name for name in ("num_runs", "sweep", "find_goodput") if name in report]
    if not given:
        return run_bench(options, target, outputs)
    flags = ["--" + name.replace("_", "-") for name in given]
    unused = [*flags[1:], *(["--layout"] if "layout" in report else [])]
    if rate_given and given[0] != "num_runs":
        unused.append("--request-rate")
    refuse(unused, f"with {flags[0]}")
    plan = SeriesPlan(
        num_runs=report.get("num_runs"),
        rates=parse_rates(report["sweep"]) if "sweep" in report else (),
        search=parse_range(report["find_goodput"]) if "find_goodput" in report else None,
    )
    return run_bench_series(options, target, plan, outputs)


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
