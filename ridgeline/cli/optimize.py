"""`ridgeline optimize`: the climb from the command line, its progress, and what it leaves behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import msgspec
from rich.console import Console

from ridgeline.cli.climbing import Display
from ridgeline.cli.ladder_table import show
from ridgeline.errors import BadInput
from ridgeline.optimize import ladder
from ridgeline.optimize.config import final_settings, ladder_json, ridgeline_toml
from ridgeline.optimize.cost import Price
from ridgeline.optimize.job import Job
from ridgeline.optimize.objective import Objective
from ridgeline.optimize.observe import Observer, PlainLines
from ridgeline.optimize.result import LadderResult
from ridgeline.optimize.units import parse_seconds
from ridgeline.optimize.vllm import serve_command
from ridgeline.optimize.write import check_writable, write_all
from ridgeline.records import Slo
from ridgeline.settings import Settings

INTERRUPTED = 130


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The command's own flags, as written. `price` is dollars per machine-hour."""

    workload: str = "chat-and-code"
    slo: str = "ttft:500 tpot:50 error:1%"
    objective: str = "goodput"
    budget: str = "5m"
    output: Path = Path("ridgeline-out")
    price: float | None = None
    seed: int = 0
    ladder: Path | None = None


def command(settings: Settings, options: Options) -> int:
    """Climb, write the four files, print the ladder. 130 where it was interrupted."""
    begun_s = time.perf_counter()
    console = Console()
    job = job_of(settings, options)
    rungs = ladder_of(options)
    check_writable(options.output)
    with _watching(console) as observer:
        result = _climb(job, rungs, observer, begun_s)
    paths = deliver(result, options.output)
    show(console, result, paths)
    return INTERRUPTED if result.ended == "interrupted" else 0


def job_of(settings: Settings, options: Options) -> Job:
    """Everything that was written, checked before anything is loaded."""
    if options.objective not in get_args(Objective):
        choices = ", ".join(get_args(Objective))
        raise BadInput("no such --objective", value=options.objective, limit=choices)
    if options.price is not None and not options.price > 0:
        raise BadInput("--price must be positive", value=options.price, limit="> 0 $/hour")
    notional = options.price is None
    price = Price() if notional else Price(dollars_per_hour=options.price, notional=False)
    return Job(
        settings=settings,
        workload=options.workload,
        slo=Slo.parse(options.slo),
        objective=msgspec.convert(options.objective, Objective),
        budget_s=parse_seconds(options.budget),
        price=price,
        seed=options.seed,
    )


def ladder_of(options: Options) -> ladder.Ladder:
    """The shipped ladder, or the user's own."""
    if options.ladder is None:
        return ladder.shipped()
    try:
        return ladder.read(options.ladder.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(
            "cannot read the ladder", value=str(options.ladder), fix=str(error)
        ) from None


def deliver(result: LadderResult, folder: Path) -> tuple[Path, ...]:
    """report.html, ladder.json, ridgeline.toml, vllm.sh: all of them or none."""
    from ridgeline.optimize.report.page import report

    config = ridgeline_toml(result)
    vllm = serve_command(final_settings(result))
    notes = "".join(f"# {note}\n" for note in vllm.notes)
    return write_all(
        folder,
        {
            "report.html": report(result, config, vllm),
            "ladder.json": ladder_json(result),
            "ridgeline.toml": config,
            "vllm.sh": f"#!/bin/sh\n{notes}{vllm.text}\n",
        },
    )


def _climb(job: Job, rungs: ladder.Ladder, observer: Observer, begun_s: float) -> LadderResult:
    """Probe, build the laboratory, climb; the budget counts from the command's start."""
    from ridgeline.hardware.probe import probe
    from ridgeline.measure.workload import parse_workload
    from ridgeline.optimize.loop import optimize

    workload = parse_workload(job.workload)
    observer.note("measuring this machine (a fresh probe is remembered for a day)")
    machine = probe()
    from ridgeline.cli.lab import build  # imports torch: after the probe has had the cores

    lab = build(job.settings, workload, machine)
    left_s = job.budget_s - (time.perf_counter() - begun_s)
    within = msgspec.structs.replace(job, budget_s=max(1.0, left_s))
    return asyncio.run(optimize(within, lab, rungs, clock=time.perf_counter, observer=observer))


@contextmanager
def _watching(console: Console) -> Iterator[Observer]:
    """A live display on a terminal, plain lines elsewhere."""
    if not console.is_terminal:
        yield PlainLines(lambda line: print(line, flush=True))
        return
    with Display(console) as display:
        yield display
