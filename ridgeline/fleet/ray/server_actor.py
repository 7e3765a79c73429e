"""What runs in a replica of Ray Serve: a supervisor of one server."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from ridgeline.fleet.ray.child_process import ChildProcess, free_port, url_of

NAMESPACE, GATEWAY = "ridgeline", "ridgeline-gateway"
LOOPBACK = "127.0.0.1"
_START_TIMEOUT_S = 900.0
_ROUTED_TIMEOUT_S = 120.0


def listening_address(machine: str, gateway_machine: str) -> str:
    """Where a server on one machine listens for the gateway on another one, or on the same."""
    return LOOPBACK if machine == gateway_machine else machine


class ServerReplica:
    """A replica of Ray Serve: runs `ridgeline serve`, and ends with it.

    It is there for Ray once the gateway sends it requests, so that one that it replaces stops no
    earlier. Ray starts another one if `check_health` fails. When Ray removes the replica, the
    server gets no more requests, finishes what it can within `drain_s`, and hands the rest over.
    """

    def __init__(self, model: str, arguments: Sequence[str], drain_s: int) -> None:
        import ray
        from ray import serve

        self._drain_s = drain_s
        self._replica = str(serve.get_replica_context().replica_id.unique_id)
        self._gateway = ray.get_actor(GATEWAY, NAMESPACE)
        machine = ray.util.get_node_ip_address()
        own = listening_address(machine, ray.get(self._gateway.machine.remote()))
        port = free_port(own)
        url = url_of(own, port)
        words = ["--host", own, "--port", str(port), "--shutdown-timeout-s", str(drain_s)]
        self._child = ChildProcess(["serve", model, *words, *arguments])
        try:
            self._child.wait_ready(url, _START_TIMEOUT_S)
        except RuntimeError:
            self._child.stop(5)
            raise
        self._entry = (self._replica, model, url, self._child.pid)
        ray.get(self._gateway.note_server.remote(*self._entry))
        deadline_s = time.monotonic() + _ROUTED_TIMEOUT_S
        while time.monotonic() < deadline_s and not ray.get(self._gateway.is_routed.remote(url)):
            time.sleep(0.2)

    def check_health(self) -> None:
        """Raises RuntimeError if the server has ended."""
        if not self._child.is_running:
            raise RuntimeError("the server has ended")
        self._gateway.note_server.remote(*self._entry)

    def __call__(self) -> str:
        """Requests go to the gateway, and not through Ray."""
        return self._replica

    def __del__(self) -> None:
        if hasattr(self, "_child"):
            import ray

            with contextlib.suppress(Exception):  # the gateway may be gone already
                ray.get(self._gateway.unregister.remote(self._replica), timeout=5)
            self._child.stop(self._drain_s + 10)
