"""Several benchmark runs as one measurement: repetitions, a sweep of rates, or a goodput search.

Every run has its own seed: with equal seeds the second run would find the prompts of the first in
the prefix cache.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.config.load import BenchOptions, BenchReport
from ridgeline.config.settings import Settings
from ridgeline.errors import BadInput
from ridgeline.measure.bench_options import check_options
from ridgeline.measure.goodput_search import find_goodput, is_saturated, min_requests_per_run
from ridgeline.measure.metrics.remote_utilisation import RemoteUtilisation
from ridgeline.measure.metrics.run_cost import RunCost, cost_of_run
from ridgeline.measure.metrics.summary import Summary, summarise
from ridgeline.measure.metrics.window import window_of
from ridgeline.measure.report.bench_page import RunSeries, bench_page
from ridgeline.measure.report.charts import SweepPoint
from ridgeline.measure.report.chrome_trace import chrome_trace
from ridgeline.measure.results.event_log import RunContext, write_run
from ridgeline.measure.results.vllm_result import vllm_result
from ridgeline.records import RunTrace
from ridgeline.records.progress import Observer, StageFinished, StageStarted, silent
from ridgeline.report.files import write_file
from ridgeline.report.json_line import json_line, plain
from ridgeline.report.numbers import rounded
from ridgeline.report.result import Result
from ridgeline.stats import Interval, mean_interval
from ridgeline.workflows.bench.observed_tables import observed_tables
from ridgeline.workflows.bench.run_cells import figure_cells, observed_cells
from ridgeline.workflows.diagnose.diagnose_run import diagnose_run
from ridgeline.workflows.load.load_session import LoadSession, load_session, run_context
from ridgeline.workflows.load.server_monitor import Observed
from ridgeline.workflows.load.server_utilisation import server_utilisation
from ridgeline.workflows.load.token_workload import load_for
from ridgeline.workflows.run_async import run_async
from ridgeline.workflows.targets import Target

MAX_SEARCH_S = 24 * 3600.0
MAX_RUNS_PER_RATE = 3  # while the interval of its attainment includes the SLO's


class SeriesPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Exactly one of the three: repetitions, `rates` in requests/s, or the range of a search."""

    num_runs: int | None = None
    rates: tuple[float, ...] = ()
    search: tuple[float, float] | None = None


def series_plan(report: BenchReport) -> SeriesPlan | None:
    """The series that the options describe; None for a single run. Raises BadInput."""
    if report.num_runs is None and report.sweep is None and report.find_goodput is None:
        return None
    return SeriesPlan(
        num_runs=report.num_runs,
        rates=() if report.sweep is None else parse_rates(report.sweep),
        search=None if report.find_goodput is None else parse_range(report.find_goodput),
    )


def parse_rates(text: str) -> tuple[float, ...]:
    """`1,2,4`: positive rates."""
    return _positive_numbers("--sweep", text, ",", "write e.g. 1,2,4,8")


def parse_range(text: str) -> tuple[float, float]:
    """`1:32`: the lowest and the highest rate to try."""
    fix = "write e.g. 1:32"
    low, high = (*_positive_numbers("--find-goodput", text, ":", fix), math.nan)[:2]
    if not low <= high:
        raise BadInput("--find-goodput needs a range", value=text, fix=fix)
    return low, high


def _positive_numbers(flag: str, text: str, separator: str, fix: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(part) for part in text.split(separator))
    except ValueError:
        numbers = (math.nan,)
    if not all(math.isfinite(x) and x > 0 for x in numbers):
        raise BadInput(f"{flag} needs positive numbers", value=text, fix=fix)
    return numbers


class SeriesRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a series. `log`: where its events were written.

    `lost_to`: the main cause of lost latency, with its share.
    """

    options: BenchOptions
    run: RunTrace
    summary: Summary
    observed: Observed
    context: RunContext
    use: RemoteUtilisation | None = None
    lost_to: tuple[str, float] | None = None
    log: Path | None = None


class BenchSeries(Result, frozen=True, kw_only=True):
    """All runs of a series.

    `shown`: index of the run that the other fields are about: the last at the knee, else the last.
    `points`: one per rate, and `knee`: the highest rate that meets the SLO (None if none does).
    `intervals`: of repetitions, the mean of each figure with its 95 % Student interval.
    """

    runs: tuple[SeriesRun, ...]
    shown: int
    in_process: bool
    points: tuple[SweepPoint, ...] = ()
    knee: float | None = None
    intervals: dict[str, Interval] = {}
    cost: RunCost | None = None

    @property
    def shown_run(self) -> SeriesRun:
        return self.runs[self.shown]

    def to_dict(self) -> dict[str, Any]:
        """The shown run under vLLM's keys, with all runs, rates and intervals."""
        shown = self.shown_run
        result: dict[str, Any] = vllm_result(
            shown.run, shown.summary, percentiles=shown.options.percentiles
        )
        more = result["ridgeline"]
        more |= {name: value for name, value in _run_dict(shown).items() if name != "log"}
        if self.cost is not None:
            more["cost"] = msgspec.to_builtins(self.cost)
        result["ridgeline_runs"] = [_run_dict(run) for run in self.runs]
        result["ridgeline_sweep"] = [_point_dict(point) for point in self.points]
        if not self.points:
            result["ridgeline_intervals"] = {
                name: msgspec.to_builtins(interval) for name, interval in self.intervals.items()
            }
        return dict(plain(result))

    def to_html(self) -> str:
        """The page of the shown run, with a table of all runs and the curve over the rates."""
        shown = self.shown_run
        return bench_page(
            shown.run,
            shown.summary,
            shown.options.slo,
            cost=self.cost,
            monitors=observed_tables(
                shown.observed,
                None,
                "",
                in_process=self.in_process,
                num_tokens=shown.summary.output_tokens,
            ),
            series=RunSeries(
                label="req/s" if self.points else "run",
                figures=tuple(
                    (label, figure_cells(run.summary)) for label, run in self.labelled_runs()
                ),
                monitored=tuple(
                    (label, observed_cells(run)) for label, run in self.labelled_runs()
                ),
                points=self.points,
                knee=self.knee,
            ),
        )

    def labelled_runs(self) -> list[tuple[str, SeriesRun]]:
        """The runs by their rate in a sweep, else by their number."""
        if self.points:
            return [(rounded(run.options.request_rate), run) for run in self.runs]
        return [(str(number), run) for number, run in enumerate(self.runs, 1)]

    def save_trace(self, path: str | Path) -> Path:
        """Write a Chrome trace of the shown run, for Perfetto."""
        write_file(Path(path), [json_line(chrome_trace(self.shown_run.run)).encode()])
        return Path(path)


def bench_series(
    options: BenchOptions,
    target: Target,
    plan: SeriesPlan,
    *,
    log: Path | None = None,
    dollars_per_hour: float | None = None,
    observer: Observer = silent,
) -> BenchSeries:
    """Run the series. `log`: run.jsonl is written as run-1.jsonl, run-2.jsonl, … as runs end."""
    check_options(options)
    if plan.search is not None:
        _check_search(options)
    options = load_for(options, target, observer)
    with load_session(options, target, observer) as session:
        runner = _SeriesRunner(options, session, log, observer)
        if plan.search is not None:
            points, knee = run_async(_search(runner, plan.search))
        elif plan.rates:
            points, knee = run_async(_sweep(runner, plan.rates))
        else:
            points, knee = run_async(_repeat(runner, plan.num_runs or 1))
    runs = tuple(runner.runs)
    at_knee = [i for i, run in enumerate(runs) if run.options.request_rate == knee]
    shown = at_knee[-1] if at_knee else len(runs) - 1
    figures = {} if points else figures_of([run.summary for run in runs])
    return BenchSeries(
        runs=runs,
        shown=shown,
        in_process=isinstance(target, Settings),
        points=tuple(points),
        knee=knee,
        intervals={name: mean_interval(values) for name, values in figures.items()},
        cost=cost_of_run(runs[shown].run, runs[shown].summary, dollars_per_hour),
    )


class _SeriesRunner:
    """Makes the runs, each with its own seed."""

    def __init__(
        self, options: BenchOptions, session: LoadSession, log: Path | None, observer: Observer
    ) -> None:
        self.options, self.runs = options, list[SeriesRun]()
        self._session, self._log, self._observer = session, log, observer

    async def run(self, rate: float | None = None) -> SeriesRun:
        """One more run, at this rate or that of the options."""
        number = len(self.runs)
        options = msgspec.structs.replace(self.options, seed=self.options.seed + number)
        if rate is not None:
            options = msgspec.structs.replace(options, request_rate=rate)
        name = f"run {number + 1}" + ("" if rate is None else f" at {rounded(rate)} req/s")
        self._observer(StageStarted(stage=name))
        trace, observed = await self._session.run(options)
        context = run_context(options, observed)
        log = None if self._log is None else numbered(self._log, number + 1)
        if log is not None:
            write_run(trace, log, context)
        window = window_of(trace, options.warmup_s, options.cooldown_s)
        device = None if trace.steps else self._session.device(trace)
        findings = diagnose_run(trace, context, options.slo).findings
        run = SeriesRun(
            options=options,
            run=trace,
            summary=summarise(trace, options.slo, window),
            observed=observed,
            context=context,
            use=None if device is None else server_utilisation(trace, observed.server, device),
            lost_to=(findings[0].cause, findings[0].gain.mid) if findings else None,
            log=log,
        )
        self.runs.append(run)
        self._observer(StageFinished(stage=name))
        return run


def numbered(path: Path, number: int) -> Path:
    """`run.jsonl` → `run-2.jsonl`."""
    return path.with_name(f"{path.stem}-{number}{path.suffix}")


def _check_search(options: BenchOptions) -> None:
    """BadInput if so few requests can neither show that the SLO is met nor that it is not."""
    slo, num_prompts = options.slo, options.max_requests
    if slo is None:
        raise BadInput("--find-goodput needs an SLO", fix="--slo 'ttft:200 tpot:50'")
    for flag, value in {"--warmup-s": options.warmup_s, "--cooldown-s": options.cooldown_s}.items():
        if value:
            raise BadInput(f"{flag} has no effect with --find-goodput", fix=f"remove {flag}")
    least = min_requests_per_run(slo, MAX_RUNS_PER_RATE)
    if least is None:
        raise BadInput(
            "no number of requests can show that all of them meet the SLO",
            value=f"attainment:{slo.attainment:.0%}",
            fix="--slo '… attainment:99%'",
        )
    if num_prompts is not None and num_prompts < least:
        raise BadInput(
            f"too few requests to show that {slo.attainment:.0%} meet the SLO, even in "
            f"{MAX_RUNS_PER_RATE} runs",
            value=f"--num-prompts {num_prompts}",
            limit=f">= {least}",
            fix=f"--num-prompts {4 * least}",
        )


async def _repeat(runner: _SeriesRunner, count: int) -> tuple[list[SweepPoint], float | None]:
    for _ in range(count):
        await runner.run()
    return [], None


async def _sweep(
    runner: _SeriesRunner, rates: Sequence[float]
) -> tuple[list[SweepPoint], float | None]:
    points = [_point(rate, await runner.run(rate)) for rate in rates]
    return points, max((point.rate for point in points if point.holds), default=None)


async def _search(
    runner: _SeriesRunner, span: tuple[float, float]
) -> tuple[list[SweepPoint], float | None]:
    slo = runner.options.slo
    assert slo is not None

    async def run_at(rate: float) -> RunTrace:
        return (await runner.run(rate)).run

    result = await find_goodput(run_at, slo, *span, MAX_SEARCH_S, prove_within=MAX_RUNS_PER_RATE)
    points = []
    for probe in result.probes:
        summary = next(run.summary for run in runner.runs if run.run is probe.run)
        pooled = msgspec.structs.replace(summary, goodput=probe.goodput)
        points.append(SweepPoint(rate=probe.load, summary=pooled, holds=probe.holds))
    return points, result.load


def _point(rate: float, run: SeriesRun) -> SweepPoint:
    goodput = run.summary.goodput
    holds = None if goodput is None else goodput.holds and not is_saturated(run.run)
    return SweepPoint(rate=rate, summary=run.summary, holds=holds)


def figures_of(summaries: Sequence[Summary]) -> Mapping[str, list[float]]:
    """The figures that every run has, one value per run."""
    rows: dict[str, list[float | None]] = {
        "output tok/s": [summary.output_tok_s for summary in summaries],
        "requests/s": [summary.request_rate for summary in summaries],
        "goodput req/s": [
            summary.goodput.goodput_req_s if summary.goodput else None for summary in summaries
        ],
    }
    for metric in ("ttft", "tpot", "itl", "e2e"):
        for q in (50, 99):
            values = [getattr(summary, metric) for summary in summaries]
            rows[f"{metric} p{q} (ms)"] = [1000 * v.p(q) if v else None for v in values]
    return {
        name: [v for v in values if v is not None]
        for name, values in rows.items()
        if all(v is not None for v in values)
    }


def _run_dict(run: SeriesRun) -> dict[str, object]:
    """What a result file holds about each run besides its figures."""
    fields: dict[str, object] = {
        "seed": run.options.seed,
        "log": None if run.log is None else run.log.name,
        "server": msgspec.to_builtins(run.observed.server),
        "machine": msgspec.to_builtins(run.observed.machine),
    }
    return fields if run.use is None else fields | {"use": msgspec.to_builtins(run.use)}


def _point_dict(point: SweepPoint) -> dict[str, object]:
    summary = point.summary
    return {
        "rate": point.rate,
        "holds": point.holds,
        "request_throughput": summary.request_rate,
        "output_throughput": summary.output_tok_s,
        "p99_ttft_ms": 1000 * summary.ttft.p(99) if summary.ttft else None,
        "median_tpot_ms": 1000 * summary.tpot.p(50) if summary.tpot else None,
        "attainment": summary.goodput.attainment if summary.goodput else None,
    }
