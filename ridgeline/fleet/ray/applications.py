"""The applications of Ray Serve that keep a fleet's servers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from ridgeline.errors import CannotRun
from ridgeline.fleet.ray.fleet_file import FleetFile, FleetModel
from ridgeline.fleet.ray.server_actor import ServerReplica

PREFIX = "ridgeline-"  # of the fleet's applications in Ray Serve
KEY = "RIDGELINE_API_KEY"
_HEALTH_PERIOD_S = 1  # three failures in a row replace a server


def run_models(models: Sequence[FleetModel], fleet: FleetFile) -> None:
    """Make Ray Serve run as many servers of each model as its entry says, all at the same time.
    They may start after this returns. Raises CannotRun."""
    from ray import serve

    targets = [
        serve.RunTarget(_application(model, fleet), name=PREFIX + model.name, route_prefix=None)
        for model in models
    ]
    try:
        serve.run_many(targets, blocking=False, wait_for_applications_running=False)
    except RuntimeError as error:
        names = ", ".join(model.name for model in models)
        raise CannotRun(f"Ray Serve does not take {names}: {error}") from None


def failure_of(name: str) -> str:
    """Why an application failed: the words of its last server, else what Ray Serve says of it."""
    from ray import serve

    application = serve.status().applications.get(name)
    if application is None:
        return ""
    for deployment in application.deployments.values():
        if deployment.message:
            return cause_in(deployment.message)
    return str(application.message)


def cause_in(message: str) -> str:
    """What a server's actor raised, without the tracebacks that Ray puts around it."""
    return message.rpartition("RuntimeError: ")[2].strip()


def actor_environment() -> dict[str, Any]:
    """The runtime environment of the actors: the fleet's key, if there is one."""
    return {"env_vars": {KEY: os.environ[KEY]}} if os.environ.get(KEY) else {}


def _application(model: FleetModel, fleet: FleetFile) -> Any:
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
        max_surge_percent=1 if model.surge else 0,  # Ray rounds it up to one server
    )
    return deployment.bind(model.model, list(model.serve), fleet.drain_s)
