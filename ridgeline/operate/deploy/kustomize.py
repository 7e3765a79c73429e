"""Manifests for `kubectl apply -k`."""

from __future__ import annotations

from ridgeline.operate.deploy import kubernetes_objects as objects
from ridgeline.operate.deploy.plan import DeploymentPlan
from ridgeline.operate.yaml_text import to_yaml


def render_kustomize(plan: DeploymentPlan) -> dict[str, str]:
    """`kustomization.yaml` and the manifests that it lists."""
    values = objects.ClusterValues.of(plan)
    texts = manifests(values)
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        **({"namespace": values.namespace} if plan.namespace or plan.max_replicas else {}),
        "resources": list(texts),
    }
    return {"kustomization.yaml": to_yaml(kustomization), **texts}


def manifests(values: objects.ClusterValues) -> dict[str, str]:
    """The objects of a deployment, by file."""
    files = {
        "servers.yaml": [objects.servers(values), objects.headless_service(values)],
        "gateway.yaml": [objects.gateway(values), objects.gateway_service(values)],
        "budget.yaml": [objects.disruption_budget(values)],
    }
    if values.max_replicas is not None:
        files["autoscaler.yaml"] = objects.autoscaler(values)
    return {name: "---\n".join(map(to_yaml, parts)) for name, parts in files.items()}
