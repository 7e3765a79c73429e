"""Kubernetes objects of a deployment: servers, the gateway, their Services, a disruption budget.

`ClusterValues` may hold expressions of a template, so that a chart is made of the same objects as
the manifests of a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ridgeline.operate.deploy.plan import (
    CACHE,
    GATEWAY_PORT,
    LEAVE_S,
    SERVER_PORT,
    STOP_S,
    USER,
    DeploymentPlan,
    ServerImage,
)
from ridgeline.operate.yaml_text import TemplateLines, Unquoted

GATEWAY_RESOURCES = {"requests": {"cpu": "1", "memory": "512Mi"}, "limits": {"memory": "1Gi"}}


class ClusterValues(msgspec.Struct, frozen=True, kw_only=True):
    """What differs from one deployment to another.

    `name` precedes the name of every object; `key_secret` is the Secret whose `key` clients send.
    `count`: the number of servers in the StatefulSet, None where an autoscaler sets it.
    `max_replicas` None: there is no autoscaler. `claims`: for volumes that outlive a server;
    `emptied`: those that do not.
    """

    profile: ServerImage
    name: str
    server_image: str
    gateway_image: str
    server_arguments: Sequence[str]
    gateway_arguments: Sequence[str]
    count: int | TemplateLines | None
    num_replicas: int | Unquoted
    max_replicas: int | Unquoted | None
    resources: dict[str, Any] | Unquoted
    claims: list[dict[str, Any]] | TemplateLines | None
    emptied: list[dict[str, Any] | TemplateLines]
    key_secret: str
    app: str
    namespace: str

    @staticmethod
    def of(plan: DeploymentPlan) -> ClusterValues:
        host = f"{plan.name}-server"
        backends = [f"http://{host}-{i}.{host}:{SERVER_PORT}" for i in range(plan.num_replicas)]
        is_fixed = plan.max_replicas is None
        route = plan.route_arguments
        return ClusterValues(
            profile=plan.profile,
            name=plan.name,
            server_image=plan.server_image,
            gateway_image=plan.route_image,
            server_arguments=plan.server_arguments,
            gateway_arguments=route(backends)
            if is_fixed
            else route([f"http://{host}:{SERVER_PORT}"], "--backend-dns"),
            count=plan.num_replicas if is_fixed else None,
            num_replicas=plan.num_replicas,
            max_replicas=plan.max_replicas,
            resources=server_resources(plan),
            claims=None if plan.cache_gib is None else [cache_claim(plan.cache_gib)],
            emptied=[EMPTY_CACHE] if plan.cache_gib is None else [],
            key_secret=f"{plan.name}-key",
            app=plan.name,
            namespace=plan.namespace or "default",
        )


EMPTY_CACHE: dict[str, Any] = {"name": "cache", "emptyDir": {}}


def cache_claim(gib: int | Unquoted) -> dict[str, Any]:
    """The claim of each server for a volume that keeps its models."""
    size = Unquoted(f'"{gib}Gi"')
    return {
        "metadata": {"name": "cache"},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": size}},
        },
    }


def server_resources(plan: DeploymentPlan) -> dict[str, Any]:
    """Requests and limits of one server."""
    limits = {"memory": f"{plan.memory_gib}Gi"}
    if plan.gpus:
        limits["nvidia.com/gpu"] = str(plan.gpus)
    requests = {"cpu": str(plan.cpus), "memory": f"{plan.memory_gib}Gi"}
    return {"requests": requests, "limits": limits}


def servers(values: ClusterValues) -> dict[str, Any]:
    """A StatefulSet: each server has a stable name, which the gateway knows."""
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": _metadata(values, "server"),
        "spec": {
            "serviceName": f"{values.name}-server",
            **({} if values.count is None else {"replicas": values.count}),
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": _labels(values, "server")},
            "template": {
                "metadata": {"labels": _labels(values, "server")},
                "spec": _server_pod(values),
            },
            **({} if values.claims is None else {"volumeClaimTemplates": values.claims}),
        },
    }


def _server_pod(values: ClusterValues) -> dict[str, Any]:
    profile = values.profile
    environment = [{"name": name, "value": path} for name, path in profile.cache.items()]
    container: dict[str, Any] = {
        "name": "server",
        "image": values.server_image,
        **({"command": list(profile.entry_point)} if profile.entry_point else {}),
        "args": list(values.server_arguments),
        "env": [*environment, _key(values, profile.key_variable)],
        "ports": [{"name": "http", "containerPort": SERVER_PORT}],
        "startupProbe": _probe(profile.ready_path, 5, 360),
        "readinessProbe": _probe(profile.ready_path, 2, 1),
        "livenessProbe": _probe(profile.health_path, 15, 4),
        "resources": values.resources,
        "securityContext": _security(),
        "volumeMounts": [
            {"name": "cache", "mountPath": CACHE},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    user = profile.user
    identity = {} if user is None else {"runAsNonRoot": True, "runAsUser": user, "fsGroup": user}
    return {
        "terminationGracePeriodSeconds": STOP_S,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # variables that look like a server's own
        **({"securityContext": identity} if identity else {}),
        "topologySpreadConstraints": [_one_per_machine(values)],
        "containers": [container],
        "volumes": [*values.emptied, {"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }


def _one_per_machine(values: ClusterValues) -> dict[str, Any]:
    """Servers on as many machines as there are: one that fails takes few of them along."""
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": _labels(values, "server")},
    }


def headless_service(values: ClusterValues) -> dict[str, Any]:
    """Names for the servers, also while they start."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(values, "server"),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": _labels(values, "server"),
            "ports": [{"name": "http", "port": SERVER_PORT}],
        },
    }


def gateway(values: ClusterValues) -> dict[str, Any]:
    """The gateway's Deployment."""
    container = {
        "name": "gateway",
        "image": values.gateway_image,
        "args": list(values.gateway_arguments),
        "env": [_key(values, "RIDGELINE_API_KEY")],
        "ports": [{"name": "http", "containerPort": GATEWAY_PORT}],
        "readinessProbe": _probe("/ready", 2, 1),
        "livenessProbe": _probe("/health", 15, 4),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(LEAVE_S)]}}},
        "resources": GATEWAY_RESOURCES,
        "securityContext": _security(),
    }
    pod = {
        "terminationGracePeriodSeconds": STOP_S,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {"runAsNonRoot": True, "runAsUser": USER},
        "containers": [container],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(values, "gateway"),
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": _labels(values, "gateway")},
            "template": {"metadata": {"labels": _labels(values, "gateway")}, "spec": pod},
        },
    }


def gateway_service(values: ClusterValues) -> dict[str, Any]:
    """The address that clients use."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(values, "gateway"),
        "spec": {
            "selector": _labels(values, "gateway"),
            "ports": [{"name": "http", "port": 80, "targetPort": "http"}],
        },
    }


def disruption_budget(values: ClusterValues) -> dict[str, Any]:
    """One server at a time may be evicted."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _metadata(values, "server"),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": _labels(values, "server")}},
    }


def autoscaler(values: ClusterValues) -> list[dict[str, Any]]:
    """For KEDA: as many servers as the gateway wants. While it does not answer, nothing changes."""
    name = f"{values.name}-server"
    gateway = f"http://{values.name}-gateway.{values.namespace}.svc"
    secret = {"parameter": "token", "name": values.key_secret, "key": "key"}
    return [
        {
            "apiVersion": "keda.sh/v1alpha1",
            "kind": "TriggerAuthentication",
            "metadata": _metadata(values, "gateway"),
            "spec": {"secretTargetRef": [secret]},
        },
        {
            "apiVersion": "keda.sh/v1alpha1",
            "kind": "ScaledObject",
            "metadata": _metadata(values, "server"),
            "spec": {
                "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": name},
                "minReplicaCount": values.num_replicas,
                "maxReplicaCount": values.max_replicas,
                "pollingInterval": 5,
                "triggers": [
                    {
                        "type": "metrics-api",
                        "metadata": {
                            "url": f"{gateway}/ridgeline/fleet",
                            "valueLocation": "wanted_replicas",
                            "targetValue": "1",
                            "authMode": "bearer",
                        },
                        "authenticationRef": {"name": f"{values.name}-gateway"},
                    }
                ],
            },
        },
    ]


def _key(values: ClusterValues, variable: str) -> dict[str, Any]:
    source = {"secretKeyRef": {"name": values.key_secret, "key": "key"}}
    return {"name": variable, "valueFrom": source}


def _labels(values: ClusterValues, component: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": values.app,
        "app.kubernetes.io/instance": values.name,
        "app.kubernetes.io/component": component,
    }


def _metadata(values: ClusterValues, component: str) -> dict[str, Any]:
    return {"name": f"{values.name}-{component}", "labels": _labels(values, component)}


def _probe(path: str, period_s: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _security() -> dict[str, Any]:
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
