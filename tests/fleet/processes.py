"""Replicas and gateways as real processes, forked from one that has imported everything."""

from __future__ import annotations

import http.client
import itertools
import multiprocessing
import socket
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from typing import Any

import httpx
import msgspec

from ridgeline.config.server import CanaryOptions, RouteOptions, ServerOptions
from ridgeline.config.settings import settings_from

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "ridgeline.engine.engine",
        "ridgeline.serve.app",
        "ridgeline.workflows.serving.serve",
        "ridgeline.workflows.serving.route",
        "tests.fleet.processes",
    ]
)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def is_ready(port: int) -> bool:
    """Whether a server on that port says so; without the cost of a whole HTTP client."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def serve_model(port: int, settings: dict[str, Any], options: dict[str, Any]) -> None:
    """Serve a model. `flaw`: every 97th sampled token is wrong."""
    from ridgeline.workflows.serving.serve import serve

    if options.pop("flaw", False):
        plant_flaw()
    serve(settings_from(settings), ServerOptions(port=port, **options))


def plant_flaw() -> None:
    """Let this process's runner change every 97th token that it samples."""
    from ridgeline.engine.execution.runner import TorchRunner
    from ridgeline.engine.scheduler.plan import StepPlan, StepResult

    run, count = TorchRunner.run, itertools.count(1)

    def flawed(self: TorchRunner, plan: StepPlan) -> StepResult:
        result = run(self, plan)
        outputs = [
            msgspec.structs.replace(output, tokens=(output.tokens[0] ^ 1, *output.tokens[1:]))
            if output.tokens and next(count) % 97 == 0
            else output
            for output in result.outputs
        ]
        return msgspec.structs.replace(result, outputs=tuple(outputs))

    TorchRunner.run = flawed  # type: ignore[method-assign]


def run_gateway(port: int, backends: Sequence[str], options: dict[str, Any]) -> None:
    from ridgeline.workflows.serving.route import route

    canary = {name: options.pop(name) for name in list(options) if name.startswith("canary")}
    route(
        RouteOptions(port=port, backend=tuple(backends), **options),
        canary=CanaryOptions(**canary),
    )


class Replica:
    """A server process on a port that it keeps when it is started again."""

    def __init__(self, settings: dict[str, Any] | None = None, **options: Any) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._settings = settings or {
            "model": "demo",
            "kv_cache_memory_bytes": 32 << 20,
            "num_threads": 1,
        }
        self._options = options
        self.process: BaseProcess | None = None

    def start(self) -> None:
        arguments = (self.port, self._settings, self._options)
        self.process = _CONTEXT.Process(target=serve_model, args=arguments, daemon=True)
        self.process.start()

    def kill(self) -> None:
        """kill -9."""
        assert self.process is not None
        self.process.kill()
        self.process.join(10)

    def terminate(self) -> None:
        """SIGTERM: drain."""
        assert self.process is not None
        self.process.terminate()

    def is_ready(self) -> bool:
        return is_ready(self.port)

    def wait_ready(self, timeout_s: float = 90) -> None:
        wait_until(self.is_ready, timeout_s)


class GatewayProcess:
    """`ridgeline route` as a process."""

    def __init__(self, backends: Sequence[str], **options: Any) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        arguments = (self.port, list(backends), options)
        self.process = _CONTEXT.Process(target=run_gateway, args=arguments, daemon=True)
        self.process.start()

    def is_ready(self) -> bool:
        return is_ready(self.port)

    def metric(self, name: str) -> float:
        page = httpx.get(f"{self.url}/metrics", timeout=10).text
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in page.splitlines()
            if line.startswith((name + " ", name + "{"))
        )

    def stop(self) -> None:
        self.process.kill()
        self.process.join(10)


def wait_until(condition: Any, timeout_s: float = 90) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "not within the time"
        time.sleep(0.05)
