"""What `ridgeline simulate` prints of a run."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from ridgeline.plan.simulate.fleet import Outcome
from ridgeline.plan.simulate.summary import FleetSummary, Spread, by_build
from ridgeline.plan.step_time.replica import Replica


def devices_of(machines: Sequence[Replica]) -> str:
    """Their names."""
    return " and ".join(machine.device.name for machine in machines)


def table_of(
    replicas: int, machines: Sequence[Replica], outcome: Outcome, found: FleetSummary
) -> Table:
    """Latencies and facts; with several kinds of devices, what each of them did."""
    size, first = len(outcome.members) if len(machines) > 1 else replicas, machines[0]
    title = (
        f"{size} x {first.outline.name} on {devices_of(machines)} {first.layout}, "
        f"{found.num_requests:,} requests in {found.duration_s:,.1f} virtual seconds"
    )
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("", "mean", "p50", "p90", "p95", "p99"):
        table.add_column(name, justify="right" if name else "left")
    for name, spread in (
        ("TTFT ms", found.ttft),
        ("TPOT ms", found.tpot),
        ("e2e ms", found.e2e),
        ("queue ms", found.queue),
    ):
        table.add_row(name, *_cells(spread))
    if found.batch is not None:
        table.add_row("batch, s", *_cells(found.batch.took, 1))
    for name, value in _facts(found):
        table.add_row(name, value)
    if len(machines) > 1:
        for name, served, busy in by_build(outcome):
            table.add_row(f"  {name}", f"{served:,} served", f"{busy:.0%} busy")
    return table


def _cells(spread: Spread | None, unit: float = 1000) -> list[str]:
    if spread is None:
        return []
    values = (spread.mean, spread.p50, spread.p90, spread.p95, spread.p99)
    return [_number(unit * value) for value in values]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _facts(found: FleetSummary) -> list[tuple[str, str]]:
    told = [
        ("served", f"{found.num_served:,}"),
        ("requests/s", f"{found.request_rate:,.4g}"),
        ("output tok/s", f"{found.output_tok_s:,.0f}"),
        ("in flight", f"{found.mean_in_flight:,.1f}"),
        ("busy", f"{found.utilisation:.0%}"),
        ("device-hours", f"{found.device_hours:,.3g}"),
        ("steps", f"{found.num_steps:,}"),
    ]
    if found.attainment is not None and found.goodput_req_s is not None:
        told.insert(2, ("goodput/s", f"{found.goodput_req_s:,.4g}"))
        told.insert(3, ("attainment", f"{found.attainment:.1%}"))
    extra = (
        ("prefix hits", f"{found.hit_share:.1%}", found.hit_share),
        ("restarts", f"{found.num_restarts:,}", found.num_restarts),
        ("preempted", f"{found.num_preempted:,}", found.num_preempted),
        ("most replicas", str(found.most_replicas), found.most_replicas),
    )
    if found.batch is not None:
        told.append(("batch lines", f"{found.batch.num_served:,} of {found.batch.num_lines:,}"))
    return told + [(name, shown) for name, shown, value in extra if value]
