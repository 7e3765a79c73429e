"""`ridgeline optimize`: search for the best configuration, write it and print how it was found."""

from __future__ import annotations

import msgspec

from ridgeline.cli.params.invocation import Invocation
from ridgeline.cli.render.console import ReportConsole
from ridgeline.cli.render.improve.advice import print_advice, print_dry_run
from ridgeline.cli.render.improve.optimize import print_search
from ridgeline.cli.render.improve.optimize_progress import search_progress
from ridgeline.config.improve import OptimizeOptions, RehearsalOptions, TargetServerOptions
from ridgeline.report.json_line import json_line
from ridgeline.workflows.optimize.advise import advise
from ridgeline.workflows.optimize.dry_run import dry_run
from ridgeline.workflows.optimize.optimize import check_search, optimize
from ridgeline.workflows.optimize.restartable_server import restartable_server
from ridgeline.workflows.optimize.server_driver import cluster_rights

INTERRUPTED, UNDECIDED = 130, 3


def optimize_command(call: Invocation) -> int:
    """`ridgeline optimize`; 130 if interrupted, 3 if no trial came to a verdict in time."""
    options = call.read(OptimizeOptions)
    if options.resume is not None:
        options = msgspec.structs.replace(options, output=options.resume)
    console = ReportConsole(stderr=options.json)
    settings = call.engine_settings(options.model)
    server = restartable_server(call.read(TargetServerOptions))
    rehearsal = call.read(RehearsalOptions)
    if server is not None and rehearsal.rbac:
        print(cluster_rights(server), end="")
        return 0
    if server is not None and rehearsal.advise:
        with search_progress(console) as observer:
            advice = advise(settings, options, server, observer=observer)
        print_advice(console, advice)
        return 0
    if server is not None and rehearsal.dry_run:
        print_dry_run(console, dry_run(settings, options, server))
        return 0
    check_search(settings, options, server, call.config)
    if server is None:
        call.settings(options.model)  # downloads the model
    with search_progress(console) as observer:
        result = optimize(settings, options, server=server, logs=options.output, observer=observer)
    paths = result.save_files(options.output)
    if options.json:
        print(json_line(result.to_dict()))
    else:
        print_search(console, result.ladder, paths)
    ladder = result.ladder
    if ladder.ended == "interrupted":
        return INTERRUPTED
    return UNDECIDED if ladder.ended == "budget spent" and not ladder.decided else 0
