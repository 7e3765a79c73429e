"""The page of a bench run, or of a sweep of runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import msgspec
from markupsafe import Markup

from ridgeline.measure.metrics.latency import Distribution
from ridgeline.measure.metrics.run_cost import RunCost
from ridgeline.measure.metrics.summary import Summary, counting_warning
from ridgeline.measure.report.charts import (
    SweepPoint,
    latency_figure,
    throughput_figure,
    timeline_figure,
    timeline_stride,
)
from ridgeline.records import RunTrace, Slo
from ridgeline.report.distribution_chart import distribution_figure
from ridgeline.report.html import HtmlTable, Tile, render_page
from ridgeline.report.numbers import rounded

LATENCY_TITLES = (
    ("ttft", "time to first token"),
    ("ttft_from_send", "… from the send"),
    ("tpot", "time per output token, per request"),
    ("itl", "inter-token latency, per token"),
    ("e2e", "end to end"),
    ("queue", "until it first ran"),
    ("publish", "computed until seen"),
)
MAX_ERRORS = 5


class MonitorTable(msgspec.Struct, frozen=True):
    """Figures reported or measured during a run: name, figure and remark of each."""

    title: str
    rows: tuple[tuple[str, str, str], ...]


LabelledFigures = tuple[tuple[str, Mapping[str, str]], ...]
"""(label of a run, its figures by name)."""


class RunSeries(msgspec.Struct, frozen=True, kw_only=True):
    """Several runs. `label` says what their labels mean (req/s, run).

    `figures` are the results, `monitored` what engine or server reported during each run. `points`
    of a sweep, and its `knee` in requests/s.
    """

    label: str = ""
    figures: LabelledFigures = ()
    monitored: LabelledFigures = ()
    points: Sequence[SweepPoint] = ()
    knee: float | None = None


SINGLE_RUN = RunSeries()


def bench_page(
    run: RunTrace,
    summary: Summary,
    slo: Slo | None,
    *,
    cost: RunCost | None = None,
    monitors: Sequence[MonitorTable] = (),
    series: RunSeries = SINGLE_RUN,
) -> str:
    """`run` and `summary` are shown in full, after the `series` if there were several runs."""
    facts = f"{run.workload} · {run.arrivals} · seed {run.seed} · {run.duration_s:.1f} s"
    points = sorted(series.points, key=lambda point: point.rate)
    stride = timeline_stride(run)
    return render_page(
        "measure/report/bench.html",
        title=f"Ridgeline: {run.target}",
        eyebrow=f"Ridgeline · {facts}",
        heading=run.target,
        lede=_lede(run, summary),
        headlines=_tiles(summary, cost),
        latency_chart=latency_figure(points, series.knee),
        throughput_chart=throughput_figure(points),
        run_tables=list(_run_tables(series)),
        distributions=_distributions(summary, slo),
        latencies=_latencies(summary),
        timeline=timeline_figure(run),
        timeline_intro="One line per request: grey until its first token, blue while tokens came, "
        "red if it failed." + (f" One request in {stride} is shown." if stride > 1 else ""),
        monitors=[
            (
                monitor.title[:1].upper() + monitor.title[1:],
                HtmlTable(rows=monitor.rows, num_text=3),  # names, figures, remarks
            )
            for monitor in monitors
        ],
        costs=_costs(cost),
        costs_intro="" if cost is None else f"At ${cost.dollars_per_hour:g} an hour.",
        warnings=_warnings(run, summary),
    )


def _lede(run: RunTrace, summary: Summary) -> str:
    """How many requests were served; first of all that the figures are not about the server."""
    unserved = summary.num_requests - summary.num_ok
    served = f"{summary.num_ok} requests served" + (f", {unserved} not." if unserved else ".")
    if run.machine_load is None or not run.machine_load.is_busy:
        return served
    return (
        f"The machine was busy: other work took {run.machine_load.taken_share:.0%} of the CPU"
        f" during the run, and these figures describe that more than the server. {served}"
    )


def _tiles(summary: Summary, cost: RunCost | None) -> list[Tile]:
    request_rate = f"{rounded(summary.request_rate)} req/s"
    tiles = [Tile("output", f"{summary.output_tok_s:,.1f}", "tok/s", request_rate)]
    for name, values in (
        ("time to first token", summary.ttft),
        ("time per output token", summary.tpot),
    ):
        tiles.append(Tile(name, _ms(values, 50), "ms p50", f"p99 {_ms(values, 99)} ms"))
    good = summary.goodput
    if good is not None:
        share = f"{good.attainment:.0%} met [{good.attainment_low:.0%}, {good.attainment_high:.0%}]"
        tiles.append(Tile("goodput", rounded(good.goodput_req_s), "req/s", share))
    elif cost is not None and cost.per_million_output is not None:
        tiles.append(Tile("cost", f"${rounded(cost.per_million_output)}", "per 1M output tokens"))
    return tiles


def _ms(values: Distribution | None, q: float) -> str:
    return rounded(1000 * values.p(q), 4) if values is not None else "–"


def _run_tables(series: RunSeries) -> Iterator[HtmlTable]:
    for rows in (series.figures, series.monitored):
        names = list(dict.fromkeys(name for _, figures in rows for name in figures))
        if names:
            yield HtmlTable(
                columns=(series.label, *names),
                rows=[(label, *(figures.get(n, "–") for n in names)) for label, figures in rows],
                num_text=0,
            )


def _distributions(summary: Summary, slo: Slo | None) -> list[Markup]:
    figures = [
        distribution_figure(name, (), values.values, limit)
        for name, values, limit in (
            ("TTFT", summary.ttft, slo.ttft_s if slo else None),
            ("TPOT", summary.tpot, slo.tpot_s if slo else None),
        )
        if values is not None
    ]
    return [figure for figure in figures if figure]


def _latencies(summary: Summary) -> HtmlTable:
    rows = []
    for name, title in LATENCY_TITLES:
        values: Distribution | None = getattr(summary, name)
        if values is not None:
            percentiles = (_ms(values, q) for q in (50, 90, 95, 99))
            mean = rounded(1000 * values.mean, 4)
            rows.append((title, mean, *percentiles, str(values.count)))
    return HtmlTable(columns=("", "mean", "p50", "p90", "p95", "p99", "n"), rows=rows)


def _costs(cost: RunCost | None) -> list[tuple[str, str]]:
    if cost is None:
        return []
    rows = (
        ("1M output tokens, all of the machine", cost.per_million_output),
        ("1M input tokens, by time in prefill", cost.per_million_input_split),
        ("1M output tokens, by time in decode", cost.per_million_output_split),
        ("a request", cost.per_request),
        ("a request that met the SLO", cost.per_good_request),
    )
    return [(name, f"${rounded(value, 4)}") for name, value in rows if value is not None]


def _warnings(run: RunTrace, summary: Summary) -> list[str]:
    warnings = [f"invalid: {reason}" for reason in summary.validity.reasons]
    if counting_warning(summary) is not None:
        warnings.append(str(counting_warning(summary)))
    errors = Counter(request.error for request in run.requests if request.error)
    return warnings + [f"{count} × {error}" for error, count in errors.most_common(MAX_ERRORS)]
