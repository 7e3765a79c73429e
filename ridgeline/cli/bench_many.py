"""Several bench runs as one measurement: repetitions, a sweep of rates, the search for goodput.

Every run has a seed of its own: equal seeds send equal prompts, and the second run would find them
in the prefix cache. Repetitions give each figure a Student interval over the runs.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from ridgeline.cli.bench import (
    Outputs,
    Remote,
    RunOne,
    check_writable,
    cost_of_run,
    session,
    write_outputs,
)
from ridgeline.cli.bench import command as one_command
from ridgeline.cli.flags import refuse
from ridgeline.errors import BadInput
from ridgeline.measure.bench import BenchOptions, check
from ridgeline.measure.goodput import Goodput
from ridgeline.measure.metrics import Distribution
from ridgeline.measure.report.page import bench_page
from ridgeline.measure.report.pictures import Point
from ridgeline.measure.search import find_goodput, least_requests, saturated
from ridgeline.measure.summary import Summary, summarise
from ridgeline.measure.vllm_result import vllm_result
from ridgeline.records import RunTrace
from ridgeline.settings import Settings

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
    idle += ["--accelerator"] if isinstance(on, Remote) and on.accelerator else []
    refuse([*idle, *(["--request-rate"] if rate_given and asked[0] != "num_runs" else [])],
           f"with {flags[0]}")  # fmt: skip
    many = Many(
        num_runs=report.get("num_runs"),
        rates=parse_rates(report["sweep"]) if "sweep" in report else (),
        search=parse_range(report["find_goodput"]) if "find_goodput" in report else None,
    )
    return command(options, on, many, outputs)


Measured = tuple[RunTrace, Summary]


def command(
    options: BenchOptions,
    on: Settings | Remote,
    many: Many,
    outputs: Outputs,
    console: Console | None = None,
) -> int:
    """Measure them all, print, write (files are about the last, best or only run). The exit code:
    1 where no request succeeded, or no load held the promise.
    """
    out = console or Console(highlight=False)
    check(options)
    check_writable(outputs)
    if many.search is not None:
        _check_provable(options)
    with session(options, on, out) as (run_one, _):

        def at(number: int, **changes: object) -> BenchOptions:
            return msgspec.structs.replace(options, seed=options.seed + number, **changes)

        if many.search is not None:
            points, runs, knee = asyncio.run(_search(run_one, at, many.search, options))
        elif many.rates:
            points, runs, knee = asyncio.run(_sweep(run_one, at, many.rates, options))
        else:
            points, runs, knee = asyncio.run(_repeat(run_one, at, many.num_runs or 1, options))
    out.print(_sweep_table(points, knee) if points else _runs_table([s for _, s in runs]))
    run, summary = _shown(points, runs, knee)
    cost = cost_of_run(run, summary, outputs.dollars_per_hour)
    result = vllm_result(run, summary, percentiles=options.percentiles)
    result["ridgeline_sweep"] = [_as_json(point) for point in points]

    def page() -> str:
        return bench_page(run, summary, options.slo, points=points, knee=knee, cost=cost)

    write_outputs(outputs, run, result, page)
    failed = many.search is not None and knee is None
    return 1 if failed or not summary.num_ok else 0


def _check_provable(options: BenchOptions) -> None:
    """A search claims what its intervals show; with too few requests they can show nothing."""
    slo, asked = options.slo, options.num_prompts
    if slo is None:
        raise BadInput("--find-goodput needs a promise", fix="--goodput 'ttft:200 tpot:50'")
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


At = Callable[..., BenchOptions]
Found = tuple[list[Point], list[Measured], float | None]


async def _repeat(run_one: RunOne, at: At, count: int, options: BenchOptions) -> Found:
    runs = []
    for number in range(count):
        run = await run_one(at(number))
        runs.append((run, summarise(run, options.slo)))
    return [], runs, None


async def _sweep(run_one: RunOne, at: At, rates: Sequence[float], options: BenchOptions) -> Found:
    points, runs = [], []
    for number, rate in enumerate(rates):
        run = await run_one(at(number, request_rate=rate))
        runs.append((run, summarise(run, options.slo)))
        points.append(_point(rate, run, runs[-1][1]))
    held = [point.rate for point in points if point.holds]
    return points, runs, max(held, default=None)


async def _search(
    run_one: RunOne, at: At, span: tuple[float, float], options: BenchOptions
) -> Found:
    slo = options.slo
    assert slo is not None
    seeds = count()

    async def run_at(rate: float) -> RunTrace:
        return await run_one(at(next(seeds), request_rate=rate))

    found = await find_goodput(run_at, slo, *span, SEARCH_S, prove_within=MOST_RUNS)
    runs = [(probe.run, summarise(probe.run, slo)) for probe in found.probes]
    points = []
    for probe, (_, summary) in zip(found.probes, runs, strict=True):
        pooled = msgspec.structs.replace(summary, goodput=probe.goodput)
        points.append(Point(rate=probe.load, summary=pooled, holds=probe.holds))
    return points, runs, found.load


def _point(rate: float, run: RunTrace, summary: Summary) -> Point:
    holds = None if summary.goodput is None else summary.goodput.holds and not saturated(run)
    return Point(rate=rate, summary=summary, holds=holds)


def _shown(points: Sequence[Point], runs: Sequence[Measured], knee: float | None) -> Measured:
    """The run at the knee where there is one, else the last."""
    for point, measured in zip(points, runs, strict=False):
        if point.rate == knee:
            return measured
    return runs[-1]


def _sweep_table(points: Sequence[Point], knee: float | None) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    names = ("req/s", "served", "tok/s", "ttft p50", "ttft p99", "tpot p50", "met", "")
    for name in names:
        table.add_column(name, justify="right")
    for point in sorted(points, key=lambda each: each.rate):
        found = point.summary
        table.add_row(
            f"{point.rate:.3g}",
            f"{found.request_rate:.3g}",
            f"{found.output_tok_s:,.1f}",
            _ms(found.ttft, 50),
            _ms(found.ttft, 99),
            _ms(found.tpot, 50),
            _met(found.goodput),
            "knee" if point.rate == knee else "",
        )
    return table


def _met(good: Goodput | None) -> str:
    if good is None:
        return "–"
    return f"{good.attainment:.0%} [{good.attainment_low:.0%}, {good.attainment_high:.0%}]"


def _ms(values: Distribution | None, q: float) -> str:
    return "–" if values is None else f"{1000 * values.p(q):.4g} ms"


def _runs_table(found: Sequence[Summary]) -> Table:
    """Each figure's mean over the runs with its 95 % Student interval."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in (f"over {len(found)} runs", "mean", "95 % interval"):
        table.add_column(name, justify="right" if table.columns else "left")
    for name, values in figures(found).items():
        low, mean, high = interval(values)
        table.add_row(name, f"{mean:,.4g}", f"[{low:,.4g}, {high:,.4g}]")
    return table


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


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean with its 95 % Student interval; infinite for one value."""
    from scipy.special import stdtrit  # type: ignore[import-untyped, unused-ignore]

    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return -math.inf, mean, math.inf
    variance = math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)
    half = float(stdtrit(len(values) - 1, 0.975)) * math.sqrt(variance / len(values))
    return mean - half, mean, mean + half


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
