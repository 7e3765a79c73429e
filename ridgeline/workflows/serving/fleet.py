"""Start, show and end a fleet on Ray Serve."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ridgeline.config.tools import FleetOptions
from ridgeline.errors import BadInput, CannotRun


class FleetStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet that runs: the gateway's URL, and model, url, pid and is_ready of every server."""

    url: str
    servers: list[dict[str, Any]]

    def plain(self) -> dict[str, Any]:
        return {"url": self.url, "servers": self.servers}


def change_fleet(
    options: FleetOptions,
    *,
    on_status: Callable[[FleetStatus], None],
    on_progress: Callable[[str], None],
    check_command: Callable[[str, Sequence[str]], None],
) -> None:
    """Do what `options.action` says. `up` returns once the fleet runs, or runs until SIGINT,
    SIGTERM or `down` where it had to start a cluster. `check_command` raises BadInput for a command
    and its words that `ridgeline` would refuse. Raises BadInput or CannotRun."""
    from ridgeline.fleet.ray import deploy

    if options.action == "up":
        try:
            _start_fleet(options, on_status, on_progress, check_command)
        except SystemExit:  # how Ray ends a process that gets SIGTERM before the fleet runs
            raise KeyboardInterrupt from None
        return
    deploy.connect(options.address, start=False)
    if options.action == "status":
        on_status(_status())
    elif not deploy.take_down():
        raise CannotRun("no fleet runs on this cluster")


def _start_fleet(
    options: FleetOptions,
    on_status: Callable[[FleetStatus], None],
    on_progress: Callable[[str], None],
    check_command: Callable[[str, Sequence[str]], None],
) -> None:
    from ridgeline.fleet.ray import deploy
    from ridgeline.fleet.ray.fleet_file import read_fleet_file
    from ridgeline.workflows.serving.pack_fleet import pack_fleet

    if options.file is None:
        raise BadInput("fleet up needs a file", fix="ridgeline fleet up fleet.toml")
    fleet = pack_fleet(read_fleet_file(options.file))
    check_command("route", fleet.route)
    for model in fleet.models:
        check_command("serve", (model.model, *model.serve))
    started = deploy.connect(options.address, start=True)
    leaving = deploy.deploy(fleet)
    deploy.wait_ready(fleet, options.ready_timeout_s, on_progress)
    deploy.remove(leaving)
    on_status(_status())
    if started:
        _wait_for_end()
        deploy.take_down()


def gateway_url(options: FleetOptions) -> str:
    """The gateway's URL: as given, else that of the fleet on Ray. Raises BadInput or CannotRun."""
    from ridgeline.fleet.ray import deploy

    if options.url is not None:
        return options.url
    deploy.connect(options.address, start=False)
    return _status().url


def _status() -> FleetStatus:
    from ridgeline.fleet.ray.deploy import read_status

    status = read_status()
    if status is None:
        raise CannotRun("no fleet runs on this cluster")
    return FleetStatus(url=status["url"], servers=status["servers"])


def _wait_for_end() -> None:
    """Until SIGINT or SIGTERM, or until `ridgeline fleet down` has ended the fleet."""
    from ridgeline.fleet.ray.deploy import is_up

    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    while not ended.wait(2.0):
        if not is_up():
            return
