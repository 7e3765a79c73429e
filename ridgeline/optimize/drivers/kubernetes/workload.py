"""Changes the arguments of a Deployment or StatefulSet with kubectl (`--kubernetes`).

A JSON patch replaces the arguments of the server's container, and only if they are still what was
read: a change that someone else makes meanwhile is never overwritten. The rollout is watched by the
object's status and by its pods, so that an image that cannot be pulled or a container that crashes
ends the trial at once instead of at the deadline. Restoring patches the former arguments back,
which works however many revisions lie between.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import msgspec

from ridgeline.errors import BadInput, CannotRun
from ridgeline.optimize.drivers.base import Change, Progress, Shell
from ridgeline.optimize.drivers.shell import run, run_json
from ridgeline.optimize.external.server_flags import load_server_flags

KINDS = ("deployment", "statefulset")
LOG_LINES = "60"
_SHELLS = ("sh", "bash", "ash", "dash")
_FATAL = (
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
    "CrashLoopBackOff",
)


class _Named(msgspec.Struct):
    name: str


class _PodSpec(msgspec.Struct):
    containers: list[_Named]


class _Pod(msgspec.Struct):
    metadata: _Named
    spec: _PodSpec


class _PodList(msgspec.Struct):
    """What is read of the pods in any case."""

    items: list[_Pod]


class _Template(msgspec.Struct):
    spec: _PodSpec


class _WorkloadSpec(msgspec.Struct):
    selector: dict[str, Any]
    template: _Template


class _Generation(_Named):
    generation: int


class _Workload(msgspec.Struct):
    """What is read of a Deployment or StatefulSet in any case."""

    metadata: _Generation
    spec: _WorkloadSpec


class KubernetesWorkload:
    """A `ServerControl` for `NAMESPACE/NAME` or `NAMESPACE/statefulset/NAME[/CONTAINER]`."""

    def __init__(self, place: str) -> None:
        parts = place.split("/")
        if len(parts) == 2:
            parts.insert(1, KINDS[0])
        if len(parts) not in (3, 4) or not all(parts) or parts[1] not in KINDS:
            raise BadInput(
                "--kubernetes names no Deployment or StatefulSet",
                value=place,
                fix="NAMESPACE/NAME, or NAMESPACE/statefulset/NAME, and /CONTAINER where needed",
            )
        self._namespace, self._kind, self._object, *container = parts
        self._container = container[0] if container else ""
        self._place, self._index = "args", 0
        self._former: tuple[str, ...] = ()
        self._prefix: tuple[str, ...] = ()  # words of the command line that are not in `args`
        self._present: tuple[str, ...] = ()
        self._labels: dict[str, str] = {}
        self._restarts_before: dict[str, int] = {}  # pod → restarts when the last change began

    @property
    def name(self) -> str:
        return f"{self._kind}/{self._object} in namespace {self._namespace}"

    @property
    def parts(self) -> tuple[str, str, str, str]:
        """Namespace, kind, name, and the server's container."""
        return self._namespace, self._kind, self._object, self._container

    def document(self) -> dict[str, Any]:
        """The object as it is. Raises CannotRun."""
        return self._get(self._kind, self._object)

    def read_command(self) -> tuple[str, ...]:
        document = self.document()
        spec = document["spec"]
        if (spec.get("updateStrategy") or {}).get("type") == "OnDelete":
            raise CannotRun(
                "the StatefulSet restarts its pods only when they are deleted",
                value="updateStrategy: OnDelete",
                fix="set updateStrategy.type to RollingUpdate",
            )
        if spec.get("paused"):
            raise CannotRun(
                "the Deployment is paused: a patch would not be rolled out",
                value=self.name,
                fix=f"kubectl -n {self._namespace} rollout resume deployment/{self._object}",
            )
        self._labels = dict(spec["selector"].get("matchLabels") or {})
        containers = spec["template"]["spec"]["containers"]
        self._index = _container_index(containers, self._container)
        container = containers[self._index]
        self._container = container["name"]
        command, arguments = container.get("command") or [], container.get("args") or []
        self._place = "args" if arguments else "command"
        self._former = self._present = tuple(arguments or command)
        self._prefix = tuple(command) if arguments else ()
        if not self._former:
            raise CannotRun(
                "the container has no command and no args, so its image alone has the flags",
                value=self._container,
                fix="write the server's arguments in the manifest",
            )
        words = (*self._prefix, *self._former)
        if PurePath(words[0]).name in _SHELLS:
            raise CannotRun(
                "the server is started by a shell, whose text Ridgeline does not change",
                value=" ".join(words)[:120],
                fix="write the server's words as a list in `command` and `args`, or use "
                "--apply-cmd",
            )
        return words

    def change(self, change: Change) -> None:
        self._patch(change.words[len(self._prefix) :])

    def restore(self) -> None:
        if self._present != self._former:
            self._patch(self._former)

    def progress(self) -> Progress:
        problem, note = None, ""
        for pod in self._pods():
            before = self._restarts_before.get(_uid(pod))
            problem = problem or _pod_problem(pod, self._container, before)
            note = note or _pod_note(pod)
        document = self._get(self._kind, self._object)
        status, spec = document.get("status") or {}, document["spec"]
        wanted = spec.get("replicas", 1)
        updated = status.get("updatedReplicas", 0)
        ready = status.get("availableReplicas", status.get("readyReplicas", 0))
        applied = (
            status.get("observedGeneration", 0) >= document["metadata"]["generation"]
            and updated == wanted
            and status.get("replicas", 0) == wanted
            and ready >= wanted
        )
        for condition in status.get("conditions") or ():
            if condition.get("reason") == "ProgressDeadlineExceeded" and not applied:
                problem = problem or str(condition.get("message", "progress deadline exceeded"))
        if problem is not None and note:
            problem = f"{problem}; {note}"
        note = note or f"{ready} of {wanted} pods are ready, {updated} updated"
        return Progress(applied=applied, problem=None if applied else problem, note=note)

    def logs(self) -> str:
        pods = self._pods()
        if not pods:
            return ""
        name = pods[-1]["metadata"]["name"]
        words = ("logs", name, "--container", self._container, "--tail", LOG_LINES)
        if _restarts(pods[-1], self._container):
            try:
                return run(self._kubectl(*words, "--previous"), merged=True)
            except CannotRun:
                pass  # the pod may have been replaced since
        return run(self._kubectl(*words), merged=True)

    def change_commands(self, change: Change) -> list[Shell]:
        words = change.words[len(self._prefix) :]
        return [
            Shell(self._patch_words(words, self._present)),
            Shell(self._kubectl("rollout", "status", f"{self._kind}/{self._object}")),
        ]

    def restore_commands(self) -> list[Shell]:
        # Without the test for the present arguments: a killed Ridgeline cannot say what they are.
        return [Shell(self._patch_words(self._former, None))]

    def _patch(self, words: Sequence[str]) -> None:
        self._restarts_before = {
            _uid(pod): _restarts(pod, self._container) for pod in self._all_pods()
        }
        try:
            run(self._patch_words(words, self._present))
        except CannotRun:
            if self._read_present() == tuple(words):
                pass  # the patch arrived, and its response was lost
            elif self._read_present() != self._present:
                raise CannotRun(
                    f"{self.name} was changed by someone else meanwhile; it is left as it is",
                    value=" ".join(self._read_present())[:200],
                    limit=" ".join(self._present)[:200],
                ) from None
            else:
                raise
        self._present = tuple(words)

    def _patch_words(self, words: Sequence[str], present: Sequence[str] | None) -> tuple[str, ...]:
        container = f"/spec/template/spec/containers/{self._index}"
        path = f"{container}/{self._place}"
        patch: list[dict[str, Any]] = [
            {"op": "test", "path": f"{container}/name", "value": self._container}
        ]
        if present is not None:
            patch.append({"op": "test", "path": path, "value": list(present)})
        patch.append({"op": "replace", "path": path, "value": list(words)})
        return self._kubectl(
            *("patch", self._kind, self._object, "--type", "json"),
            *("--patch", json.dumps(patch), "--field-manager", "ridgeline"),
        )

    def _read_present(self) -> tuple[str, ...]:
        spec = self._get(self._kind, self._object)["spec"]["template"]["spec"]
        return tuple(spec["containers"][self._index].get(self._place) or ())

    def _pods(self) -> list[dict[str, Any]]:
        """The pods that have the present arguments, oldest first."""
        pods = [
            pod
            for pod in self._all_pods()
            for container in pod["spec"]["containers"]
            if container["name"] == self._container
            and tuple(container.get(self._place) or ()) == self._present
            and "deletionTimestamp" not in pod["metadata"]
        ]
        return sorted(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")))

    def _all_pods(self) -> list[dict[str, Any]]:
        selector = ",".join(f"{key}={value}" for key, value in sorted(self._labels.items()))
        words = self._kubectl("get", "pods", "-l", selector, "-o", "json")
        return list(run_json(words, _PodList)["items"])

    def _get(self, kind: str, name: str) -> dict[str, Any]:
        return dict(run_json(self._kubectl("get", kind, name, "-o", "json"), _Workload))

    def _kubectl(self, *words: str) -> tuple[str, ...]:
        return ("kubectl", "--namespace", self._namespace, *words)


def _container_index(containers: Sequence[Mapping[str, Any]], name: str) -> int:
    """The container of that name, or the only one, or the only one that runs a known server."""
    if name:
        matching = [i for i, row in enumerate(containers) if row["name"] == name]
    elif len(containers) == 1:
        matching = [0]
    else:
        matching = [i for i, row in enumerate(containers) if _is_server(row)]
    if len(matching) != 1:
        raise BadInput(
            "cannot tell which container is the server",
            value=name or None,
            limit=", ".join(row["name"] for row in containers),
            fix="--kubernetes NAMESPACE/KIND/NAME/CONTAINER",
        )
    return matching[0]


def _is_server(container: Mapping[str, Any]) -> bool:
    words = [*(container.get("command") or ()), *(container.get("args") or ())]
    programs = {program for row in load_server_flags().values() for program in row.programs}
    image = container.get("image", "").partition(":")[0]
    return bool({PurePath(word).name for word in words} & programs) or any(
        program in image for program in programs
    )


def _statuses(pod: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    status = pod.get("status") or {}
    yield from status.get("initContainerStatuses") or ()
    yield from status.get("containerStatuses") or ()


def _pod_problem(pod: Mapping[str, Any], container: str, before: int | None) -> str | None:
    """Why a pod will not become ready, or None. `before`: restarts that it had before the change;
    None if it is newer."""
    ended = None
    if _restarts(pod, container) > (before or 0) or before is None:
        ended = _terminated(pod, container)
    if ended is not None:
        reason = ended.get("reason") or "Error"
        return f"its container exited with code {ended.get('exitCode')} ({reason})"
    for status in _statuses(pod):
        waiting = (status.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") in _FATAL:
            return f"{waiting['reason']}: {waiting.get('message', '')}".rstrip(": ")
    return None


def _terminated(pod: Mapping[str, Any], container: str) -> Mapping[str, Any] | None:
    """How a container last ended, if it ended since the pod was created."""
    for status in _statuses(pod):
        for key in ("state", "lastState"):
            ended = (status.get(key) or {}).get("terminated")
            if ended is not None and status["name"] == container:
                return dict(ended)
    return None


def _uid(pod: Mapping[str, Any]) -> str:
    return str(pod["metadata"].get("uid") or pod["metadata"]["name"])


def _restarts(pod: Mapping[str, Any], container: str) -> int:
    counts = [row.get("restartCount", 0) for row in _statuses(pod) if row["name"] == container]
    return int(sum(counts))


def _pod_note(pod: Mapping[str, Any]) -> str:
    for condition in (pod.get("status") or {}).get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return (
                f"{condition.get('reason')}: {condition.get('message')} (a rolling update needs "
                "room for one more pod; strategy Recreate, or maxSurge 0, needs none)"
            )
    return ""
