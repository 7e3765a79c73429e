"""`ridgeline mock-server`: scripted answers over TCP, to test load generators against."""

from __future__ import annotations

from ridgeline.cli.params.invocation import Invocation
from ridgeline.cli.render.console import ReportConsole
from ridgeline.config.tools import MockServerOptions
from ridgeline.workflows.serving.mock_server import run_mock_server, script_summaries


def mock_server(call: Invocation) -> None:
    """`ridgeline mock-server`: until SIGINT or SIGTERM; --list prints the scripts instead."""
    options = call.read(MockServerOptions)
    if options.list_scripts:
        for name, summary in script_summaries().items():
            print(f"{name:<16} {summary}")
        return
    console = ReportConsole(stderr=True)
    run = run_mock_server(
        options,
        on_ready=lambda url: console.print(f"mock server on {url}", markup=False, soft_wrap=True),
    )
    if options.log is not None:
        run.save_log(options.log)
