"""Objects for the KubeRay operator: Ray places, restarts and updates the servers."""

from __future__ import annotations

from typing import Any

from ridgeline.errors import BadInput
from ridgeline.operate.deploy.kuberay_fleet import render_kuberay_fleet
from ridgeline.operate.deploy.kubernetes_objects import server_resources
from ridgeline.operate.deploy.plan import CACHE, DeploymentPlan
from ridgeline.operate.yaml_text import literal_block, to_yaml

RAY_VERSION = "2.60.0"
_IMAGES = {
    "vllm": "an image of rayproject/ray-llm with Ray 2.60",
    "ridgeline": "one that was built with --build-arg EXTRAS=[fleet]",
}


def render_kuberay(plan: DeploymentPlan) -> dict[str, str]:
    """`rayservice.yaml` of vLLM, `rayjob.yaml` of Ridgeline. Raises BadInput without an image: Ray
    and the server have to be in it."""
    image = plan.require_image("kuberay", _IMAGES[plan.server])
    if plan.server == "ridgeline":
        return render_kuberay_fleet(plan, image, RAY_VERSION)
    service = {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": plan.name},
        "spec": {
            "serveConfigV2": literal_block(to_yaml(serve_config(plan))),
            "rayClusterConfig": _cluster(plan, image),
        },
    }
    return {"rayservice.yaml": to_yaml(service)}


def serve_config(plan: DeploymentPlan) -> dict[str, Any]:
    """The applications of Ray Serve, as `serve deploy` takes them, too."""
    llm = {
        "model_loading_config": {"model_id": plan.model, "model_source": plan.model},
        "deployment_config": {
            "num_replicas": plan.num_replicas,
            "graceful_shutdown_timeout_s": 60,
        },
        "engine_kwargs": engine_arguments(plan.arguments, plan.gpus),
    }
    application = {
        "name": plan.name,
        "route_prefix": "/",
        "import_path": "ray.serve.llm:build_openai_app",
        "args": {"llm_configs": [llm]},
    }
    return {"applications": [application]}


def engine_arguments(words: tuple[str, ...], gpus: int) -> dict[str, Any]:
    """vLLM's flags as arguments of its engine. Raises BadInput for a bare word."""
    arguments: dict[str, Any] = {"tensor_parallel_size": gpus} if gpus > 1 else {}
    name = ""
    for word in words:
        if word.startswith("--"):
            flag, _, value = word[2:].partition("=")
            name = flag.replace("-", "_")
            arguments[name] = _plain(value) if value else True
            name = "" if value else name
        elif name:
            arguments[name], name = _plain(word), ""
        else:
            raise BadInput(
                "--for kuberay passes options by name, and this word belongs to none",
                value=word,
                fix="write --serve-args as '--option value'",
            )
    return arguments


def _plain(word: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def _cluster(plan: DeploymentPlan, image: str) -> dict[str, Any]:
    head = {"requests": {"cpu": "2", "memory": "8Gi"}, "limits": {"memory": "8Gi"}}
    ports = [(6379, "gcs-server"), (8265, "dashboard"), (10001, "client"), (8000, "serve")]
    return {
        "rayVersion": RAY_VERSION,
        "headGroupSpec": {
            "rayStartParams": {"dashboard-host": "0.0.0.0", "num-cpus": "0"},
            "template": {
                "spec": _pod(
                    {
                        "name": "ray-head",
                        "image": image,
                        "ports": [{"containerPort": p, "name": name} for p, name in ports],
                        "resources": head,
                    },
                )
            },
        },
        "workerGroupSpecs": [
            {
                "groupName": "servers",
                "replicas": plan.num_replicas,
                "minReplicas": plan.num_replicas,
                "maxReplicas": plan.num_replicas + 1,  # one more while it updates
                "rayStartParams": {},
                "template": {
                    "spec": _pod(
                        {
                            "name": "ray-worker",
                            "image": image,
                            "env": [
                                {"name": name, "value": path}
                                for name, path in plan.profile.cache.items()
                            ],
                            "resources": server_resources(plan),
                        },
                    )
                },
            }
        ],
    }


def _pod(container: dict[str, Any]) -> dict[str, Any]:
    mounts = [
        {"name": "cache", "mountPath": CACHE},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    return {
        "automountServiceAccountToken": False,
        "containers": [{**container, "volumeMounts": mounts}],
        "volumes": [
            {"name": "cache", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
