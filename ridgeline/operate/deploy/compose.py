"""A file for `docker compose`."""

from __future__ import annotations

from typing import Any

from ridgeline.operate.deploy.plan import (
    CACHE,
    GATEWAY_PORT,
    SERVER_IMAGES,
    SERVER_PORT,
    STOP_S,
    DeploymentPlan,
)
from ridgeline.operate.yaml_text import to_yaml

_KEY = "${RIDGELINE_API_KEY:?set a key for the clients}"


def render_compose(plan: DeploymentPlan) -> dict[str, str]:
    """`compose.yaml`: every server, and the gateway on port 8080 of the host."""
    names = [f"server-{number}" for number in range(1, plan.num_replicas + 1)]
    gateway = {
        "image": plan.route_image,
        "command": plan.route_arguments([f"http://{name}:{SERVER_PORT}" for name in names]),
        "restart": "always",
        "ports": [f"{GATEWAY_PORT}:{GATEWAY_PORT}"],
        "environment": {"RIDGELINE_API_KEY": _KEY},
        "healthcheck": _health(SERVER_IMAGES["ridgeline"].health_command(GATEWAY_PORT)),
        **_confined(),
    }
    services: dict[str, Any] = {
        name: _server(plan, number) for number, name in enumerate(names)
    } | {"gateway": gateway}
    return {"compose.yaml": to_yaml({"services": services, "volumes": {"cache": {}}})}


def _server(plan: DeploymentPlan, number: int) -> dict[str, Any]:
    profile = plan.profile
    server: dict[str, Any] = {"image": plan.server_image}
    if profile.entry_point:
        server["entrypoint"] = list(profile.entry_point)
    server |= {
        "command": plan.server_arguments,
        "restart": "always",
        "stop_grace_period": f"{STOP_S}s",
        "cpus": plan.cpus,
        "mem_limit": f"{plan.memory_gib}g",
        "volumes": [f"cache:{CACHE}"],
        "environment": {**profile.cache, profile.key_variable: _KEY},
        "healthcheck": _health(profile.health_command(SERVER_PORT)),
        **_confined(),
    }
    if plan.gpus:
        devices = [str(number * plan.gpus + gpu) for gpu in range(plan.gpus)]
        gpu = {"driver": "nvidia", "device_ids": devices, "capabilities": ["gpu"]}
        server["deploy"] = {"resources": {"reservations": {"devices": [gpu]}}}
        server["ipc"] = "host"  # processes of one server share memory beyond Docker's 64 MB
    return server


def _health(command: list[str]) -> dict[str, Any]:
    return {
        "test": ["CMD", *command],
        "interval": "15s",
        "timeout": "5s",
        "retries": 4,
        "start_period": "30m",
    }


def _confined() -> dict[str, Any]:
    return {"cap_drop": ["ALL"], "security_opt": ["no-new-privileges:true"]}
