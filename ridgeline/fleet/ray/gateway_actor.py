"""A Ray actor that runs the fleet's gateway, and follows the load."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.fleet.ray.applications import run_model
from ridgeline.fleet.ray.child_process import ChildProcess, is_ready
from ridgeline.fleet.ray.fleet_file import FleetFile, FleetModel
from ridgeline.fleet.ray.scaling import SCALING_S, FleetScaler, read_gateway

log = logging.getLogger("ridgeline.fleet")

_LOST_AFTER_S = 60.0
_SUPERVISION_S = 1.0


class ServerEntry(msgspec.Struct, kw_only=True):
    """A server of the fleet, as `ridgeline fleet status` shows it."""

    replica: str
    model: str
    url: str
    pid: int
    seen_s: float = 0.0
    is_ready: bool = False


class GatewaySupervisor:
    """A Ray actor: runs `ridgeline route` with a file of the servers that have registered."""

    def __init__(self, host: str, port: int, arguments: Sequence[str]) -> None:
        self._host, self._port, self._arguments = host, port, tuple(arguments)
        self._folder = tempfile.TemporaryDirectory(prefix="ridgeline-fleet-")
        self._file = Path(self._folder.name) / "backends"
        self._servers: dict[str, ServerEntry] = {}
        self._lock = threading.Lock()
        self._write()
        self._child = self._start()
        self._scaler: FleetScaler | None = None
        threading.Thread(target=self._supervise, daemon=True).start()
        threading.Thread(target=self._scale, daemon=True).start()

    def follow_load(self, fleet: FleetFile, host: str) -> None:
        """Change the numbers of servers with the load, for the models whose entries say so."""

        def set_replicas(model: FleetModel, count: int) -> None:
            run_model(msgspec.structs.replace(model, replicas=count), fleet, host)

        key = os.environ.get("RIDGELINE_API_KEY")
        self._scaler = FleetScaler(fleet.models, lambda: read_gateway(self.url, key), set_replicas)

    def register(self, replica: str, model: str, url: str, pid: int) -> None:
        """A server is ready."""
        entry = ServerEntry(replica=replica, model=model, url=url, pid=pid, seen_s=time.monotonic())
        with self._lock:
            self._servers[replica] = entry
            self._write()

    def note_alive(self, replica: str) -> None:
        """The supervisor of a server has found it running."""
        with self._lock:
            if replica in self._servers:
                self._servers[replica].seen_s = time.monotonic()

    def unregister(self, replica: str) -> None:
        """A server is about to stop: it gets no more requests."""
        with self._lock:
            self._servers.pop(replica, None)
            self._write()

    def status(self) -> dict[str, Any]:
        """The gateway's URL and the servers, as plain values."""
        with self._lock:
            servers = [msgspec.structs.replace(entry) for entry in self._servers.values()]
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
        return f"http://{self._host}:{self._port}"

    def stop(self) -> None:
        """Stop the gateway; its streams may end first."""
        self._child.stop(60)

    def _start(self) -> ChildProcess:
        words = ["--host", self._host, "--port", str(self._port), "--backend-file", str(self._file)]
        return ChildProcess(["route", *words, *self._arguments])

    def _write(self) -> None:
        part = self._file.with_suffix(".part")
        part.write_text("".join(f"{entry.url}\n" for entry in self._servers.values()))
        part.replace(self._file)

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
        """Forget servers whose supervisors are gone, and start a gateway that has ended again."""
        while True:
            time.sleep(_SUPERVISION_S)
            lost_s = time.monotonic() - _LOST_AFTER_S
            with self._lock:
                lost = [name for name, entry in self._servers.items() if entry.seen_s < lost_s]
                for name in lost:
                    del self._servers[name]
                if lost:
                    self._write()
            if not self._child.is_running:
                self._child = self._start()
