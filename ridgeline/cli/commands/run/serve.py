"""`ridgeline serve` and `ridgeline new-key`."""

from __future__ import annotations

from collections.abc import Callable

from ridgeline.cli.params.invocation import Invocation
from ridgeline.cli.render.console import ReportConsole
from ridgeline.cli.render.live_progress import ProgressLines
from ridgeline.cli.render.serving import served_lines
from ridgeline.config.server import ServeModel, ServerOptions, TwinOptions
from ridgeline.config.tools import NewKeyOptions
from ridgeline.report.json_line import json_line
from ridgeline.workflows.serving.serve import ServedModel, serve_node
from ridgeline.workflows.serving.serve import new_key as create_key
from ridgeline.workflows.serving.serve import serve as serve_model


def serve(call: Invocation) -> None:
    """`ridgeline serve`: until SIGINT or SIGTERM."""
    console = ReportConsole(stderr=True)

    def show(served: ServedModel, stop: Callable[[], None]) -> None:
        for line in served_lines(served):
            console.print(line, markup=False, soft_wrap=True)

    model, twin = call.read(ServeModel).model, call.read(TwinOptions)
    settings = call.engine_settings(model)
    if settings.node_rank and not twin.twin:
        serve_node(settings, ProgressLines(console))
        return
    serve_model(
        settings,
        call.read(ServerOptions),
        twin=twin if twin.twin else None,
        on_ready=show,
        observer=ProgressLines(console),
    )


def new_key(call: Invocation) -> None:
    """`ridgeline new-key`: print a new key, and the entry of the keys file that accepts it."""
    options = call.read(NewKeyOptions)
    created = create_key(options.name)
    print(json_line(created.to_dict()) if options.json else f"{created.key}\n\n{created.entry}")
