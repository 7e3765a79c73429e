"""An image with the model's command line, and a script that starts it and the gateway by Docker."""

from __future__ import annotations

import json
import shlex

from ridgeline.operate.deploy.plan import (
    CACHE,
    GATEWAY_PORT,
    SERVER_PORT,
    STOP_S,
    DeploymentPlan,
)


def render_docker(plan: DeploymentPlan) -> dict[str, str]:
    """`Dockerfile` and `run.sh`, which builds it and starts every container."""
    return {"Dockerfile": _dockerfile(plan), "run.sh": _script(plan)}


def _dockerfile(plan: DeploymentPlan) -> str:
    profile = plan.profile
    lines = [f"FROM {plan.server_image}"]
    lines += [f"ENV {name}={path}" for name, path in profile.cache.items()]
    lines += [
        f"EXPOSE {SERVER_PORT}",
        "HEALTHCHECK --interval=15s --timeout=5s --start-period=30m --retries=4 \\",
        f"  CMD {json.dumps(profile.health_command(SERVER_PORT))}",
    ]
    if profile.entry_point:
        lines.append(f"ENTRYPOINT {json.dumps(list(profile.entry_point))}")
    lines.append(f"CMD {json.dumps(plan.server_arguments)}")
    return "\n".join(lines) + "\n"


def _script(plan: DeploymentPlan) -> str:
    names = [f"{plan.name}-server-{number}" for number in range(1, plan.num_replicas + 1)]
    route = plan.route_arguments([f"http://{name}:{SERVER_PORT}" for name in names])
    image = f"{plan.name}-server"
    lines = [
        "#!/bin/sh",
        "# Builds the image, and starts the servers and the gateway. Clients need the key in",
        "# RIDGELINE_API_KEY. Started again, it replaces one server at a time.",
        "set -eu",
        'cd "$(dirname "$0")"',
        ': "${RIDGELINE_API_KEY:?set a key for the clients}"',
        f"docker build --tag {image} .",
        f"docker network inspect {plan.name} >/dev/null 2>&1 || docker network create {plan.name}",
        "",
        "replace() {  # NAME OPTION...",
        "  name=$1; shift",
        f'  if docker inspect "$name" >/dev/null 2>&1; then docker stop --time {STOP_S} "$name"; '
        'docker rm "$name"; fi',
        f'  docker run --detach --name "$name" --network {plan.name} --restart always \\',
        f'    --cap-drop ALL --security-opt no-new-privileges --stop-timeout {STOP_S} "$@"',
        "}",
        "",
        "await() {  # NAME: until its health check succeeds",
        '  until [ "$(docker inspect --format \'{{.State.Health.Status}}\' "$1")" = healthy ]; '
        "do sleep 1; done",
        "}",
        "",
    ]
    for number, name in enumerate(names):
        options = [
            *("--cpus", str(plan.cpus), "--memory", f"{plan.memory_gib}g"),
            *("--volume", f"{plan.name}-cache:{CACHE}"),
            *("--env", f"{plan.profile.key_variable}=$RIDGELINE_API_KEY"),
        ]
        if plan.gpus:
            devices = ",".join(str(number * plan.gpus + gpu) for gpu in range(plan.gpus))
            options += ["--gpus", f'"device={devices}"', "--ipc", "host"]
        lines += [f"replace {name} {_quoted(options)} {image}", f"await {name}"]
    options = [
        *("--publish", f"{GATEWAY_PORT}:{GATEWAY_PORT}", "--env", "RIDGELINE_API_KEY"),
        *("--env", f"RIDGELINE_PORT={GATEWAY_PORT}"),  # where the image's health check looks
    ]
    lines.append(
        f"replace {plan.name}-gateway {_quoted(options)} {shlex.quote(plan.route_image)} \\"
    )
    lines.append(f"  {shlex.join(route)}")
    return "\n".join(lines) + "\n"


def _quoted(words: list[str]) -> str:
    """Words for a shell; `$NAME` is expanded."""
    return " ".join(f'"{word}"' if "$" in word else shlex.quote(word) for word in words)
