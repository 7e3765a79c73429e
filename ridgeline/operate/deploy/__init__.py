"""Deployment files: servers and the gateway before them, as files of a platform."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Literal

from ridgeline.errors import BadInput
from ridgeline.operate.deploy.plan import DeploymentPlan

Platform = Literal["docker", "compose", "kustomize", "helm", "kuberay", "ecs", "sagemaker"]

PLATFORMS: Mapping[Platform, str] = MappingProxyType(
    {
        "docker": "ridgeline.operate.deploy.docker:render_docker",
        "compose": "ridgeline.operate.deploy.compose:render_compose",
        "kustomize": "ridgeline.operate.deploy.kustomize:render_kustomize",
        "helm": "ridgeline.operate.deploy.helm:render_helm",
        "kuberay": "ridgeline.operate.deploy.kuberay:render_kuberay",
        "ecs": "ridgeline.operate.deploy.ecs:render_ecs",
        "sagemaker": "ridgeline.operate.deploy.sagemaker:render_sagemaker",
    }
)


_ONLY_ON: Mapping[str, tuple[Platform, ...]] = MappingProxyType(
    {
        "max_replicas": ("kustomize", "helm"),
        "cache_gib": ("kustomize", "helm"),
        "namespace": ("kustomize",),  # helm install --namespace sets it
    }
)


def check_platform(platform: Platform, plan: DeploymentPlan) -> None:
    """Raises BadInput for what this platform has not."""
    for name, platforms in _ONLY_ON.items():
        if getattr(plan, name) is not None and platform not in platforms:
            flag = "--" + name.replace("_", "-")
            raise BadInput(
                f"{flag} is for {' and '.join(platforms)} alone",
                value=platform,
                fix=f"leave {flag} out",
            )


def render_deployment(platform: Platform, plan: DeploymentPlan) -> dict[str, str]:
    """Files by their name. Raises BadInput for a plan that the platform cannot run."""
    check_platform(platform, plan)
    module, _, name = PLATFORMS[platform].partition(":")
    render: Callable[[DeploymentPlan], dict[str, str]] = getattr(import_module(module), name)
    return render(plan)
