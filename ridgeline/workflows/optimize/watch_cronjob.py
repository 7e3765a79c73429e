"""The Kubernetes CronJob that runs `ridgeline watch`."""

from __future__ import annotations

from typing import Any

import yaml

from ridgeline.config.load import WatchOptions

CLAIM, SECRET = "ridgeline-tuned", "ridgeline-watch"
TUNED = "/tuned"


def cronjob(options: WatchOptions) -> str:
    """A CronJob with the same options.

    It reads the search's folder from the volume claim `ridgeline-tuned`, and the key, if the server
    wants one, from the secret `ridgeline-watch`. A job fails when the traffic has drifted, so that
    an alert on failed jobs tells; it is not repeated.
    """
    arguments = ["watch", "--url", options.url, "--tuned", TUNED]
    arguments += ["--duration", f"{options.duration:g}s", "--interval", f"{options.interval:g}s"]
    if options.workload is not None:
        arguments += ["--workload", options.workload]
    if options.gpus is not None:
        arguments += ["--gpus", str(options.gpus)]
    if options.accelerator is not None:
        arguments += ["--accelerator", options.accelerator]
    key = {"secretKeyRef": {"name": SECRET, "key": "api-key", "optional": True}}
    container: dict[str, Any] = {
        "name": "watch",
        "image": options.image,
        "args": arguments,
        "env": [
            {"name": "RIDGELINE_API_KEY", "valueFrom": key},
            {"name": "RIDGELINE_CACHE", "value": "/cache"},
        ],
        "resources": {
            "requests": {"cpu": "500m", "memory": "1Gi"},
            "limits": {"memory": "4Gi"},
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "tuned", "mountPath": TUNED, "readOnly": True},
            {"name": "cache", "mountPath": "/cache"},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }
    pod = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": [
            {"name": "tuned", "persistentVolumeClaim": {"claimName": CLAIM, "readOnly": True}},
            {"name": "cache", "emptyDir": {}},
            {"name": "tmp", "emptyDir": {}},
        ],
    }
    manifest = {
        "apiVersion": "batch/v1",
        "kind": "CronJob",
        "metadata": {"name": "ridgeline-watch", "labels": {"app": "ridgeline-watch"}},
        "spec": {
            "schedule": options.schedule,
            "concurrencyPolicy": "Forbid",
            "jobTemplate": {"spec": {"backoffLimit": 0, "template": {"spec": pod}}},
        },
    }
    return str(yaml.safe_dump(manifest, sort_keys=False))
