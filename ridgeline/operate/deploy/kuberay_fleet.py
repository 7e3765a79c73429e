"""A RayJob for the KubeRay operator that starts `ridgeline fleet` on a Ray cluster.

    RayJob ─▶ head: the job `ridgeline fleet up`, the gateway     ◀── Service, for clients
           └▶ workers: one server each, placed and restarted by Ray

The job ends once the fleet runs, and the cluster stays until the RayJob is deleted. The gateway
runs on the head, so that a worker may fail without it.
"""

from __future__ import annotations

import json
from typing import Any

from ridgeline.operate.deploy.kubernetes_objects import server_resources
from ridgeline.operate.deploy.plan import (
    CACHE,
    DRAIN_S,
    GATEWAY_PORT,
    STOP_S,
    USER,
    DeploymentPlan,
)
from ridgeline.operate.yaml_text import literal_block, to_yaml

_FOLDER = "/etc/ridgeline"
_HEAD = {"requests": {"cpu": "2", "memory": "4Gi"}, "limits": {"memory": "4Gi"}}


def render_kuberay_fleet(plan: DeploymentPlan, image: str, ray_version: str) -> dict[str, str]:
    """`rayjob.yaml`: the fleet's file, the RayJob and the gateway's Service. `image`: Ridgeline's,
    with the extra `fleet`."""
    objects = (_config(plan), _job(plan, image, ray_version), _service(plan))
    return {"rayjob.yaml": "---\n".join(map(to_yaml, objects))}


def fleet_toml(plan: DeploymentPlan) -> str:
    """The file of `ridgeline fleet up`."""
    slo = ["--slo-classes", plan.slo_classes] if plan.slo_classes else []
    device = ["--device", "cuda"] if plan.gpus else []
    lines = [
        'host = "0.0.0.0"',
        f"port = {GATEWAY_PORT}",
        f"drain_s = {DRAIN_S}",
        f"route = {json.dumps(slo)}",
        "",
        "[[models]]",
        f"model = {json.dumps(plan.model)}",
        f"replicas = {plan.num_replicas}",
        f"cpus = {plan.cpus}",
        f"gpus = {plan.gpus}",
        f"serve = {json.dumps([*slo, *device, *plan.arguments])}",
    ]
    return "\n".join(lines) + "\n"


def _config(plan: DeploymentPlan) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(plan, "fleet"),
        "data": {"fleet.toml": literal_block(fleet_toml(plan))},
    }


def _job(plan: DeploymentPlan, image: str, ray_version: str) -> dict[str, Any]:
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": _metadata(plan, "fleet"),
        "spec": {
            "entrypoint": f"ridgeline fleet up {_FOLDER}/fleet.toml",
            "shutdownAfterJobFinishes": False,
            "rayClusterSpec": _cluster(plan, image, ray_version),
        },
    }


def _service(plan: DeploymentPlan) -> dict[str, Any]:
    """The address that clients use."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(plan, "gateway"),
        "spec": {
            "selector": _labels(plan, "gateway"),
            "ports": [{"name": "http", "port": 80, "targetPort": GATEWAY_PORT}],
        },
    }


def _cluster(plan: DeploymentPlan, image: str, ray_version: str) -> dict[str, Any]:
    ports = [(6379, "gcs-server"), (8265, "dashboard"), (10001, "client"), (GATEWAY_PORT, "http")]
    head = {
        "name": "ray-head",
        "ports": [{"containerPort": port, "name": name} for port, name in ports],
        "resources": _HEAD,
    }
    worker = {"name": "ray-worker", "resources": server_resources(plan)}
    size = {"num-cpus": str(plan.cpus), "num-gpus": str(plan.gpus)}
    return {
        "rayVersion": ray_version,
        "headGroupSpec": {
            "rayStartParams": {"dashboard-host": "0.0.0.0", "num-cpus": "0", "num-gpus": "0"},
            "template": _pod(plan, image, "gateway", head),
        },
        "workerGroupSpecs": [
            {
                "groupName": "servers",
                "replicas": plan.num_replicas,
                "minReplicas": plan.num_replicas,
                "maxReplicas": plan.num_replicas,
                "rayStartParams": size,
                "template": _pod(plan, image, "server", worker),
            }
        ],
    }


def _pod(
    plan: DeploymentPlan, image: str, component: str, container: dict[str, Any]
) -> dict[str, Any]:
    key = {"secretKeyRef": {"name": f"{plan.name}-key", "key": "key"}}
    environment = [{"name": name, "value": path} for name, path in plan.profile.cache.items()]
    environment += [{"name": "HOME", "value": CACHE}]
    whole = {
        **container,
        "image": image,
        "env": [*environment, {"name": "RIDGELINE_API_KEY", "valueFrom": key}],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": [
            {"name": "cache", "mountPath": CACHE},
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "fleet", "mountPath": _FOLDER, "readOnly": True},
        ],
    }
    return {
        "metadata": {"labels": _labels(plan, component)},
        "spec": {
            "terminationGracePeriodSeconds": STOP_S,
            "automountServiceAccountToken": False,
            "securityContext": {"runAsNonRoot": True, "runAsUser": USER, "fsGroup": USER},
            "containers": [whole],
            "volumes": [
                {"name": "cache", "emptyDir": {}},
                {"name": "shm", "emptyDir": {"medium": "Memory"}},
                {"name": "fleet", "configMap": {"name": f"{plan.name}-fleet"}},
            ],
        },
    }


def _metadata(plan: DeploymentPlan, component: str) -> dict[str, Any]:
    return {"name": f"{plan.name}-{component}", "labels": _labels(plan, component)}


def _labels(plan: DeploymentPlan, component: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "ridgeline",
        "app.kubernetes.io/instance": plan.name,
        "app.kubernetes.io/component": component,
    }
