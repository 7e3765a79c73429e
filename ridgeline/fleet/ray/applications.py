"""The applications of Ray Serve that keep a fleet's servers."""

from __future__ import annotations

import os
from typing import Any

from ridgeline.fleet.ray.fleet_file import FleetFile, FleetModel
from ridgeline.fleet.ray.server_actor import ServerReplica

PREFIX = "ridgeline-"  # of the fleet's applications in Ray Serve
KEY = "RIDGELINE_API_KEY"
_HEALTH_PERIOD_S = 1  # three failures in a row replace a server


def run_model(model: FleetModel, fleet: FleetFile, host: str) -> None:
    """Make Ray Serve run as many servers of the model as its entry says."""
    from ray import serve

    application = _application(model, fleet, host)
    serve.run(application, name=PREFIX + model.name, route_prefix=None, blocking=False)


def actor_environment() -> dict[str, Any]:
    """The runtime environment of the actors: the fleet's key, if there is one."""
    return {"env_vars": {KEY: os.environ[KEY]}} if os.environ.get(KEY) else {}


def _application(model: FleetModel, fleet: FleetFile, host: str) -> Any:
    """The application of Ray Serve that keeps the servers of one model."""
    from ray import serve

    deployment = serve.deployment(ServerReplica).options(
        name=model.name,
        num_replicas=model.replicas,
        ray_actor_options={
            "num_cpus": model.cpus,
            "num_gpus": model.gpus,
            "resources": dict(model.resources),
            "runtime_env": actor_environment(),
        },
        health_check_period_s=_HEALTH_PERIOD_S,
        graceful_shutdown_timeout_s=fleet.drain_s + 20,
        graceful_shutdown_wait_loop_s=0.1,
    )
    return deployment.bind(model.model, list(model.serve), host, fleet.drain_s)
