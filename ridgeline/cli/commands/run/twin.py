"""`ridgeline twin`: imitate another server."""

from __future__ import annotations

from ridgeline.cli.params.invocation import Invocation
from ridgeline.cli.render.console import ReportConsole
from ridgeline.cli.render.live_progress import ProgressLines
from ridgeline.config.server import TwinServerOptions
from ridgeline.workflows.serving.twin_of_server import run_twin


def twin(call: Invocation) -> int:
    """`ridgeline twin`: until SIGINT or SIGTERM."""
    console = ReportConsole(stderr=True)
    return run_twin(call.read(TwinServerOptions), observer=ProgressLines(console))
