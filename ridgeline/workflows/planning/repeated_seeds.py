"""`ridgeline simulate --num-seeds`: the same fleet under so many loads, each figure as an interval.

A p99 of one run is one draw. Each seed draws arrivals and lengths anew and, on a calibrated
machine, begins elsewhere in its weather, with a level, moods and misfits of its own
(`ridgeline.plan.calibration.interference`); told are the middle of the seeds, their 5th and 95th percentile.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ridgeline.errors import BadInput
from ridgeline.plan.simulate.summary import FleetSummary, Spread, summarise
from ridgeline.records import Slo
from ridgeline.report.json_line import json_line
from ridgeline.workflows.planning.simulate import SimulateOptions, run

LOW, HIGH = 5, 95
LEAST, MOST = 5, 10_000


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles over the seeds."""

    low: float
    middle: float
    high: float


def command(options: SimulateOptions, as_json: bool) -> int:
    """Simulate every seed and print; the exit code."""
    if not LEAST <= options.num_seeds <= MOST:
        limit = f"1, or {LEAST} to {MOST}"
        raise BadInput("an interval takes several seeds", value=options.num_seeds, limit=limit)
    for name in ("html", "trace"):
        if getattr(options, name) is not None:
            raise BadInput(f"--{name} is of one run", value="--num-seeds", fix="leave out one")
    found = intervals(_summaries(options))
    if as_json:
        told = {name: msgspec.to_builtins(each) for name, each in found.items()}
        print(json_line({"num_seeds": options.num_seeds, "figures": told}))
        return 0
    Console(highlight=False).print(_table(options, found))
    return 0


def _summaries(options: SimulateOptions) -> list[FleetSummary]:
    slo = None if options.slo is None else Slo.parse(options.slo)
    seeds = range(options.seed, options.seed + options.num_seeds)
    each = track(seeds, "seeds", console=Console(stderr=True), transient=True)
    return [summarise(run(msgspec.structs.replace(options, seed=seed))[1], slo) for seed in each]


def intervals(found: Sequence[FleetSummary]) -> dict[str, Interval]:
    """By name; what no seed has is left out. Seconds, and what it says."""
    named: dict[str, list[float]] = {}
    for summary in found:
        for name, value in _figures(summary):
            named.setdefault(name, []).append(value)
    told = {}
    for name, values in named.items():
        low, middle, high = np.percentile(values, (LOW, 50, HIGH)).tolist()
        told[name] = Interval(low=low, middle=middle, high=high)
    return told


def _figures(summary: FleetSummary) -> list[tuple[str, float]]:
    told: list[tuple[str, float]] = []
    spreads = (("ttft", summary.ttft), ("tpot", summary.tpot), ("e2e", summary.e2e))
    for name, spread in spreads:
        told += _percentiles(name, spread)
    if summary.goodput_req_s is not None and summary.attainment is not None:
        told += [("goodput_req_s", summary.goodput_req_s), ("attainment", summary.attainment)]
    return [*told, ("output_tok_s", summary.output_tok_s), ("utilisation", summary.utilisation)]


def _percentiles(name: str, spread: Spread | None) -> list[tuple[str, float]]:
    if spread is None:
        return []
    return [(f"{name}_p50_s", spread.p50), (f"{name}_p99_s", spread.p99)]


def _table(options: SimulateOptions, found: dict[str, Interval]) -> Table:
    title = (
        f"{options.replicas} x {options.model}: {options.num_seeds} seeds from {options.seed} on"
    )
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for name in ("middle", f"{LOW} %", f"{HIGH} %"):
        table.add_column(name, justify="right")
    for name, each in found.items():
        is_time = name.startswith(("ttft", "tpot", "e2e"))
        label = f"{name.removesuffix('_s')}_ms" if is_time else name
        values = [(1000 if is_time else 1) * value for value in (each.middle, each.low, each.high)]
        table.add_row(label.replace("_", " "), *(f"{value:,.4g}" for value in values))
    return table
