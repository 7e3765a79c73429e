"""`ridgeline optimize`: search for the best configuration, write it and print how it was found."""

from __future__ import annotations

from pathlib import Path

import msgspec
from rich.console import Console

from ridgeline.cli.params.invocation import Invocation
from ridgeline.cli.render.optimize import print_search
from ridgeline.cli.render.optimize_progress import search_progress
from ridgeline.config import improve as config
from ridgeline.config.settings import Settings
from ridgeline.errors import BadInput
from ridgeline.report.files import check_writable
from ridgeline.workflows.optimize.optimize import (
    ENGINE_FILES,
    SERVER_FILES,
    OptimizeRequest,
    job_of,
    ladder_of,
    optimize,
)
from ridgeline.workflows.optimize.restartable_server import RestartableServer, server_recipe

INTERRUPTED = 130


def optimize_command(call: Invocation) -> int:
    """`ridgeline optimize`."""
    given, target = call.read(config.OptimizeOptions), call.read(config.TargetServerOptions)
    settings = call.settings(given.model)
    options = OptimizeRequest(
        workload=given.workload,
        slo=given.slo,
        objective=given.objective,
        budget_s=given.budget,
        dollars_per_hour=given.price_per_hour,
        seed=settings.seed,
        ladder=given.ladder,
        calibration=given.calibration,
    )
    server = None
    if target.url is not None and target.restart_cmd is not None:
        server = RestartableServer(
            url=target.url,
            restart_cmd=target.restart_cmd,
            server=target.server,
            served_model_name=target.served_model_name,
            start_timeout_s=target.start_timeout,
        )
    files = OptimizeFiles(output=given.output, config=call.config)
    return run_optimize(settings, options, files, server)


class OptimizeFiles(msgspec.Struct, frozen=True, kw_only=True):
    """The output folder, and the configuration file that the settings were read from."""

    output: Path = Path("ridgeline-out")
    config: Path | None = None


def run_optimize(
    settings: Settings,
    options: OptimizeRequest,
    files: OptimizeFiles,
    server: RestartableServer | None = None,
) -> int:
    """Search, write the files and print the ladder; 130 if it was interrupted."""
    console = Console()
    job_of(settings, options)
    ladder_of(options.ladder)
    if server is not None:
        server_recipe(server)
    check_inputs_kept(options, files, ENGINE_FILES if server is None else SERVER_FILES)
    check_writable(files.output)
    with search_progress(console) as observer:
        result = optimize(settings, options, server=server, logs=files.output, observer=observer)
    paths = result.save_files(files.output)
    print_search(console, result.ladder, paths)
    return INTERRUPTED if result.ladder.ended == "interrupted" else 0


def check_inputs_kept(
    options: OptimizeRequest, files: OptimizeFiles, names: tuple[str, ...]
) -> None:
    """BadInput if a file that is read would be overwritten."""
    written = {(files.output / name).resolve() for name in names}
    for path in (files.config, options.ladder, options.calibration):
        if path is not None and path.resolve() in written:
            raise BadInput(
                "the results would overwrite a file that they are made from",
                value=str(path),
                fix="give another --output",
            )
