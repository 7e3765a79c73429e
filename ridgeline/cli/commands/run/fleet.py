"""`ridgeline fleet`: servers and their gateway on Ray Serve."""

from __future__ import annotations

from ridgeline.cli.params.invocation import Invocation
from ridgeline.config.tools import FleetOptions
from ridgeline.report.json_line import json_line
from ridgeline.workflows.serving.fleet import FleetStatus, change_fleet


def fleet(call: Invocation) -> None:
    """`ridgeline fleet`: `up` runs until SIGINT or SIGTERM if it started the cluster."""
    options = call.read(FleetOptions)

    def show(status: FleetStatus) -> None:
        if options.json:
            print(json_line(status.plain()), flush=True)
            return
        print(f"routing {status.url}", flush=True)
        for server in status.servers:
            state = "ready" if server["is_ready"] else "not ready"
            print(f"{server['model']:<24} {server['url']:<28} {state}", flush=True)

    def tell(text: str) -> None:
        if not options.json:
            print(text, flush=True)

    change_fleet(options, on_status=show, on_progress=tell)
