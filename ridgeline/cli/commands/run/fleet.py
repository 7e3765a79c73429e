"""`ridgeline fleet`: servers and their gateway on Ray Serve."""

from __future__ import annotations

from collections.abc import Sequence

import click
from msgspec.structs import replace
from rich.live import Live

from ridgeline.cli.params.click_command import OptionCommand
from ridgeline.cli.params.invocation import Invocation
from ridgeline.cli.render.console import ReportConsole
from ridgeline.cli.render.measure.fleet import fleet_screen
from ridgeline.config.commands import COMMANDS
from ridgeline.config.server import CanaryOptions, FallbackOptions, RouteOptions
from ridgeline.config.tools import FleetOptions
from ridgeline.errors import BadInput
from ridgeline.report.json_line import json_line
from ridgeline.workflows.serving.fleet import FleetStatus, change_fleet, gateway_url
from ridgeline.workflows.serving.route import prepare
from ridgeline.workflows.serving.watch_fleet import view_fleet, watch_fleet

SET_BY_FLEET = {
    "serve": ("--host", "--port", "--shutdown-timeout-s"),
    "route": ("--host", "--port", "--backend-file", "--close-on-stop"),
}
"""Flags that a fleet sets on the commands it runs."""
_SOME_BACKEND = "http://127.0.0.1:1"  # the gateway gets its servers once they run


def fleet(call: Invocation) -> None:
    """`ridgeline fleet`: `up` runs until SIGINT or SIGTERM if it started the cluster."""
    options = call.read(FleetOptions)
    if options.action == "top":
        _top(options)
        return

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

    change_fleet(options, on_status=show, on_progress=tell, check_command=check_command)


def check_command(name: str, words: Sequence[str]) -> None:
    """Check the options of a command that a fleet will run.

    Raises BadInput if the command would refuse them, would not start (`--help`), or if one of them
    is set by the fleet.
    """
    where = f"{name} in the fleet file"
    for word in words:
        if word.split("=", 1)[0] in SET_BY_FLEET[name]:
            raise BadInput(f"{where}: the fleet sets {word}", fix="leave it out")
    started = list[Invocation]()
    command = OptionCommand(COMMANDS[name], started.append)
    try:
        command.main(list(words), prog_name=f"ridgeline {name}", standalone_mode=False)
    except click.ClickException as error:
        raise BadInput(f"{where}: {error.format_message()}", value=" ".join(words)) from None
    except BadInput as error:
        raise BadInput(f"{where}: {error}") from None
    if not started:
        raise BadInput(f"{where}: the command would not start", value=" ".join(words))
    if name == "route":
        try:
            _check_route(started[0])
        except BadInput as error:
            raise BadInput(f"{where}: {error}") from None


def _check_route(call: Invocation) -> None:
    """Check the gateway's options together, as its start would."""
    given = call.read(RouteOptions)
    options = replace(given, backend=given.backend or (_SOME_BACKEND,), otlp_endpoint=None)
    prepare(options, call.read(CanaryOptions), call.read(FallbackOptions))


def _top(options: FleetOptions) -> None:
    """Print the fleet's load once, or update it until Ctrl-C."""
    url, console = gateway_url(options), ReportConsole()
    if options.json or options.once:
        now = view_fleet(url, options.api_key)
        if options.json:
            print(json_line(now))
        else:
            console.print(fleet_screen(now, url))
        return
    try:
        with Live(console=console, auto_refresh=False) as live:
            for view in watch_fleet(url, options.api_key, options.interval):
                live.update(fleet_screen(view, url), refresh=True)
    except KeyboardInterrupt:
        return
