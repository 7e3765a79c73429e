"""Several bench runs as one measurement: repetitions, a sweep of rates, the search for goodput.

Every run has a seed of its own: equal seeds send equal prompts, and the second run would find them
in the prefix cache. Repetitions give each figure a Student interval over the runs.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
from rich.console import Console

from ridgeline.cli.params.engine import refuse
from ridgeline.cli.render.bench_series import (
    Made,
    as_json,
    cells,
    log_of,
    runs_table,
    sweep_table,
    told,
    told_table,
)
from ridgeline.config.settings import Settings
from ridgeline.errors import BadInput
from ridgeline.measure.bench import BenchOptions, check
from ridgeline.measure.cost import Cost, cost_line, cost_of_run
from ridgeline.measure.log import write_run
from ridgeline.measure.report.page import Runs, bench_page
from ridgeline.measure.report.pictures import Point
from ridgeline.measure.search import find_goodput, least_requests, saturated
from ridgeline.measure.summary import Summary, summarise
from ridgeline.measure.vllm_result import vllm_result
from ridgeline.measure.window import window_of
from ridgeline.records import RunTrace
from ridgeline.stats import mean_interval
from ridgeline.workflows.bench.bench import (
    Outputs,
    Remote,
    RunOne,
    beside_of,
    check_writable,
    device_of,
    session,
    write_outputs,
)
from ridgeline.workflows.bench.bench import command as one_command
from ridgeline.workflows.load import server_utilisation
from ridgeline.workflows.load.server_monitor import watched

SEARCH_S = 24 * 3600.0
MOST_RUNS = 3  # of a rate whose interval reaches over the promise


class Many(msgspec.Struct, frozen=True, kw_only=True):
    """What to repeat; exactly one of the three. `rates` in requests/s; `search` is (low, high)."""

    num_runs: int | None = None
    rates: tuple[float, ...] = ()
    search: tuple[float, float] | None = None


def parse_rates(text: str) -> tuple[float, ...]:
    """`1,2,4`: positive rates."""
    return _numbers("--sweep", text, ",", "write e.g. 1,2,4,8")


def parse_range(text: str) -> tuple[float, float]:
    """`1:32`: the least and the largest rate to try."""
    low, high = (*_numbers("--find-goodput", text, ":", "write e.g. 1:32"), math.nan)[:2]
    if not low <= high:
        raise BadInput("--find-goodput needs a range", value=text, fix="write e.g. 1:32")
    return low, high


def _numbers(flag: str, text: str, sign: str, fix: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(sign))
    except ValueError:
        found = (math.nan,)
    if not all(math.isfinite(x) and x > 0 for x in found):
        raise BadInput(f"{flag}: not positive numbers", value=text, fix=fix)
    return found


def dispatch(
    options: BenchOptions, on: Settings | Remote, report: Mapping[str, Any], rate_given: bool
) -> int:
    """What `ridgeline bench` was asked for: one run, or several. `report` holds the flags given."""
    outputs = Outputs(
        **{name: report.get(name) for name in ("json", "log", "html", "trace")},
        layout=report.get("layout", "ridgeline"),
        dollars_per_hour=report.get("price_per_hour"),
    )
    asked = [name for name in ("num_runs", "sweep", "find_goodput") if name in report]
    if not asked:
        return one_command(options, on, outputs)
    flags = ["--" + name.replace("_", "-") for name in asked]
    idle = [*flags[1:], *(["--layout"] if "layout" in report else [])]
    refuse([*idle, *(["--request-rate"] if rate_given and asked[0] != "num_runs" else [])],
           f"with {flags[0]}")  # fmt: skip
    many = Many(
        num_runs=report.get("num_runs"),
        rates=parse_rates(report["sweep"]) if "sweep" in report else (),
        search=parse_range(report["find_goodput"]) if "find_goodput" in report else None,
    )
    return command(options, on, many, outputs)


def command(
    options: BenchOptions,
    on: Settings | Remote,
    many: Many,
    outputs: Outputs,
    console: Console | None = None,
) -> int:
    """Measure them all, print, write: one event log per run; the other files are about the last,
    best or only one. The exit code: 1 where no request succeeded, or no load held the promise.
    """
    out = console or Console(highlight=False)
    check(options)
    check_writable(outputs)
    device_of(on)  # a wrong name must not cost the runs
    if many.search is not None:
        _check_provable(options)
    with session(options, on, out) as (run_one, _):
        series = _Series(options, on, run_one, outputs.log)
        if many.search is not None:
            points, knee = asyncio.run(_search(series, many.search))
        elif many.rates:
            points, knee = asyncio.run(_sweep(series, many.rates))
        else:
            points, knee = asyncio.run(_repeat(series, many.num_runs or 1))
    shown = _shown(series.made, knee)
    device = device_of(on, shown.run.info)
    words = [told(each, device) for each in series.made]
    _print(out, series.made, words, points, knee)
    cost = cost_of_run(shown.run, shown.summary, outputs.dollars_per_hour)
    if cost is not None:
        out.print(cost_line(cost), markup=False)
    write_outputs(
        msgspec.structs.replace(outputs, log=None),
        shown.run,
        _result(series.made, shown, points, device, cost),
        lambda: _page(series.made, shown, points, knee, cost, words),
    )
    failed = many.search is not None and knee is None
    return 1 if failed or not shown.summary.num_ok else 0


class _Series:
    """Makes the runs, each with a seed of its own, and keeps what was seen beside each."""

    def __init__(
        self, options: BenchOptions, on: Settings | Remote, run_one: RunOne, log: Path | None
    ) -> None:
        self.options, self.made = options, list[Made]()
        self._run_one, self._log = run_one, log
        self._where = (None, None) if isinstance(on, Settings) else (on.url, on.api_key)

    async def run(self, rate: float | None = None) -> Made:
        """One more run, at this rate or as the options say."""
        number = len(self.made)
        chosen = msgspec.structs.replace(self.options, seed=self.options.seed + number)
        if rate is not None:
            chosen = msgspec.structs.replace(chosen, request_rate=rate)
        run, seen = await watched(partial(self._run_one, chosen), *self._where)
        beside = beside_of(chosen, seen)
        log = None if self._log is None else log_of(self._log, number + 1)
        if log is not None:
            write_run(run, log, beside)
        window = window_of(run, chosen.warmup_s, chosen.cooldown_s)
        made = Made(
            options=chosen,
            run=run,
            summary=summarise(run, chosen.slo, window),
            seen=seen,
            beside=beside,
            log=log,
        )
        self.made.append(made)
        return made


def _print(
    out: Console,
    made: Sequence[Made],
    words: Sequence[Mapping[str, str]],
    points: Sequence[Point],
    knee: float | None,
) -> None:
    if points:
        out.print(sweep_table(points, knee))
        order = sorted(range(len(made)), key=lambda i: made[i].options.request_rate)
        labels = [f"{each.options.request_rate:.3g}" for each in made]
        beside = told_table("req/s", [(labels[i], words[i]) for i in order])
    else:
        spread = {name: mean_interval(values) for name, values in figures_of(made).items()}
        out.print(runs_table(spread, len(made)))
        beside = told_table("run", [(str(i), each) for i, each in enumerate(words, 1)])
    if beside is not None:
        out.print()
        out.print(beside)
    for number, each in enumerate(made, 1):
        for reason in each.summary.validity.reasons:
            out.print(f"! run {number} invalid: {reason}", style="yellow", markup=False)


def _result(
    made: Sequence[Made],
    shown: Made,
    points: Sequence[Point],
    device: server_utilisation.Device | None,
    cost: Cost | None,
) -> dict[str, object]:
    """The shown run under vLLM's keys; every run, and every rate, beside it."""
    result = vllm_result(shown.run, shown.summary, percentiles=shown.options.percentiles)
    ours = cast("dict[str, object]", result["ridgeline"])
    ours |= {name: value for name, value in as_json(shown, device).items() if name != "log"}
    if cost is not None:
        ours["cost"] = msgspec.to_builtins(cost)
    result["ridgeline_runs"] = [as_json(each, device) for each in made]
    result["ridgeline_sweep"] = [_as_json(point) for point in points]
    if not points:
        spread = {name: mean_interval(values) for name, values in figures_of(made).items()}
        result["ridgeline_intervals"] = {
            name: msgspec.to_builtins(interval) for name, interval in spread.items()
        }
    return result


def _page(
    made: Sequence[Made],
    shown: Made,
    points: Sequence[Point],
    knee: float | None,
    cost: Cost | None,
    words: Sequence[Mapping[str, str]],
) -> str:
    beside = server_utilisation.tables(shown.seen, None, None, in_process=bool(shown.run.steps))
    rates = [f"{each.options.request_rate:.3g}" for each in made]
    labels = rates if points else [str(number) for number in range(1, len(made) + 1)]
    return bench_page(
        shown.run,
        shown.summary,
        shown.options.slo,
        cost=cost,
        beside=beside,
        runs=Runs(
            label="req/s" if points else "run",
            rows=tuple(zip(labels, (cells(each.summary) for each in made), strict=True)),
            told=tuple(zip(labels, words, strict=True)),
            points=points,
            knee=knee,
        ),
    )


def _check_provable(options: BenchOptions) -> None:
    """A search claims what its intervals show; with too few requests they can show nothing."""
    slo, asked = options.slo, options.num_prompts
    if slo is None:
        raise BadInput("--find-goodput needs a promise", fix="--goodput 'ttft:200 tpot:50'")
    trimmed = {"--warmup-s": options.warmup_s, "--cooldown-s": options.cooldown_s}
    refuse([flag for flag, value in trimmed.items() if value], "with --find-goodput")
    least = least_requests(slo, MOST_RUNS)
    if least is None:
        raise BadInput(
            "no number of requests can show that all are in time",
            value=f"attainment:{slo.attainment:.0%}",
            fix="--goodput '… attainment:99%'",
        )
    if asked is not None and asked < least:
        raise BadInput(
            f"too few requests to show {slo.attainment:.0%} in time, even in {MOST_RUNS} runs",
            value=f"--num-prompts {asked}",
            limit=f">= {least}",
            fix=f"--num-prompts {4 * least}",
        )


async def _repeat(series: _Series, count: int) -> tuple[list[Point], float | None]:
    for _ in range(count):
        await series.run()
    return [], None


async def _sweep(series: _Series, rates: Sequence[float]) -> tuple[list[Point], float | None]:
    points = [_point(rate, await series.run(rate)) for rate in rates]
    held = [point.rate for point in points if point.holds]
    return points, max(held, default=None)


async def _search(series: _Series, span: tuple[float, float]) -> tuple[list[Point], float | None]:
    slo = series.options.slo
    assert slo is not None

    async def run_at(rate: float) -> RunTrace:
        return (await series.run(rate)).run

    found = await find_goodput(run_at, slo, *span, SEARCH_S, prove_within=MOST_RUNS)
    points = []
    for probe in found.probes:
        summary = next(each.summary for each in series.made if each.run is probe.run)
        pooled = msgspec.structs.replace(summary, goodput=probe.goodput)
        points.append(Point(rate=probe.load, summary=pooled, holds=probe.holds))
    return points, found.load


def _point(rate: float, made: Made) -> Point:
    good = made.summary.goodput
    holds = None if good is None else good.holds and not saturated(made.run)
    return Point(rate=rate, summary=made.summary, holds=holds)


def _shown(made: Sequence[Made], knee: float | None) -> Made:
    """The last run at the knee where there is one, else the last."""
    at_knee = [each for each in made if each.options.request_rate == knee]
    return (at_knee or list(made))[-1]


def figures_of(made: Sequence[Made]) -> dict[str, list[float]]:
    return figures([each.summary for each in made])


def figures(found: Sequence[Summary]) -> dict[str, list[float]]:
    """The figures that every run has, one value per run."""
    rows: dict[str, list[float | None]] = {
        "output tok/s": [each.output_tok_s for each in found],
        "requests/s": [each.request_rate for each in found],
        "goodput req/s": [each.goodput.goodput_req_s if each.goodput else None for each in found],
    }
    for metric in ("ttft", "tpot", "itl", "e2e"):
        for q in (50, 99):
            values = [getattr(each, metric) for each in found]
            rows[f"{metric} p{q} (ms)"] = [1000 * v.p(q) if v else None for v in values]
    return {
        name: [v for v in values if v is not None]
        for name, values in rows.items()
        if all(v is not None for v in values)
    }


def _as_json(point: Point) -> dict[str, object]:
    found = point.summary
    return {
        "rate": point.rate,
        "holds": point.holds,
        "request_throughput": found.request_rate,
        "output_throughput": found.output_tok_s,
        "p99_ttft_ms": 1000 * found.ttft.p(99) if found.ttft else None,
        "median_tpot_ms": 1000 * found.tpot.p(50) if found.tpot else None,
        "attainment": found.goodput.attainment if found.goodput else None,
    }
