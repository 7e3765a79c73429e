"""`ridgeline batch FILE -o OUT`: answer a file of requests without a server."""

from __future__ import annotations

from ridgeline.cli.params.invocation import Invocation
from ridgeline.cli.render.console import ReportConsole
from ridgeline.cli.render.live_progress import live_progress
from ridgeline.cli.render.serving import batch_line
from ridgeline.config.tools import BatchFileOptions
from ridgeline.report.json_line import json_line
from ridgeline.workflows.serving.answer_batch import answer_batch

SOME_FAILED = 1


def batch(call: Invocation) -> int:
    """`ridgeline batch`."""
    options = call.read(BatchFileOptions)
    console = ReportConsole(stderr=True)
    with live_progress(console) as observer:
        result = answer_batch(
            call.engine_settings(options.model),
            options.file,
            options.output,
            served_model_name=options.served_model_name,
            observer=observer,
        )
    if options.json:
        print(json_line(result.to_dict()))
    else:
        console.print(batch_line(result), markup=False, soft_wrap=True)
    if result.errors is None:
        return 0
    console.print(f"failed requests: {result.errors}", style="yellow", markup=False, soft_wrap=True)
    return SOME_FAILED
