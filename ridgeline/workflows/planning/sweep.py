"""`ridgeline simulate --sweep`: what if? Every combination of values, in parallel over cores."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ridgeline.errors import BadInput, UserError
from ridgeline.plan.simulate.summary import FleetSummary, summarise
from ridgeline.records import Slo
from ridgeline.report.json_line import json_line
from ridgeline.workflows.planning.simulate import SimulateOptions, run

FIXED = ("html", "trace", "catalogue", "calibration", "step_by_step", "num_seeds")  # not swept over
MOST_CASES = 2000


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One combination: what was changed, and what became of it (or why it cannot be)."""

    changes: dict[str, object]
    found: FleetSummary | None = None
    problem: str = ""


def combinations(options: SimulateOptions, asked: Sequence[str]) -> list[dict[str, object]]:
    """From `replicas=1,2,4` and the like: every combination, in the order in which they are named.

    BadInput for a name that cannot be swept over and a value of the wrong kind.
    """
    axes = [_axis(options, text) for text in asked]
    names = [name for name, _ in axes]
    if len(set(names)) < len(names):
        raise BadInput("--sweep names a setting twice", value=", ".join(names))
    cases = [
        dict(zip(names, each, strict=True))
        for each in itertools.product(*(values for _, values in axes))
    ]
    if len(cases) > MOST_CASES:
        raise BadInput("too many combinations", value=len(cases), limit=MOST_CASES)
    return cases


def _axis(options: SimulateOptions, text: str) -> tuple[str, list[object]]:
    fields = {f.name: f.type for f in msgspec.structs.fields(options) if f.name not in FIXED}
    name, _, values = text.partition("=")
    name = name.strip().replace("-", "_")
    if name not in fields or not values:
        known = ", ".join(sorted(fields)).replace("_", "-")
        raise BadInput("--sweep needs a setting and values", value=text, limit=known)
    try:
        each = [msgspec.convert(v.strip(), fields[name], strict=False) for v in values.split(",")]
    except msgspec.ValidationError as error:
        raise BadInput(
            "--sweep has a value of the wrong kind", value=text, fix=str(error)
        ) from None
    if any(isinstance(value, float) and not math.isfinite(value) for value in each):
        raise BadInput("--sweep takes finite numbers", value=text)
    return name, each


def sweep(options: SimulateOptions, asked: Sequence[str], num_workers: int | None) -> list[Case]:
    """All cases, in order; each in a process of its own, with progress on a terminal."""
    cases = combinations(options, asked)
    encoded = [
        msgspec.json.encode(msgspec.structs.replace(options, **each, html=None, trace=None))
        for each in cases
    ]
    workers = min(num_workers or len(os.sched_getaffinity(0)), len(cases))
    told: dict[int, Case] = {}
    with (
        Progress(console=Console(stderr=True)) as progress,
        ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool,
    ):
        task = progress.add_task(f"{len(cases)} fleets on {workers} cores", total=len(cases))
        futures = {pool.submit(one, each): i for i, each in enumerate(encoded)}
        for future in as_completed(futures):
            i = futures[future]
            case = msgspec.json.decode(future.result(), type=Case)
            told[i] = msgspec.structs.replace(case, changes=cases[i])
            progress.advance(task)
    return [told[i] for i in range(len(cases))]


def one(encoded: bytes) -> bytes:
    """In a worker: simulate the options, written and answered as JSON."""
    options = msgspec.json.decode(encoded, type=SimulateOptions)
    slo = None if options.slo is None else Slo.parse(options.slo)
    try:
        case = Case(changes={}, found=summarise(run(options)[1], slo))
    except UserError as error:
        case = Case(changes={}, problem=str(error))
    return msgspec.json.encode(case)


def command(
    options: SimulateOptions, asked: Sequence[str], num_workers: int | None, as_json: bool
) -> int:
    """Sweep and print; the exit code."""
    for name in ("html", "trace"):
        if getattr(options, name) is not None:
            raise BadInput(f"--{name} is of one fleet, --sweep of many", value=asked[0])
    cases = sweep(options, asked, num_workers)
    if as_json:
        for case in cases:
            print(json_line(case))
    else:
        Console(highlight=False).print(_table(cases))
    return 0 if any(case.found for case in cases) else 2


def _table(cases: Sequence[Case]) -> Table:
    """Best first: by goodput per device-hour where there is a promise, else by throughput."""
    names = list(cases[0].changes)
    table = Table(
        box=None, pad_edge=False, padding=(0, 1, 0, 0), title=f"{len(cases)} fleets, best first"
    )
    table.title_justify = "left"
    for name in names:
        table.add_column(name.replace("_", " "), justify="right", no_wrap=True)
    for name in ("kept", "good/s", "TTFT p50", "p99 ms", "TPOT p50", "p99 ms", "busy", "dev h"):
        table.add_column(name, justify="right")
    for case in sorted(cases, key=_rank):
        table.add_row(*(str(case.changes[name]) for name in names), *_cells(case))
    return table


def _rank(case: Case) -> tuple[int, float, float]:
    found = case.found
    if found is None:
        return 2, 0.0, 0.0
    kept = found.attainment if found.attainment is not None else 1.0
    return int(kept < 0.99), found.device_hours if kept >= 0.99 else -kept, -found.output_tok_s


def _cells(case: Case) -> list[str]:
    found = case.found
    if found is None:
        return [case.problem]
    kept = "" if found.attainment is None else f"{found.attainment:.1%}"
    good = f"{found.goodput_req_s if found.goodput_req_s is not None else found.request_rate:,.4g}"
    cells = [kept, good]
    for spread in (found.ttft, found.tpot):
        cells += (
            ["", ""] if spread is None else [f"{1e3 * x:,.4g}" for x in (spread.p50, spread.p99)]
        )
    return [*cells, f"{found.utilisation:.0%}", f"{found.device_hours:,.3g}"]
