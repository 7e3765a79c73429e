"""`ridgeline simulate`: one run, several seeds, or a sweep over settings."""

from __future__ import annotations

from ridgeline.cli.params.invocation import Invocation
from ridgeline.cli.render.console import ReportConsole, print_prose
from ridgeline.cli.render.live_progress import live_progress
from ridgeline.cli.render.planning.simulate import seeds_table, simulation_table, sweep_table
from ridgeline.config.planning import SimulateOptions
from ridgeline.errors import BadInput
from ridgeline.report.files import write_file
from ridgeline.report.json_line import json_line
from ridgeline.workflows.planning.simulate import simulate
from ridgeline.workflows.planning.simulate_seeds import simulate_seeds
from ridgeline.workflows.planning.simulate_sweep import simulate_sweep

NO_FLEET_RUNS = 2


def simulate_command(call: Invocation) -> int:
    """`ridgeline simulate`: one run, several seeds, or a sweep; 2 if no fleet in it can run."""
    options = call.read(SimulateOptions)
    if options.sweep:
        _refuse_files(options, "--sweep")
        return _run_sweep(options)
    if options.num_seeds > 1:
        _refuse_files(options, "--num-seeds")
        with live_progress() as observer:
            seeds = simulate_seeds(options, observer)
        if options.json:
            print(json_line({"num_seeds": seeds.num_seeds, "figures": seeds.figures}))
        else:
            ReportConsole().print(seeds_table(seeds))
        return 0
    result = simulate(options)
    if options.trace is not None:
        result.save_trace(options.trace)
    if options.html is not None:
        write_file(options.html, [result.to_html().encode()])
    if options.json:
        print(json_line(result.to_dict()))
        return 0
    out = ReportConsole()
    out.print(simulation_table(result))
    for note in result.notes:
        print_prose(out, f"- {note}", "dim")
    return 0


def _run_sweep(options: SimulateOptions) -> int:
    with live_progress() as observer:
        result = simulate_sweep(
            options, options.sweep, num_workers=options.num_workers, observer=observer
        )
    if options.json:
        for case in result.cases:
            print(json_line(case))
    else:
        ReportConsole().print(sweep_table(result))
    return 0 if any(case.summary for case in result.cases) else NO_FLEET_RUNS


def _refuse_files(options: SimulateOptions, flag: str) -> None:
    for name, path in {"--html": options.html, "--trace": options.trace}.items():
        if path is not None:
            raise BadInput(
                f"{name} shows one run and cannot be combined with {flag}",
                value=str(path),
                fix=f"remove {name} or {flag}",
            )
