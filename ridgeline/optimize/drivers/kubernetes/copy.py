"""Tries configurations on a copy of a Deployment with its own Service.

The original keeps serving its users. The copy has one replica, no label of the original (whose
Service would send it users' requests), and the strategy Recreate, so that one set of GPUs is
enough. It is made when the search begins and deleted when it ends, also after Ctrl-C and kill -9.

The load reaches it by `{service}` in --url, its Service's name inside the cluster, or by `{port}`,
a local port that `kubectl port-forward` connects to it.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from ridgeline.errors import BadInput, CannotRun
from ridgeline.optimize.drivers.base import Report, Shell
from ridgeline.optimize.drivers.compile_cache import MOUNTED_AT, CompileCache
from ridgeline.optimize.drivers.in_place import InPlaceConfiguration, InPlaceDriver, Readiness
from ridgeline.optimize.drivers.kubernetes.rights import COPY_SUFFIX
from ridgeline.optimize.drivers.kubernetes.workload import KubernetesWorkload
from ridgeline.optimize.drivers.restore_script import RESTORE_SCRIPT, RestoreScript
from ridgeline.optimize.drivers.server_process import ServerCommand, free_port
from ridgeline.optimize.drivers.shell import parse_json, run, shell_line, uninterrupted
from ridgeline.optimize.external.server_flags import spell_out

LABEL = "ridgeline/copy-of"
CACHE_VOLUME = "ridgeline-compile-cache"
MANIFEST = "kubernetes-copy.json"
SERVICE_PLACEHOLDER, PORT_PLACEHOLDER = "{service}", "{port}"
DEFAULT_PORT = 8000


class _Metadata(msgspec.Struct):
    labels: dict[str, str] | None = None


class _Owned(msgspec.Struct):
    """What is read of an object that has the copy's name."""

    metadata: _Metadata


def copy_manifest(
    deployment: dict[str, Any], container: str, cache: CompileCache | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The Deployment and the Service of a copy. `container`: that of the server; it mounts the
    `cache`."""
    name, namespace = deployment["metadata"]["name"], deployment["metadata"].get("namespace")
    metadata = {"name": f"{name}{COPY_SUFFIX}", "labels": {LABEL: name}}
    if namespace is not None:
        metadata["namespace"] = namespace
    template = json.loads(json.dumps(deployment["spec"]["template"]))
    template["metadata"] = {
        "labels": {LABEL: name},
        "annotations": (template.get("metadata") or {}).get("annotations") or {},
    }
    if cache is not None:
        _mount_cache(template["spec"], container, cache)
    port = _server_port(template["spec"]["containers"], container)
    copy = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata,
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": {LABEL: name}},
            "template": template,
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "selector": {LABEL: name},
            "ports": [{"name": "http", "port": port, "targetPort": port}],
        },
    }
    return copy, service


def _mount_cache(pod: dict[str, Any], name: str, cache: CompileCache) -> None:
    """Let a container keep its compiled kernels in what outlives its pod."""
    container = next(row for row in pod["containers"] if row["name"] == name)
    present = [row["name"] for row in container.get("env") or ()]
    variables = cache.environment(MOUNTED_AT, present)
    container["env"] = [
        *(container.get("env") or ()),
        *({"name": key, "value": value} for key, value in variables.items()),
    ]
    mounts = container.get("volumeMounts") or ()
    container["volumeMounts"] = [*mounts, {"name": CACHE_VOLUME, "mountPath": MOUNTED_AT}]
    volume = {"name": CACHE_VOLUME, **cache.volume_of_pod()}
    pod["volumes"] = [*(pod.get("volumes") or ()), volume]


def _server_port(containers: Sequence[dict[str, Any]], name: str) -> int:
    """The port of the server's command line, else the first one that its container declares."""
    container = next(row for row in containers if row["name"] == name)
    words = [*(container.get("command") or ()), *(container.get("args") or ())]
    for word, following in zip(words, [*words[1:], ""], strict=True):
        value = following if word == "--port" else word.removeprefix("--port=")
        if word.startswith("--port") and value.isdigit():
            return int(value)
    ports = container.get("ports") or [{"containerPort": DEFAULT_PORT}]
    return int(ports[0]["containerPort"])


class HeldScript(RestoreScript):
    """The script that deletes the copy; changes of the copy leave it as it is."""

    def write(self, lines: Sequence[str]) -> None: ...

    def remove(self) -> None: ...

    def dismiss(self) -> None: ...


def delete_words(namespace: str, copy: str) -> tuple[str, ...]:
    """The command that deletes a copy and its Service."""
    what = (f"deployment/{copy}", f"service/{copy}")
    return ("kubectl", "--namespace", namespace, "delete", *what, "--ignore-not-found")


class KubernetesCopyDriver:
    """A `Driver` that makes a copy of `NAMESPACE/NAME[/CONTAINER]` and changes only that."""

    side_by_side = False

    def __init__(
        self, place: str, url: str, readiness: Readiness, folder: Path, report: Report
    ) -> None:
        self._original = KubernetesWorkload(place)
        self._cache: CompileCache | None = None
        self._words = self._original.read_command()
        self._namespace, self._kind, self._name, self._container = self._original.parts
        if self._kind != "deployment":
            raise BadInput(
                "only a Deployment is copied",
                value=place,
                fix="write an address without {service} and {port} to change it in place",
            )
        self._copy = f"{self._name}{COPY_SUFFIX}"
        self._local_port = free_port() if PORT_PLACEHOLDER in url else None
        address = url.replace(SERVICE_PLACEHOLDER, f"{self._copy}.{self._namespace}")
        self._url = address.replace(PORT_PLACEHOLDER, str(self._local_port))
        self._readiness, self._folder, self._report = readiness, folder, report
        self._script = RestoreScript(folder / RESTORE_SCRIPT)
        self._forward: subprocess.Popen[bytes] | None = None
        self._in_place: InPlaceDriver | None = None

    def keep_compiled(self, cache: CompileCache) -> None:
        """Mount what outlives the copy's pods. Raises BadInput for a place that does not."""
        cache.volume_of_pod()
        self._cache = cache

    @property
    def command(self) -> ServerCommand:
        """The command line of the original, at the address of the copy."""
        return ServerCommand(
            url=self._url,
            command=f"{spell_out(shlex.join(self._words), None)} {{flags}}",
            start_timeout_s=self._readiness.timeout_s,
        )

    def __enter__(self) -> KubernetesCopyDriver:
        manifests = copy_manifest(self._original.document(), self._container, self._cache)
        self._refuse_other_owner()
        file = self._folder / MANIFEST
        # not as a List, which kubectl validates itself instead of letting the cluster do it
        file.write_text("".join(f"{json.dumps(row)}\n" for row in manifests), encoding="utf-8")
        self._script.write([shell_line(command) for command in self.plan_restore()])
        try:
            run(self._kubectl("apply", *_SERVER_SIDE, "--filename", str(file)))
            self._start_forward(manifests[1]["spec"]["ports"][0]["port"])
            control = KubernetesWorkload(
                f"{self._namespace}/deployment/{self._copy}/{self._container}"
            )
            control.read_command()
            self._in_place = InPlaceDriver(
                control,
                self.command,
                self._readiness,
                HeldScript(self._script.path),
                self._report,
            )
            self._in_place.wait_ready()
        except BaseException:
            self._delete()
            raise
        self._report(f"{self._copy}: a copy of {self._original.name} is up at {self._url}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._delete()

    def configure(self, flags: Sequence[str], log: Path) -> InPlaceConfiguration:
        assert self._in_place is not None, "the copy exists inside of the context only"
        return self._in_place.configure(flags, log)

    def plan(self, flags: Sequence[str]) -> list[Shell]:
        manifest = str(self._folder / MANIFEST)
        words = self.command.words(flags, None)
        shown = (("ARGUMENTS", shlex.join(words)),)
        return [Shell(self._kubectl("apply", *_SERVER_SIDE, "--filename", manifest), shown)]

    def plan_restore(self) -> list[Shell]:
        return [Shell(delete_words(self._namespace, self._copy))]

    def _refuse_other_owner(self) -> None:
        """Raise CannotRun if the copy's name belongs to someone; delete a copy left behind."""
        words = self._kubectl(
            *("get", "deployment", self._copy, "--ignore-not-found", "--output", "json")
        )
        text = run(words).strip()
        if not text:
            return
        labels = parse_json(words, text, _Owned)["metadata"].get("labels") or {}
        if labels.get(LABEL) != self._name:
            raise CannotRun(
                f"a Deployment of the copy's name exists, and it is not Ridgeline's: {self._copy}",
                fix=f"rename it, or delete it: kubectl -n {self._namespace} delete deployment "
                f"{self._copy}",
            )
        run(delete_words(self._namespace, self._copy))

    def _start_forward(self, port: int) -> None:
        """Keep a local port connected; a connection ends with its pod."""
        if self._local_port is None:
            return
        words = self._kubectl("port-forward", f"service/{self._copy}", f"{self._local_port}:{port}")
        self._forward = subprocess.Popen(
            ["/bin/sh", "-c", f"while :; do {shlex.join(words)}; sleep 0.2; done"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        stop = f"kill -s TERM -- -{self._forward.pid}"
        self._script.write([stop, *(shell_line(command) for command in self.plan_restore())])

    def _delete(self) -> None:
        with uninterrupted(self._report):
            if self._forward is not None:
                with suppress(ProcessLookupError):
                    os.killpg(self._forward.pid, signal.SIGKILL)
                self._forward.wait()
                self._forward = None
            try:
                run(delete_words(self._namespace, self._copy))
            except CannotRun as error:
                self._script.dismiss()
                self._report(
                    f"{self._copy} could NOT be deleted ({error}); run: sh {self._script.path}"
                )
                return
            self._script.remove()
            self._report(f"{self._copy} is deleted; {self._original.name} was not changed")

    def _kubectl(self, *words: str) -> tuple[str, ...]:
        return ("kubectl", "--namespace", self._namespace, *words)


_SERVER_SIDE = ("--server-side", "--field-manager", "ridgeline")
