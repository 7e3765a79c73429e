"""`ridgeline simulate`: one run, several seeds, or a sweep over settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from ridgeline.cli.render.live_progress import live_progress
from ridgeline.cli.render.planning.simulate import seeds_table, simulation_table, sweep_table
from ridgeline.errors import BadInput
from ridgeline.report.files import write_file
from ridgeline.report.json_line import json_line
from ridgeline.workflows.planning.simulate import SimulationRequest, simulate
from ridgeline.workflows.planning.simulate_seeds import simulate_seeds
from ridgeline.workflows.planning.simulate_sweep import simulate_sweep

NO_FLEET_RUNS = 2


class SimulationOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """Files to write, and whether to print JSON."""

    html: Path | None = None
    trace: Path | None = None
    json: bool = False


def run_simulation(
    options: SimulationRequest,
    outputs: SimulationOutputs,
    sweep: Sequence[str],
    num_workers: int | None,
) -> int:
    """Simulate and print; the exit code, 2 if no fleet of a sweep can run."""
    if sweep:
        _refuse_files(outputs, "--sweep")
        return _run_sweep(options, sweep, num_workers, outputs.json)
    if options.num_seeds > 1:
        _refuse_files(outputs, "--num-seeds")
        with live_progress() as observer:
            seeds = simulate_seeds(options, observer)
        if outputs.json:
            print(json_line({"num_seeds": seeds.num_seeds, "figures": seeds.figures}))
        else:
            Console(highlight=False).print(seeds_table(seeds))
        return 0
    result = simulate(options)
    if outputs.trace is not None:
        result.save_trace(outputs.trace)
    if outputs.html is not None:
        write_file(outputs.html, [result.to_html().encode()])
    if outputs.json:
        print(json_line(result.to_dict()))
        return 0
    out = Console(highlight=False)
    out.print(simulation_table(result))
    for note in result.notes:
        out.print(f"- {note}", style="dim", soft_wrap=True, markup=False)
    return 0


def _run_sweep(
    options: SimulationRequest, sweep: Sequence[str], num_workers: int | None, as_json: bool
) -> int:
    with live_progress() as observer:
        result = simulate_sweep(options, sweep, num_workers=num_workers, observer=observer)
    if as_json:
        for case in result.cases:
            print(json_line(case))
    else:
        Console(highlight=False).print(sweep_table(result))
    return 0 if any(case.found for case in result.cases) else NO_FLEET_RUNS


def _refuse_files(outputs: SimulationOutputs, flag: str) -> None:
    for name in ("html", "trace"):
        if getattr(outputs, name) is not None:
            raise BadInput(
                f"--{name} shows one run and cannot be combined with {flag}",
                value=str(getattr(outputs, name)),
                fix=f"remove --{name} or {flag}",
            )
