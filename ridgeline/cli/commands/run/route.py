"""`ridgeline route`: a gateway in front of several servers."""

from __future__ import annotations

from ridgeline.cli.params.invocation import Invocation
from ridgeline.cli.render.console import ReportConsole
from ridgeline.config.server import CanaryOptions, FallbackOptions, RouteOptions
from ridgeline.workflows.serving.route import route as run_gateway


def route(call: Invocation) -> None:
    """`ridgeline route`: until SIGINT or SIGTERM."""
    console = ReportConsole(stderr=True)

    def show(url: str) -> None:
        console.print(f"routing {url}", markup=False, soft_wrap=True)

    run_gateway(
        call.read(RouteOptions),
        canary=call.read(CanaryOptions),
        fallback=call.read(FallbackOptions),
        on_ready=show,
    )
