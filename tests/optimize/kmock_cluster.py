"""A Kubernetes API server (kmock) for the real kubectl, with pods that are real processes.

kmock has the REST API; here are what it leaves out and the driver needs: server-side apply, JSON
patches, label selectors, the status of a rollout, logs, and the rights of a Role, which are
enforced. Every request but those of discovery is recorded.
"""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp.web
import jsonpatch
import kmock
import yaml

from tests.optimize import fake_tools

VERBS = ("get", "list", "watch", "create", "patch", "delete")
RESOURCES = {
    "apps/v1/deployments": ("Deployment", "deployment"),
    "v1/services": ("Service", "service"),
    "v1/pods": ("Pod", "pod"),
}
Document = dict[str, Any]


class Cluster(kmock.KubernetesEmulator):
    """`rules`: those of the Role that its one user has. `pods_of`: Deployment → its rollout."""

    def __init__(self, rules: Sequence[Mapping[str, Any]], copy_port: int) -> None:
        super().__init__()
        self.rules, self.copy_port = rules, copy_port
        self.calls: list[Document] = []
        self.used: set[tuple[int, str]] = set()  # places of rules, and their verbs
        self.pods_of: dict[str, Document] = {}
        for name, (kind, singular) in RESOURCES.items():
            self.resources[name] = {
                "kind": kind,
                "singular": singular,
                "namespaced": True,
                "verbs": set(VERBS),
            }

    def add(self, deployment: Document) -> None:
        """A Deployment that exists before, with its pods up."""
        name = deployment["metadata"]["name"]
        self.objects["apps/v1/deployments", "prod", name] = deployment
        self._start(deployment)

    def _start(self, deployment: Document) -> None:
        container = deployment["spec"]["template"]["spec"]["containers"][-1]
        row = {"name": f"{deployment['metadata']['name']}-0", "container": container}
        words = fake_tools.server_words(container)
        with self._forwarded(deployment):
            pid = fake_tools.launch(words)
        pods = [{**row, "ready": True, "stuck": "", "ended": False}]
        state = {"workload": deployment, "pods": pods, "pid": pid, "calls": self.calls}
        self.pods_of[deployment["metadata"]["name"]] = state

    @contextmanager
    def _forwarded(self, deployment: Document) -> Iterator[None]:
        """A copy's server listens on the local port that kubectl would forward."""
        is_copy = deployment["metadata"]["name"].endswith("-ridgeline")
        fake_tools.FORWARDED[:] = [str(self.copy_port)] if is_copy else []
        yield
        fake_tools.FORWARDED.clear()

    async def _handle(self, request: kmock.Request) -> aiohttp.web.StreamResponse:
        path = request.url.path
        if path.startswith("/openapi/v3"):
            return aiohttp.web.json_response(_openapi(path))
        if request.resource is None or request.namespace is None:
            return await super()._handle(request)
        self._authorize(request)
        self.calls.append(_recorded(request))
        if request.subresource == "log":
            return aiohttp.web.Response(text=(fake_tools.FOLDER / "server.log").read_text())
        if request.method == "PATCH":
            return await self._patch(request)
        response = await super()._handle(request)
        if request.method == "DELETE" and request.resource.plural == "deployments":
            fake_tools.kill(self.pods_of.pop(request.name or "")["pid"])
        return response

    def _authorize(self, request: kmock.Request, verb: str = "") -> None:
        """Raise Forbidden unless a rule allows the request."""
        resource = str(request.resource.plural if request.resource else "")
        if request.subresource:
            resource += f"/{request.subresource}"
        name = request.name or request.params.get("fieldSelector", "").removeprefix(
            "metadata.name="
        )
        verb = verb or _verb(request)
        for place, rule in enumerate(self.rules):
            if (
                (request.resource is None or request.resource.group in rule["apiGroups"])
                and resource in rule["resources"]
                and verb in rule["verbs"]
                and ("resourceNames" not in rule or name in rule["resourceNames"])
            ):
                self.used.add((place, verb))
                return
        message = f'cannot {verb} resource "{resource}" named "{name}"'
        raise kmock.KubernetesError(403, "Forbidden", message)

    async def _patch(self, request: kmock.Request) -> aiohttp.web.Response:
        key = (request.resource, request.namespace, request.name)
        present = self.objects[key] if key in self.objects else None  # noqa: SIM401 it has no get
        exists = present is not None and not present.deleted
        if "apply-patch" in request.headers["Content-Type"]:
            assert request.params["fieldManager"] == "ridgeline"
            if not exists:
                self._authorize(request, "create")
            return self._apply(key, request.data, exists=exists)
        if not exists:
            raise kmock.KubernetesObjectNotFoundError()
        assert request.headers["Content-Type"] == "application/json-patch+json"
        try:
            patched = jsonpatch.apply_patch(present.raw, request.data)
        except jsonpatch.JsonPatchTestFailed as error:
            raise kmock.KubernetesError(422, "Invalid", str(error)) from None
        state = self.pods_of[str(request.name)]
        state["workload"] = patched
        with self._forwarded(patched):
            fake_tools.roll_out(state)
        self.objects[key].patch(patched)
        return aiohttp.web.json_response(self._seen(patched))

    def _apply(self, key: Any, document: Document, *, exists: bool) -> aiohttp.web.Response:
        document["metadata"] |= {"uid": f"uid-{len(self.calls)}", "generation": 1}
        self.objects[key] = document
        if document["kind"] == "Deployment":
            self._start(document)
        return aiohttp.web.json_response(document, status=200 if exists else 201)

    def _seen(self, document: Document) -> Document:
        state = self.pods_of.get(document["metadata"]["name"])
        if document.get("kind") != "Deployment" or state is None:
            return document
        return {**document, "status": fake_tools.rollout_status(state)}

    async def _serve_fetch(self, request: kmock.Request) -> Document:
        if request.resource is not None and request.resource.plural == "pods":
            return next(pod for pod in self._pods() if pod["metadata"]["name"] == request.name)
        return self._seen(dict(await super()._serve_fetch(request)))

    async def _serve_list(self, request: kmock.Request) -> Document:
        plural = str(request.resource.plural if request.resource else "")
        selector = request.params.get("labelSelector", "")
        if plural == "pods":
            wanted = set(selector.split(","))
            items = [
                pod
                for pod in self._pods()
                if wanted <= {f"{k}={v}" for k, v in pod["metadata"]["labels"].items()}
            ]
        else:
            items = list((await super()._serve_list(request))["items"])
        version = "apps/v1" if plural == "deployments" else "v1"
        kind_name = RESOURCES[f"{version}/{plural}"][0]
        metadata = {"resourceVersion": str(len(self.calls))}
        return {
            "apiVersion": version,
            "kind": f"{kind_name}List",
            "metadata": metadata,
            "items": items,
        }

    async def _serve_version(self, request: kmock.Request) -> Document:
        document = dict(await super()._serve_version(request))
        document["groupVersion"] = document["groupVersion"].lstrip("/")
        return document

    def _pods(self) -> Iterator[Document]:
        for state in self.pods_of.values():
            labels = state["workload"]["spec"]["template"]["metadata"]["labels"]
            for row in state["pods"]:
                pod = fake_tools.pod(state, row)
                pod["metadata"] |= {"labels": labels, "namespace": "prod"}
                yield {"apiVersion": "v1", "kind": "Pod", **pod}


def _verb(request: kmock.Request) -> str:
    if request.method == "GET":
        if request.params.get("watch"):
            return "watch"
        return "get" if request.name else "list"
    return {"POST": "create", "PATCH": "patch", "DELETE": "delete"}[str(request.method.value)]


def _recorded(request: kmock.Request) -> Document:
    row: Document = {"method": str(request.method.value), "path": request.url.path}
    query = {k: v for k, v in request.params.items() if k in ("labelSelector", "fieldManager")}
    if query:
        row["query"] = query
    if request.method == "PATCH":
        row["content"] = request.headers["Content-Type"]
        row["body"] = copy.deepcopy(request.data)
    return row


def _openapi(path: str) -> Document:
    """As much of the description as kubectl reads: that PATCH validates fields in the server."""
    if path == "/openapi/v3":
        groups = ("api/v1", "apis/apps/v1")
        return {"paths": {name: {"serverRelativeURL": f"/openapi/v3/{name}"} for name in groups}}
    group, _, version = path.removeprefix("/openapi/v3/").removeprefix("apis/").rpartition("/")
    group = group if group != "api" else ""
    kinds = [
        kind for name, (kind, _) in RESOURCES.items() if name.startswith("apps/") == bool(group)
    ]
    parameters = [{"name": "fieldValidation", "in": "query"}]
    return {
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes", "version": "v1.32"},
        "paths": {
            f"/{kind}": {
                "patch": {
                    "parameters": parameters,
                    "x-kubernetes-group-version-kind": {
                        "group": group,
                        "version": version,
                        "kind": kind,
                    },
                }
            }
            for kind in kinds
        },
    }


@contextmanager
def running(cluster: Cluster, folder: Path) -> Iterator[Path]:
    """Serve the cluster in a thread, and yield the kubeconfig that names it."""
    started, ended = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()
    file = folder / "kubeconfig"

    async def serve() -> None:
        async with cluster, kmock.Server(cluster) as server:
            file.write_text(json.dumps(_kubeconfig(str(server.url))))
            started.set()
            await ended.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert started.wait(10)
    try:
        yield file
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(10)
        loop.close()
        for state in cluster.pods_of.values():
            fake_tools.kill(state["pid"])


def _kubeconfig(url: str) -> Document:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": {"server": url.rstrip("/")}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "users": [{"name": "test", "user": {}}],
        "current-context": "test",
    }


def rules_of(manifest: str) -> list[Document]:
    """The rules of the Role in a manifest."""
    [role] = [row for row in yaml.safe_load_all(manifest) if row["kind"] == "Role"]
    return list(role["rules"])
