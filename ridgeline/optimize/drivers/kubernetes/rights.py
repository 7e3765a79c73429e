"""The rights in the cluster that a search needs, as a Role of the server's namespace.

Reading and changing are limited to the names of the Deployment and of its copy. Pods have no name
that is known beforehand, and creation cannot be limited to a name.
"""

from __future__ import annotations

from typing import Any

import yaml

from ridgeline.optimize.drivers.kubernetes.workload import KubernetesWorkload

ACCOUNT = "ridgeline-optimize"
COPY_SUFFIX = "-ridgeline"
_RBAC = "rbac.authorization.k8s.io"
_WATCHED = ("get", "list", "watch")  # kubectl delete waits until the object is gone


def role_rules(kind: str, name: str, *, on_copy: bool) -> list[dict[str, Any]]:
    """The rules for a `deployment` or `statefulset`: changed in place, or copied."""
    pods = [
        _rule("", "pods", ("get", "list")),
        _rule("", "pods/log", ("get",)),
    ]
    if not on_copy:
        return [_rule("apps", f"{kind}s", ("get", "patch"), name), *pods]
    copy = f"{name}{COPY_SUFFIX}"
    return [
        _rule("apps", f"{kind}s", ("get",), name),
        _rule("apps", "deployments", ("create",)),
        _rule("apps", "deployments", (*_WATCHED, "patch", "delete"), copy),
        _rule("", "services", ("create",)),
        _rule("", "services", (*_WATCHED, "patch", "delete"), copy),
        *pods,
        _rule("", "pods/portforward", ("create",)),
    ]


def rights_manifest(place: str, *, on_copy: bool) -> str:
    """A service account, the Role, and what binds them, for `NAMESPACE/[KIND/]NAME`.

    Raises BadInput for any other place.
    """
    namespace, kind, name, _ = KubernetesWorkload(place).parts
    metadata = {"name": ACCOUNT, "namespace": namespace}
    objects = [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        {
            "apiVersion": f"{_RBAC}/v1",
            "kind": "Role",
            "metadata": metadata,
            "rules": role_rules(kind, name, on_copy=on_copy),
        },
        {
            "apiVersion": f"{_RBAC}/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": _RBAC, "kind": "Role", "name": ACCOUNT},
            "subjects": [{"kind": "ServiceAccount", **metadata}],
        },
    ]
    return str(yaml.safe_dump_all(objects, sort_keys=False))


def _rule(group: str, resource: str, verbs: tuple[str, ...], name: str = "") -> dict[str, Any]:
    rule: dict[str, Any] = {"apiGroups": [group], "resources": [resource]}
    if name:
        rule["resourceNames"] = [name]
    return {**rule, "verbs": list(verbs)}
