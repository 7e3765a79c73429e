"""Deployment files: servers and the gateway before them, for Compose and for Kubernetes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from ridgeline.operate.yaml_text import to_yaml

Platform = Literal["compose", "kustomize"]
_SERVER_PORT, _GATEWAY_PORT = 8000, 8080
_DRAIN_S = 60
_USER = 10001
_COMPOSE_KEY = {"RIDGELINE_API_KEY": "${RIDGELINE_API_KEY:?set a key for the clients}"}


class DeploymentPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to deploy. `arguments`: further flags of `ridgeline serve`."""

    model: str
    image: str
    name: str = "ridgeline"
    num_replicas: int = 2
    cpus: int = 4
    memory_gib: int = 8
    slo_classes: str = ""
    arguments: tuple[str, ...] = ()

    @property
    def serve_arguments(self) -> list[str]:
        """The server's command line; its key is in RIDGELINE_API_KEY."""
        slo = ["--slo-classes", self.slo_classes] if self.slo_classes else []
        own = ["--host", "0.0.0.0", "--shutdown-timeout-s", str(_DRAIN_S)]
        return ["serve", self.model, *own, *slo, *self.arguments]

    def route_arguments(self, backends: list[str]) -> list[str]:
        """The gateway's command line. Its key is the servers': it passes the client's on."""
        slo = ["--slo-classes", self.slo_classes] if self.slo_classes else []
        flags = [word for url in backends for word in ("--backend", url)]
        return ["route", "--host", "0.0.0.0", *flags, *slo]


def render_deployment(platform: Platform, plan: DeploymentPlan) -> dict[str, str]:
    """Files by their name."""
    return _RENDERERS[platform](plan)


def _compose(plan: DeploymentPlan) -> dict[str, str]:
    names = [f"server-{number}" for number in range(1, plan.num_replicas + 1)]
    server = {
        "image": plan.image,
        "command": plan.serve_arguments,
        "restart": "always",
        "stop_grace_period": f"{_DRAIN_S + 15}s",
        "cpus": plan.cpus,
        "mem_limit": f"{plan.memory_gib}g",
        "volumes": ["cache:/cache"],
        "environment": {"RIDGELINE_CACHE": "/cache", "HF_HOME": "/cache", **_COMPOSE_KEY},
    }
    gateway = {
        "image": plan.image,
        "command": plan.route_arguments([f"http://{name}:{_SERVER_PORT}" for name in names]),
        "restart": "always",
        "ports": [f"{_GATEWAY_PORT}:{_GATEWAY_PORT}"],
        "environment": _COMPOSE_KEY,
    }
    services: dict[str, Any] = dict.fromkeys(names, server) | {"gateway": gateway}
    return {"compose.yaml": to_yaml({"services": services, "volumes": {"cache": {}}})}


def _kustomize(plan: DeploymentPlan) -> dict[str, str]:
    files = {
        "servers.yaml": [_servers(plan), _headless(plan)],
        "gateway.yaml": [_gateway(plan), _gateway_service(plan)],
        "budget.yaml": [_budget(plan)],
    }
    texts = {name: "---\n".join(map(to_yaml, objects)) for name, objects in files.items()}
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": list(files),
    }
    return {"kustomization.yaml": to_yaml(kustomization), **texts}


def _servers(plan: DeploymentPlan) -> dict[str, Any]:
    """A StatefulSet: each server has a stable name, which the gateway knows."""
    container = {
        "name": "server",
        "image": plan.image,
        "args": plan.serve_arguments,
        "env": [{"name": "RIDGELINE_CACHE", "value": "/cache"}, _key(plan)],
        "ports": [{"name": "http", "containerPort": _SERVER_PORT}],
        "startupProbe": _probe("/ready", 5, 360),
        "readinessProbe": _probe("/ready", 2, 1),
        "livenessProbe": _probe("/health", 15, 4),
        "resources": {
            "requests": {"cpu": str(plan.cpus), "memory": f"{plan.memory_gib}Gi"},
            "limits": {"memory": f"{plan.memory_gib}Gi"},
        },
        "securityContext": _security(),
        "volumeMounts": [{"name": "cache", "mountPath": "/cache"}],
    }
    pod = {
        "terminationGracePeriodSeconds": _DRAIN_S + 15,
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "runAsUser": _USER, "fsGroup": _USER},
        "containers": [container],
        "volumes": [{"name": "cache", "emptyDir": {}}],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": _metadata(plan, "server"),
        "spec": {
            "serviceName": f"{plan.name}-server",
            "replicas": plan.num_replicas,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": _labels(plan, "server")},
            "template": {"metadata": {"labels": _labels(plan, "server")}, "spec": pod},
        },
    }


def _headless(plan: DeploymentPlan) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(plan, "server"),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": _labels(plan, "server"),
            "ports": [{"name": "http", "port": _SERVER_PORT}],
        },
    }


def _gateway(plan: DeploymentPlan) -> dict[str, Any]:
    host = f"{plan.name}-server"
    backends = [
        f"http://{host}-{number}.{host}:{_SERVER_PORT}" for number in range(plan.num_replicas)
    ]
    container = {
        "name": "gateway",
        "image": plan.image,
        "args": plan.route_arguments(backends),
        "env": [_key(plan)],
        "ports": [{"name": "http", "containerPort": _GATEWAY_PORT}],
        "readinessProbe": _probe("/ready", 2, 1),
        "livenessProbe": _probe("/health", 15, 4),
        "resources": {"requests": {"cpu": "1", "memory": "512Mi"}, "limits": {"memory": "1Gi"}},
        "securityContext": _security(),
    }
    pod = {
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "runAsUser": _USER},
        "containers": [container],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(plan, "gateway"),
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": _labels(plan, "gateway")},
            "template": {"metadata": {"labels": _labels(plan, "gateway")}, "spec": pod},
        },
    }


def _gateway_service(plan: DeploymentPlan) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(plan, "gateway"),
        "spec": {
            "selector": _labels(plan, "gateway"),
            "ports": [{"name": "http", "port": 80, "targetPort": "http"}],
        },
    }


def _budget(plan: DeploymentPlan) -> dict[str, Any]:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _metadata(plan, "server"),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": _labels(plan, "server")}},
    }


def _key(plan: DeploymentPlan) -> dict[str, Any]:
    source = {"secretKeyRef": {"name": f"{plan.name}-key", "key": "key"}}
    return {"name": "RIDGELINE_API_KEY", "valueFrom": source}


def _labels(plan: DeploymentPlan, component: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": plan.name, "app.kubernetes.io/component": component}


def _metadata(plan: DeploymentPlan, component: str) -> dict[str, Any]:
    return {"name": f"{plan.name}-{component}", "labels": _labels(plan, component)}


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


_RENDERERS: Mapping[Platform, Callable[[DeploymentPlan], dict[str, str]]] = MappingProxyType(
    {"compose": _compose, "kustomize": _kustomize}
)
