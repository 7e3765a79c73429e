"""A Ray actor that runs the fleet's gateway, and follows the load."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.errors import DECODE_ERRORS
from ridgeline.fleet.ray.applications import run_models
from ridgeline.fleet.ray.child_process import ChildProcess, is_ready, url_of
from ridgeline.fleet.ray.fleet_file import FleetFile, FleetModel
from ridgeline.fleet.ray.scaling import SCALING_S, FleetScaler, read_gateway
from ridgeline.fleet.ray.server_table import ServerTable, replace_file

log = logging.getLogger("ridgeline.fleet")

_SUPERVISION_S = 1.0
_ANSWER_S = 10.0
_PARK = "--park-timeout-s"
_PARK_S = 300
"""Wait of a request for a server, where `route` sets none: a fleet without room for one more server
has none while its only one is replaced, and a model takes its time to load."""


class _Followed(msgspec.Struct, frozen=True):
    """The arguments of `follow_load`, and the numbers of servers since then."""

    fleet: FleetFile
    replicas: dict[str, int] = {}


class GatewaySupervisor:
    """A Ray actor: runs `ridgeline route` with a file of the servers that have registered.

    Ray starts an actor that was killed again, and it goes on from the files in its folder. The
    gateway before it has closed its port by then, and ends with its last stream.
    """

    def __init__(self, host: str, port: int, arguments: Sequence[str]) -> None:
        self._host, self._port, self._arguments = host, port, tuple(arguments)
        self._folder = _own_folder()
        self._file, self._followed_file = self._folder / "backends", self._folder / "followed"
        self._servers = ServerTable(self._file, lambda url: is_ready(url, _ANSWER_S))
        self._child = self._start()
        self._scaler: FleetScaler | None = None
        if (followed := self._followed_before()) is not None:
            self._follow(followed)
        threading.Thread(target=self._supervise, daemon=True).start()
        threading.Thread(target=self._scale, daemon=True).start()

    def _followed_before(self) -> _Followed | None:
        """What the gateway before this one followed; None if it followed no load."""
        if not self._followed_file.exists():
            return None
        try:
            return msgspec.json.decode(self._followed_file.read_bytes(), type=_Followed)
        except (OSError, *DECODE_ERRORS) as error:
            log.error("the load is not followed: %s: %s", self._followed_file, error)
            return None

    def hold(self) -> dict[str, int]:
        """Change no number of servers until `follow_load`. Returns those of the models that follow
        the load."""
        scaler, self._scaler = self._scaler, None
        return {} if scaler is None else dict(scaler.replicas)

    def follow_load(self, fleet: FleetFile, replicas: dict[str, int]) -> None:
        """Change the numbers of servers with the load, for the models whose entries say so, from
        these numbers on."""
        self._follow(_Followed(fleet, replicas))

    def _follow(self, followed: _Followed) -> None:
        fleet, replicas = followed.fleet, dict(followed.replicas)

        def set_replicas(model: FleetModel, count: int) -> None:
            replicas[model.name] = count
            self._keep(_Followed(fleet, replicas))
            run_models([msgspec.structs.replace(model, replicas=count)], fleet)

        key = os.environ.get("RIDGELINE_API_KEY")
        self._scaler = FleetScaler(
            fleet.models, lambda: read_gateway(self.url, key), set_replicas, replicas
        )
        self._keep(followed)

    def _keep(self, followed: _Followed) -> None:
        replace_file(self._followed_file, msgspec.json.encode(followed))

    def machine(self) -> str:
        """The address of the gateway's machine in the cluster."""
        import ray

        return str(ray.util.get_node_ip_address())

    def note_server(self, replica: str, model: str, url: str, pid: int) -> None:
        """The supervisor of a server has found it running."""
        self._servers.note(replica, model, url, pid)

    def is_routed(self, url: str) -> bool:
        """Whether the gateway sends requests to the server at the URL."""
        view = read_gateway(self.url, os.environ.get("RIDGELINE_API_KEY"))
        return view is not None and any(b.url == url and b.state == "ready" for b in view.backends)

    def unregister(self, replica: str) -> None:
        """A server is about to stop: it gets no more requests."""
        self._servers.remove(replica)

    def status(self) -> dict[str, Any]:
        """The gateway's URL and the servers, as plain values."""
        servers = self._servers.entries()
        for entry in servers:
            entry.is_ready = is_ready(entry.url)
        return {
            "url": self.url,
            "pid": self._child.pid,
            "is_ready": is_ready(self.url),
            "servers": msgspec.to_builtins(servers),
        }

    @property
    def url(self) -> str:
        return url_of(self._host, self._port)

    def stop(self) -> None:
        """Stop the gateway; its streams may end first."""
        self._child.stop(60)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> ChildProcess:
        return ChildProcess(gateway_words(self._host, self._port, self._file, self._arguments))

    def _scale(self) -> None:
        while True:
            time.sleep(SCALING_S)
            scaler = self._scaler
            if scaler is not None:
                try:
                    scaler.step(time.monotonic())
                except Exception:
                    log.exception("the fleet cannot be scaled")

    def _supervise(self) -> None:
        """Start a gateway that has ended again, and forget servers that are gone."""
        while True:
            time.sleep(_SUPERVISION_S)
            if not self._child.is_running:
                self._child = self._start()
            self._servers.forget_lost()


def _own_folder() -> Path:
    """Of this actor, and of the one that Ray starts in its place."""
    import ray

    actor = ray.get_runtime_context().get_actor_id()
    folder = Path(tempfile.gettempdir()) / f"ridgeline-fleet-{actor}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise RuntimeError(f"{folder} belongs to another user")
    return folder


def gateway_words(host: str, port: int, file: Path, arguments: Sequence[str]) -> list[str]:
    """The command line of the gateway; `arguments`: further flags of `ridgeline route`."""
    words = ["route", "--host", host, "--port", str(port), "--close-on-stop"]
    words += ["--backend-file", str(file)]
    if not any(word.split("=")[0] == _PARK for word in arguments):
        words += [_PARK, str(_PARK_S)]
    return [*words, *arguments]
