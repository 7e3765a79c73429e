"""Amazon SageMaker: a model, an endpoint configuration and an endpoint, for the AWS CLI.

SageMaker starts a container as `IMAGE serve`, without further arguments: what a server has to know
is in its environment. It probes `/ping` and calls `/invocations` on port 8080; access is by IAM, so
that the server needs no key. SageMaker distributes requests itself, without a gateway.
"""

from __future__ import annotations

import json
from typing import Any

from ridgeline.errors import BadInput
from ridgeline.operate.deploy.plan import DRAIN_S, DeploymentPlan

PORT = 8080
_INSTANCE_TYPES = {"ridgeline": "ml.c7i.4xlarge", "vllm": "ml.g6.2xlarge"}
_IMAGE = "ACCOUNT.dkr.ecr.REGION.amazonaws.com/REPOSITORY:TAG"
VARIABLES = {
    "AWS_REGION": "the region",
    "EXECUTION_ROLE_ARN": "a role that SageMaker may assume, and that may read the image",
}


def render_sagemaker(plan: DeploymentPlan) -> dict[str, str]:
    """JSON inputs of `aws sagemaker`, and `deploy.sh`. Raises BadInput without an image."""
    objects = {
        "model.json": {
            "ModelName": plan.name,
            "PrimaryContainer": {
                "Image": plan.require_image("sagemaker", _IMAGE),
                "Environment": container_environment(plan),
            },
            "ExecutionRoleArn": "${EXECUTION_ROLE_ARN}",
        },
        "endpoint-config.json": {
            "EndpointConfigName": plan.name,
            "ProductionVariants": [_variant(plan)],
        },
        "endpoint.json": {"EndpointName": plan.name, "EndpointConfigName": plan.name},
    }
    texts = {name: json.dumps(value, indent=2) + "\n" for name, value in objects.items()}
    return {**texts, "deploy.sh": _script(plan)}


def _variant(plan: DeploymentPlan) -> dict[str, Any]:
    return {
        "VariantName": "AllTraffic",
        "ModelName": plan.name,
        "InitialInstanceCount": plan.num_replicas,
        "InstanceType": plan.instance_type or _INSTANCE_TYPES[plan.server],
        "ContainerStartupHealthCheckTimeoutInSeconds": 1800,
        "RoutingConfig": {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"},
    }


def container_environment(plan: DeploymentPlan) -> dict[str, str]:
    """The environment of a server that gets no arguments. Raises BadInput for a bare word."""
    if plan.server == "vllm":  # its image for SageMaker sets host and port
        return {"SM_VLLM_MODEL": plan.model, **_as_variables(plan.arguments, "SM_VLLM_")}
    slo = {"RIDGELINE_SLO_CLASSES": plan.slo_classes} if plan.slo_classes else {}
    return {
        "RIDGELINE_MODEL": plan.model,
        "RIDGELINE_HOST": "0.0.0.0",
        "RIDGELINE_PORT": str(PORT),
        "RIDGELINE_INSECURE": "true",
        "RIDGELINE_ALLOWED_HOSTS": "*",
        "RIDGELINE_SHUTDOWN_TIMEOUT_S": str(DRAIN_S),
        **slo,
        **_as_variables(plan.arguments, "RIDGELINE_"),
    }


def _as_variables(arguments: tuple[str, ...], prefix: str) -> dict[str, str]:
    """`--max-num-seqs 8 --enforce-eager` as variables."""
    variables: dict[str, str] = {}
    name = ""
    for word in arguments:
        if word.startswith("--"):
            flag, _, value = word[2:].partition("=")
            name = prefix + flag.upper().replace("-", "_")
            variables[name] = value or "true"
            name = "" if value else name
        elif name:
            variables[name], name = word, ""
        else:
            raise BadInput(
                "--for sagemaker passes options as variables, and this word belongs to none",
                value=word,
                fix="write --serve-args as '--option value'",
            )
    return variables


def _script(plan: DeploymentPlan) -> str:
    return "\n".join(
        [
            "#!/bin/sh",
            "# Creates the model, its configuration and the endpoint, and waits until it serves.",
            "# Needs the AWS CLI, envsubst (gettext) and these variables:",
            *(f"#   {name}: {meaning}" for name, meaning in VARIABLES.items()),
            "set -eu",
            'cd "$(dirname "$0")"',
            ': "${AWS_REGION:?}" "${EXECUTION_ROLE_ARN:?}"',
            'aws sagemaker create-model --cli-input-json "$(envsubst <model.json)"',
            "aws sagemaker create-endpoint-config --cli-input-json file://endpoint-config.json",
            "aws sagemaker create-endpoint --cli-input-json file://endpoint.json",
            f"aws sagemaker wait endpoint-in-service --endpoint-name {plan.name}",
            "",
        ]
    )
