"""Amazon ECS: task definitions and services for the AWS CLI.

Every server is a service with its name in Service Connect, because the gateway has to tell them
apart. What only an account knows is `${NAME}`, which `deploy.sh` fills in.
"""

from __future__ import annotations

import json
from typing import Any

from ridgeline.errors import BadInput
from ridgeline.operate.deploy.plan import (
    GATEWAY_PORT,
    SERVER_IMAGES,
    SERVER_PORT,
    STOP_S,
    USER,
    DeploymentPlan,
    ServerImage,
)

VARIABLES = {
    "AWS_REGION": "the region",
    "CLUSTER": "the ECS cluster",
    "NAMESPACE": "a Cloud Map namespace for Service Connect",
    "SUBNET_1": "a subnet with a route to the images and to the model",
    "SUBNET_2": "another one",
    "SECURITY_GROUP": "a security group that admits ports 8000 and 8080 from itself",
    "EXECUTION_ROLE_ARN": "a role that may read the images, the secret and write logs",
    "KEY_SECRET_ARN": "a Secrets Manager secret: the key that clients send",
    "TARGET_GROUP_ARN": "a target group of type ip for the gateway, health check /ready",
}
_FARGATE_MEMORY_GIB = {1: (2, 8), 2: (4, 16), 4: (8, 30), 8: (16, 60), 16: (32, 120)}
"""vCPUs of a Fargate task: the least and the most memory."""


def render_ecs(plan: DeploymentPlan) -> dict[str, str]:
    """JSON inputs of `aws ecs`, and `deploy.sh`. Raises BadInput for a size Fargate lacks."""
    names = [f"server-{number}" for number in range(1, plan.num_replicas + 1)]
    objects = {
        "server-task.json": _server_task(plan),
        "gateway-task.json": _gateway_task(plan, names),
        **{f"{name}.json": _server_service(plan, name) for name in names},
        "gateway.json": _gateway_service(plan),
    }
    texts = {name: json.dumps(value, indent=2) + "\n" for name, value in objects.items()}
    return {**texts, "deploy.sh": _script(plan, names)}


def _server_task(plan: DeploymentPlan) -> dict[str, Any]:
    profile = plan.profile
    container: dict[str, Any] = {
        **_container("server", plan.server_image, SERVER_PORT, profile),
        "command": plan.server_arguments,
        "environment": [{"name": name, "value": path} for name, path in profile.cache.items()],
    }
    if profile.entry_point:
        container["entryPoint"] = list(profile.entry_point)
    if plan.gpus:
        container["resourceRequirements"] = [{"type": "GPU", "value": str(plan.gpus)}]
        container["linuxParameters"]["sharedMemorySize"] = 8192
        size = {"cpu": str(plan.cpus * 1024), "memory": str(plan.memory_gib * 1024)}
    else:
        cpus, memory_gib = _fargate_size(plan.cpus, plan.memory_gib)
        size = {"cpu": str(cpus * 1024), "memory": str(memory_gib * 1024)}
    return _task(plan, "server", container, size)


def _gateway_task(plan: DeploymentPlan, servers: list[str]) -> dict[str, Any]:
    backends = [f"http://{name}:{SERVER_PORT}" for name in servers]
    container = {
        **_container("gateway", plan.route_image, GATEWAY_PORT, SERVER_IMAGES["ridgeline"]),
        "command": plan.route_arguments(backends),
        "user": str(USER),
    }
    return _task(plan, "gateway", container, {"cpu": "1024", "memory": "2048"}, on_gpu=False)


def _task(
    plan: DeploymentPlan,
    component: str,
    container: dict[str, Any],
    size: dict[str, str],
    *,
    on_gpu: bool = True,
) -> dict[str, Any]:
    is_fargate = not (plan.gpus and on_gpu)
    container["logConfiguration"]["options"]["awslogs-group"] = f"/ecs/{plan.name}"
    return {
        "family": f"{plan.name}-{component}",
        "networkMode": "awsvpc",
        "requiresCompatibilities": ["FARGATE" if is_fargate else "EC2"],
        **size,
        **({"ephemeralStorage": {"sizeInGiB": 100}} if is_fargate else {}),
        "runtimePlatform": {"cpuArchitecture": "X86_64", "operatingSystemFamily": "LINUX"},
        "executionRoleArn": "${EXECUTION_ROLE_ARN}",
        "containerDefinitions": [container],
    }


def _container(name: str, image: str, port: int, profile: ServerImage) -> dict[str, Any]:
    user = {} if profile.user is None else {"user": str(profile.user)}
    log_options = {
        "awslogs-region": "${AWS_REGION}",
        "awslogs-stream-prefix": name,
        "awslogs-create-group": "true",
    }
    return {
        "name": name,
        "image": image,
        "essential": True,
        **user,
        # Without an application protocol: Service Connect would end an HTTP request after 15 s.
        "portMappings": [{"name": "http", "containerPort": port, "protocol": "tcp"}],
        "secrets": [{"name": profile.key_variable, "valueFrom": "${KEY_SECRET_ARN}"}],
        "healthCheck": {
            "command": ["CMD", *profile.health_command(port)],
            "interval": 30,
            "timeout": 5,
            "retries": 10,
            "startPeriod": 300,
        },
        "stopTimeout": STOP_S,
        "linuxParameters": {"initProcessEnabled": True, "capabilities": {"drop": ["ALL"]}},
        "logConfiguration": {"logDriver": "awslogs", "options": log_options},
    }


def _service(plan: DeploymentPlan, name: str, component: str, launch: str) -> dict[str, Any]:
    network = {
        "subnets": ["${SUBNET_1}", "${SUBNET_2}"],
        "securityGroups": ["${SECURITY_GROUP}"],
        "assignPublicIp": "DISABLED",
    }
    return {
        "cluster": "${CLUSTER}",
        "serviceName": f"{plan.name}-{name}",
        "taskDefinition": f"{plan.name}-{component}",
        "desiredCount": 1,
        "launchType": launch,
        "networkConfiguration": {"awsvpcConfiguration": network},
        "deploymentConfiguration": {
            "minimumHealthyPercent": 100,
            "maximumPercent": 200,
            "deploymentCircuitBreaker": {"enable": True, "rollback": True},
        },
        "serviceConnectConfiguration": {"enabled": True, "namespace": "${NAMESPACE}"},
    }


def _server_service(plan: DeploymentPlan, name: str) -> dict[str, Any]:
    service = _service(plan, name, "server", "EC2" if plan.gpus else "FARGATE")
    alias = {"port": SERVER_PORT, "dnsName": name}
    service["serviceConnectConfiguration"]["services"] = [
        {"portName": "http", "discoveryName": f"{plan.name}-{name}", "clientAliases": [alias]}
    ]
    return service


def _gateway_service(plan: DeploymentPlan) -> dict[str, Any]:
    target = {
        "targetGroupArn": "${TARGET_GROUP_ARN}",
        "containerName": "gateway",
        "containerPort": GATEWAY_PORT,
    }
    return {
        **_service(plan, "gateway", "gateway", "FARGATE"),
        "loadBalancers": [target],
        "healthCheckGracePeriodSeconds": 60,
    }


def _fargate_size(cpus: int, memory_gib: int) -> tuple[int, int]:
    """The smallest Fargate task with that many vCPUs and GiB. Raises BadInput."""
    for size, (least, most) in _FARGATE_MEMORY_GIB.items():
        if size >= cpus and most >= memory_gib:
            step = {8: 4, 16: 8}.get(size, 1)
            above = max(0, memory_gib - least)
            return size, least + -(-above // step) * step
    raise BadInput(
        "Fargate has no task of this size",
        value=f"{cpus} vCPUs, {memory_gib} GiB",
        limit="16 vCPUs, 120 GiB",
        fix="lower --cpus and --memory-gib",
    )


def _script(plan: DeploymentPlan, names: list[str]) -> str:
    lines = [
        "#!/bin/sh",
        "# Registers the task definitions and creates the services; a service that is there is",
        "# updated, one after another. Needs the AWS CLI, envsubst (gettext) and these variables:",
        *(f"#   {name}: {meaning}" for name, meaning in VARIABLES.items()),
        "set -eu",
        'cd "$(dirname "$0")"',
        "for name in " + " ".join(VARIABLES) + "; do",
        '  eval "[ -n \\"\\${$name:-}\\" ]" || { echo "set $name" >&2; exit 2; }',
        "done",
        "register() {",
        '  aws ecs register-task-definition --cli-input-json "$(envsubst <"$1")" >/dev/null',
        "}",
        "apply() {  # FILE SERVICE TASK",
        '  if [ "$(aws ecs describe-services --cluster "$CLUSTER" --services "$2" \\',
        "    --query 'services[0].status' --output text)\" = ACTIVE ]; then",
        '    aws ecs update-service --cluster "$CLUSTER" --service "$2" --task-definition "$3" '
        ">/dev/null",
        "  else",
        '    aws ecs create-service --cli-input-json "$(envsubst <"$1")" >/dev/null',
        "  fi",
        '  aws ecs wait services-stable --cluster "$CLUSTER" --services "$2"',
        "}",
        "register server-task.json",
        "register gateway-task.json",
        *(f"apply {name}.json {plan.name}-{name} {plan.name}-server" for name in names),
        # Last: Service Connect names only what existed when a client started.
        f"apply gateway.json {plan.name}-gateway {plan.name}-gateway",
    ]
    return "\n".join(lines) + "\n"
