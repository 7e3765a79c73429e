"""`ridgeline optimize`: the climb from the command line, and what it leaves behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from rich.console import Console

from ridgeline.cli.render.optimize import show
from ridgeline.cli.render.optimize_progress import Display
from ridgeline.config.settings import Settings
from ridgeline.errors import BadInput
from ridgeline.optimize import ladder
from ridgeline.optimize.comparison.objective import Objective
from ridgeline.optimize.cost import MachinePrice
from ridgeline.optimize.job import OptimizeJob
from ridgeline.optimize.output.config_file import final_settings, ladder_json, ridgeline_toml
from ridgeline.optimize.output.vllm_command import VllmCommand, serve_command
from ridgeline.optimize.progress import LineSearchObserver, SearchObserver
from ridgeline.optimize.result import LadderResult
from ridgeline.records import Slo
from ridgeline.report.files import check_writable, write_files

if TYPE_CHECKING:
    from ridgeline.hardware.machine import Machine
    from ridgeline.measure.workload import Workload
    from ridgeline.optimize.environment import Environment
    from ridgeline.plan.calibration.calibration import Calibration
    from ridgeline.workflows.optimize.server_environment import Server

INTERRUPTED = 130


DEFAULT_SLO = "ttft:500 tpot:50 error:1%"


class OptimizeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The command's own flags. `dollars_per_hour`: what the machine costs; None: a notional $1.
    `config`: where the settings were read."""

    workload: str = "chat-and-code"
    slo: str | None = None
    objective: Objective = "goodput"
    budget_s: float = 300.0
    output: Path = Path("ridgeline-out")
    dollars_per_hour: float | None = None
    seed: int = 0
    ladder: Path | None = None
    calibration: Path | None = None
    config: Path | None = None


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody else's server: its address, how to start it, and which it is."""

    url: str
    restart_cmd: str
    server: str | None = None
    served_model_name: str | None = None
    start_timeout_s: float = 600.0


def command(
    settings: Settings, options: OptimizeOptions, elsewhere: ServerOptions | None = None
) -> int:
    """Climb, write the four files, print the ladder. 130 where it was interrupted."""
    begun_s = time.perf_counter()
    console = Console()
    job = job_of(settings, options)
    rungs = ladder_of(options)
    check_inputs_stay(options, HERE if elsewhere is None else ELSEWHERE)
    server = None if elsewhere is None else _server(elsewhere)
    place = _Place(server, options.output, _calibrated(options, server))
    check_writable(options.output)
    with _watching(console) as observer:
        result = _climb(job, rungs, observer, begun_s, place)
    if server is None:
        paths = deliver(result, options.output)
    else:
        paths = deliver_elsewhere(result, options.output, server, settings)
    show(console, result, paths)
    return INTERRUPTED if result.ended == "interrupted" else 0


HERE = ("report.html", "ladder.json", "ridgeline.toml", "vllm.sh")
ELSEWHERE = ("report.html", "ladder.json", "serve.sh")
"""What is written to the output folder, here and for somebody else's server."""


def check_inputs_stay(options: OptimizeOptions, names: tuple[str, ...]) -> None:
    """BadInput where a file that was read would be written over."""
    written = {(options.output / name).resolve() for name in names}
    for path in (options.config, options.ladder, options.calibration):
        if path is not None and path.resolve() in written:
            raise BadInput(
                "the results would be written over a file that they are made from",
                value=str(path),
                fix="give another --output",
            )


def job_of(settings: Settings, options: OptimizeOptions) -> OptimizeJob:
    """Everything that was asked, checked before anything is loaded."""
    dollars = options.dollars_per_hour
    if dollars is not None and not dollars > 0:
        raise BadInput("--price-per-hour must be positive", value=dollars, limit="> 0 $/hour")
    return OptimizeJob(
        settings=settings,
        workload=options.workload,
        slo=Slo.parse(DEFAULT_SLO if options.slo is None else options.slo),
        objective=options.objective,
        budget_s=options.budget_s,
        price=MachinePrice()
        if dollars is None
        else MachinePrice(dollars_per_hour=dollars, notional=False),
        seed=options.seed,
    )


def ladder_of(options: OptimizeOptions) -> ladder.Ladder:
    """The shipped ladder, or the user's own."""
    if options.ladder is None:
        return ladder.load_default_ladder()
    try:
        return ladder.parse_ladder(options.ladder.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(
            "cannot read the ladder", value=str(options.ladder), fix=str(error)
        ) from None


def deliver(result: LadderResult, folder: Path) -> tuple[Path, ...]:
    """report.html, ladder.json, ridgeline.toml, vllm.sh: all of them or none."""
    from ridgeline.optimize.report.page import report

    config = ridgeline_toml(result)
    vllm = serve_command(final_settings(result), result.provenance.model)
    notes = "".join(f"# {note}\n" for note in vllm.notes)
    page = report(result, {"ridgeline.toml": VllmCommand(config), "The same for vLLM": vllm})
    script = f"#!/bin/sh\n{notes}{vllm.text}\n"
    contents = (page, ladder_json(result), config, script)
    return write_files(folder, dict(zip(HERE, contents, strict=True)))


def deliver_elsewhere(
    result: LadderResult, folder: Path, server: Server, asked: Settings
) -> tuple[Path, ...]:
    """report.html, ladder.json, serve.sh for another server: all of them or none."""
    from ridgeline.optimize.report.page import report
    from ridgeline.workflows.optimize.server_environment import serve_script

    start = server.start(asked)
    script = serve_script(server, final_settings(result), start)
    contents = (report(result, {"serve.sh": VllmCommand(script)}), ladder_json(result), script)
    return write_files(folder, dict(zip(ELSEWHERE, contents, strict=True)))


def _server(asked: ServerOptions) -> Server:
    from ridgeline.measure.http import base_url
    from ridgeline.optimize.external.server_flags import server_flags_for
    from ridgeline.optimize.external.server_process import ServerCommand
    from ridgeline.workflows.optimize.server_environment import Server

    recipe = ServerCommand(
        url=asked.url, command=asked.restart_cmd, start_timeout_s=asked.start_timeout_s
    )
    base_url(recipe.at(8000))
    return Server(
        recipe=recipe,
        dialect=server_flags_for(asked.restart_cmd, asked.server),
        served_model_name=asked.served_model_name,
    )


class _Place(NamedTuple):
    """Where the climb happens: another server, or this process; where logs may lie; how fast the
    machine is, if that was calibrated."""

    server: Server | None
    logs: Path
    calibration: Calibration | None


def _calibrated(options: OptimizeOptions, server: Server | None) -> Calibration | None:
    """What --calibration names. CannotRun beside another server, whose steps it does not know."""
    from ridgeline.errors import CannotRun
    from ridgeline.plan.calibration.calibration import load_calibration

    if options.calibration is None:
        return None
    if server is not None:
        raise CannotRun(
            "a calibration tells the step times of Ridgeline's own engine, not of a server",
            value=str(options.calibration),
            fix="leave out --calibration, or --url",
        )
    return load_calibration(options.calibration)


def _climb(
    job: OptimizeJob, rungs: ladder.Ladder, observer: SearchObserver, begun_s: float, place: _Place
) -> LadderResult:
    """Probe, build the laboratory, climb; the budget counts from the command's start."""
    from ridgeline.hardware.probe import probe
    from ridgeline.measure.workload import parse_workload
    from ridgeline.modelspec.checkpoints.load import load_spec
    from ridgeline.optimize.search import optimize

    workload = parse_workload(job.workload)
    load_spec(job.settings.model)  # a wrong name must not cost the probe
    observer.note("measuring this machine (a fresh probe is remembered for a day)")
    machine = probe()
    engine_environment = _lab(job, workload, machine, place)
    left_s = job.budget_s - (time.perf_counter() - begun_s)
    within = msgspec.structs.replace(job, budget_s=max(1.0, left_s))
    return asyncio.run(
        optimize(within, engine_environment, rungs, clock=time.perf_counter, observer=observer)
    )


def _lab(job: OptimizeJob, workload: Workload, machine: Machine, place: _Place) -> Environment:
    """Imports torch: after the probe has had the cores."""
    from ridgeline.workflows.optimize import engine_environment, server_environment

    if place.server is None:
        from ridgeline.workflows.optimize.calibrated_step_times import Prices

        found = place.calibration
        prices = None if found is None else Prices(found)
        return engine_environment.build(job.settings, workload, machine, prices)
    return server_environment.build(job.settings, workload, machine, place.server, place.logs)


@contextmanager
def _watching(console: Console) -> Iterator[SearchObserver]:
    """A live display on a terminal, plain lines elsewhere."""
    if not console.is_terminal:
        yield LineSearchObserver(lambda line: print(line, flush=True))
        return
    with Display(console) as display:
        yield display
