"""The tables of `ridgeline simulate`: one run, several seeds, a sweep."""

from __future__ import annotations

from rich.table import Table

from ridgeline.plan.simulate.summary import FleetSummary, LatencySpread, by_config
from ridgeline.report.numbers import rounded
from ridgeline.workflows.planning.simulate import SimulationResult
from ridgeline.workflows.planning.simulate_seeds import HIGH, LOW, SeedsResult
from ridgeline.workflows.planning.simulate_sweep import SweepCase, SweepResult


def simulation_table(result: SimulationResult) -> Table:
    """Latencies and counts; with several kinds of devices, what each of them served."""
    outcome, summary, kinds = result.outcome, result.summary, result.replicas
    size = len(outcome.replicas) if len(kinds) > 1 else result.options.replicas
    title = (
        f"{size} x {kinds[0].spec.name} on {result.device_names} {kinds[0].layout}, "
        f"{summary.num_requests:,} requests in {summary.duration_s:,.1f} virtual seconds"
    )
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("", "mean", "p50", "p90", "p95", "p99"):
        table.add_column(name, justify="right" if name else "left")
    for name, spread in (
        ("TTFT ms", summary.ttft),
        ("TPOT ms", summary.tpot),
        ("e2e ms", summary.e2e),
        ("queue ms", summary.queue),
    ):
        table.add_row(name, *_spread_cells(spread))
    if summary.batch is not None:
        table.add_row("batch, s", *_spread_cells(summary.batch.e2e, 1))
    for name, value in _counts(summary):
        table.add_row(name, value)
    if len(kinds) > 1:
        for name, served, busy in by_config(outcome):
            table.add_row(f"  {name}", f"{served:,} served", f"{busy:.0%} busy")
    for name, model in summary.models.items():
        table.add_section()
        met = "" if model.attainment is None else f"{model.attainment:.1%} met"
        table.add_row(name, f"{model.num_served:,} served", f"{rounded(model.request_rate)}/s", met)
        table.add_row("  TTFT ms", *_spread_cells(model.ttft))
        table.add_row("  TPOT ms", *_spread_cells(model.tpot))
    return table


def _spread_cells(spread: LatencySpread | None, unit: float = 1000) -> list[str]:
    if spread is None:
        return []
    values = (spread.mean, spread.p50, spread.p90, spread.p95, spread.p99)
    return [_number(unit * value) for value in values]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else rounded(value, 4)


def _counts(summary: FleetSummary) -> list[tuple[str, str]]:
    rows = [
        ("served", f"{summary.num_served:,}"),
        ("requests/s", rounded(summary.request_rate, 4)),
    ]
    if summary.attainment is not None and summary.goodput_req_s is not None:
        rows.append(("goodput/s", rounded(summary.goodput_req_s, 4)))
        rows.append(("attainment", f"{summary.attainment:.1%}"))
    rows += [
        ("output tok/s", f"{summary.output_tok_s:,.0f}"),
        ("in flight", f"{summary.mean_in_flight:,.1f}"),
        ("busy", f"{summary.utilisation:.0%}"),
        ("device-hours", rounded(summary.device_hours)),
        ("steps", f"{summary.num_steps:,}"),
    ]
    if summary.batch is not None:
        batch = summary.batch
        expired = f", {batch.num_expired:,} past their deadline" if batch.num_expired else ""
        served = f"{batch.num_served:,} of {batch.num_requests:,}"
        rows.append(("batch requests", f"{served}{expired}"))
    unusual = (
        ("answered again", f"{summary.answered_share:.1%}", summary.answered_share),
        ("prefix hits", f"{summary.hit_share:.1%}", summary.hit_share),
        *((f"  from {k}", f"{share:.1%}", share) for k, share in summary.tier_share.items()),
        ("  declined", f"{summary.declined_share:.1%}", summary.declined_share),
        ("restarts", f"{summary.num_restarts:,}", summary.num_restarts),
        ("  resumed tokens", f"{summary.resumed_tokens:,}", summary.resumed_tokens),
        ("preempted", f"{summary.num_preempted:,}", summary.num_preempted),
        ("most replicas", str(summary.most_replicas), summary.most_replicas),
    )
    return rows + [(name, text) for name, text, value in unusual if value]


def seeds_table(result: SeedsResult) -> Table:
    """One row per figure: its median and its 5th and 95th percentile over the seeds."""
    title = f"{result.replicas} x {result.model}: {result.num_seeds} seeds from {result.first_seed}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for name in ("median", f"{LOW} %", f"{HIGH} %"):
        table.add_column(name, justify="right")
    for name, interval in result.figures.items():
        is_time = name.startswith(("ttft", "tpot", "e2e"))
        label = f"{name.removesuffix('_s')}_ms" if is_time else name
        unit = 1000 if is_time else 1
        values = (interval.mid, interval.low, interval.high)
        table.add_row(label.replace("_", " "), *(rounded(unit * value, 4) for value in values))
    return table


def sweep_table(result: SweepResult) -> Table:
    """One row per fleet, best first."""
    table = Table(
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        title=f"{len(result.cases)} fleets, best first",
        title_justify="left",
    )
    names = list(result.cases[0].changes)
    for name in names:
        table.add_column(name.replace("_", " "), justify="right", no_wrap=True)
    for name in ("met", "good/s", "TTFT p50", "p99 ms", "TPOT p50", "p99 ms", "busy", "dev h"):
        table.add_column(name, justify="right")
    for case in result.ranked():
        table.add_row(*(str(case.changes[name]) for name in names), *_case_cells(case))
    return table


def _case_cells(case: SweepCase) -> list[str]:
    summary = case.summary
    if summary is None:
        return [case.problem]
    attained = "" if summary.attainment is None else f"{summary.attainment:.1%}"
    goodput = summary.goodput_req_s if summary.goodput_req_s is not None else summary.request_rate
    cells = [attained, rounded(goodput, 4)]
    for spread in (summary.ttft, summary.tpot):
        cells += (
            ["", ""] if spread is None else [rounded(1e3 * x, 4) for x in (spread.p50, spread.p99)]
        )
    return [*cells, f"{summary.utilisation:.0%}", rounded(summary.device_hours)]
