"""Runs a container with other arguments in place of one that exists (`--docker`).

The container is stopped, not removed, and a second one is started with the same image, command,
environment, mounts, ports, networks and devices, and the changed arguments. To restore, the second
one is removed and the first one started again. Podman takes the same commands. A container whose
settings cannot be carried over is refused.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec

from ridgeline.errors import CannotRun
from ridgeline.optimize.drivers.base import Change, Progress, Shell
from ridgeline.optimize.drivers.compile_cache import (
    MOUNTED_AT,
    OPEN_MODE,
    CompileCache,
    mounts_a_cache,
)
from ridgeline.optimize.drivers.shell import run, run_json

PROGRAMS = ("docker", "podman")
STOP_S = 60
LABEL = "ridgeline.former"
LOG_LINES = "60"
_ROOT = ("", "0", "root")
_VALUES = {
    "IpcMode": "--ipc",
    "PidMode": "--pid",
    "UTSMode": "--uts",
    "ShmSize": "--shm-size",
    "Memory": "--memory",
    "NanoCpus": "--cpus",
    "CpusetCpus": "--cpuset-cpus",
    "Runtime": "--runtime",
    "PidsLimit": "--pids-limit",
    "UsernsMode": "--userns",
}
_LISTS = {
    "Binds": "--volume",
    "CapAdd": "--cap-add",
    "CapDrop": "--cap-drop",
    "SecurityOpt": "--security-opt",
    "GroupAdd": "--group-add",
    "ExtraHosts": "--add-host",
    "Dns": "--dns",
}
_SWITCHES = {"Privileged": "--privileged", "ReadonlyRootfs": "--read-only", "Init": "--init"}
_REFUSED = {
    "VolumesFrom": "--volumes-from",
    "Links": "--link",
    "CgroupParent": "--cgroup-parent",
    "DeviceCgroupRules": "--device-cgroup-rule",
    "Tmpfs": "--tmpfs",
    "Sysctls": "--sysctl",
}
_DEFAULTS = {
    "IpcMode": ("private", "shareable"),
    "PidMode": ("private",),
    "UTSMode": ("private",),
    "Runtime": ("runc", "crun", "oci"),
    "PidsLimit": (-1, 2048),
    "CgroupParent": ("user.slice", "system.slice", "machine.slice"),
}


class _Inspected(msgspec.Struct):
    """What is read of an image, and of a container, in any case."""

    config: dict[str, Any] = msgspec.field(name="Config")


class _Container(_Inspected):
    state: dict[str, Any] = msgspec.field(name="State")
    host: dict[str, Any] = msgspec.field(name="HostConfig")
    image: str = msgspec.field(name="Image")


_Images = Annotated[list[_Inspected], msgspec.Meta(min_length=1)]
_Containers = Annotated[list[_Container], msgspec.Meta(min_length=1)]


class DockerContainer:
    """A `ServerControl` for one container."""

    def __init__(self, name: str, program: str | None = None) -> None:
        self._container = name
        self._cache: CompileCache | None = None
        self._program = program or ""
        self._document: dict[str, Any] = {}
        self._image: dict[str, Any] = {}
        self._candidate = f"{name}-ridgeline"

    @property
    def name(self) -> str:
        return f"container {self._container}"

    def read_command(self) -> tuple[str, ...]:
        self._document = self._find()
        if self._document["HostConfig"].get("AutoRemove"):
            raise CannotRun(
                "the container was started with --rm: stopping it would delete it",
                value=self._container,
                fix="start it without --rm",
            )
        if not self._document["State"].get("Running"):
            raise CannotRun("the container does not run", value=self._container)
        self._image = self._inspect("image", self._document["Image"])
        list(_options(self._document, self._image))  # refuses now what cannot be carried over
        return (*self._entrypoint, *(self._document["Config"].get("Cmd") or ()))

    def keep_compiled(self, cache: CompileCache) -> None:
        """Mount what outlives the containers that are tried. Raises BadInput for another place."""
        cache.mount_of_container()
        self._cache = cache

    @property
    def keeps_its_kernels(self) -> bool:
        """Whether it mounts a cache of compiled kernels already."""
        return mounts_a_cache(row["Destination"] for row in self._document.get("Mounts") or ())

    def change(self, change: Change) -> None:
        self._remove_candidate()
        for command in self._open_volume():
            try:
                run(command.words)
            except CannotRun as error:
                raise CannotRun(
                    "the volume of compiled kernels cannot be opened to the container's user: "
                    f"{error.what}",
                    value=error.value,
                    fix="--compile-cache with a folder that this user can write, or none",
                ) from None
        run((self._program, "stop", "-t", str(STOP_S), self._container), timeout_s=2 * STOP_S)
        own = dict(_environment(self._document, self._image))
        run(self._run_words(change), env={**own, **self._cache_variables})

    def restore(self) -> None:
        self._remove_candidate()
        run((self._program, "start", self._container))

    def progress(self) -> Progress:
        for name in (self._candidate, self._container):
            document = self._try_inspect(name)
            if document is not None:
                return _progress_of(document["State"])
        return Progress(applied=False, note="no container")

    def logs(self) -> str:
        name = self._container if self._try_inspect(self._candidate) is None else self._candidate
        return run((self._program, "logs", "--tail", LOG_LINES, name), merged=True)

    def change_commands(self, change: Change) -> list[Shell]:
        return [
            *self._open_volume(),
            Shell((self._program, "stop", "-t", str(STOP_S), self._container)),
            Shell(self._run_words(change)),
        ]

    def restore_commands(self) -> list[Shell]:
        return [
            Shell((self._program, "rm", "--force", self._candidate)),
            Shell((self._program, "start", self._container)),
        ]

    @property
    def _entrypoint(self) -> tuple[str, ...]:
        given = self._document["Config"].get("Entrypoint")
        of_image = _words(self._image["Config"].get("Entrypoint"))
        # Podman 4 joins a container's entrypoint with blanks; its image has the words.
        return of_image if given == " ".join(of_image) else _words(given)

    @property
    def _cache_variables(self) -> dict[str, str]:
        if self._cache is None:
            return {}
        given = self._document["Config"].get("Env") or ()
        return self._cache.environment(MOUNTED_AT, [text.partition("=")[0] for text in given])

    def _run_words(self, change: Change) -> tuple[str, ...]:
        entrypoint = self._entrypoint
        options = list(_options(self._document, self._image))
        names = [name for name, _ in _environment(self._document, self._image)]
        names += self._cache_variables
        if self._cache is not None:
            options += ["--mount", self._cache.mount_of_container()]
        # Values stay out of the command line, which every user of the machine can read.
        options += [word for name in names for word in ("--env", name)]
        arguments = change.words[len(entrypoint) :]
        if entrypoint != _words(self._image["Config"].get("Entrypoint")) and entrypoint:
            options += ["--entrypoint", entrypoint[0]]
            arguments = (*entrypoint[1:], *arguments)
        image = self._document["Config"]["Image"]
        head = (self._program, "run", "--detach", "--name", self._candidate)
        return (*head, "--label", f"{LABEL}={self._container}", *options, image, *arguments)

    def _open_volume(self) -> list[Shell]:
        """What lets a user who is not root write into the volume of compiled kernels."""
        user = str(self._document["Config"].get("User") or "")
        if self._cache is None or self._cache.volume is None or user.split(":")[0] in _ROOT:
            return []
        head = (self._program, "run", "--rm", "--user", "0:0", "--entrypoint", "chmod")
        mount = ("--mount", self._cache.mount_of_container())
        image = self._document["Config"]["Image"]
        return [Shell((*head, *mount, image, f"{OPEN_MODE:o}", MOUNTED_AT))]

    def _remove_candidate(self) -> None:
        document = self._try_inspect(self._candidate)
        if document is None:
            return
        if (document["Config"].get("Labels") or {}).get(LABEL) != self._container:
            raise CannotRun(
                "a container has the name that the candidate needs, and is not Ridgeline's",
                value=self._candidate,
                fix="rename it",
            )
        run((self._program, "rm", "--force", self._candidate))

    def _find(self) -> dict[str, Any]:
        """The container's document, from the program that has it. Raises CannotRun."""
        programs = [self._program] if self._program else list(filter(shutil.which, PROGRAMS))
        errors = []
        for self._program in programs or PROGRAMS[:1]:
            try:
                return self._inspect("container", self._container)
            except CannotRun as error:
                errors.append(str(error))
        raise CannotRun("cannot read the container", value=self._container, fix="; ".join(errors))

    def _inspect(self, kind: str, name: str) -> dict[str, Any]:
        words = (self._program, "inspect", "--type", kind, name)
        return dict(run_json(words, _Images if kind == "image" else _Containers)[0])

    def _try_inspect(self, name: str) -> dict[str, Any] | None:
        try:
            return self._inspect("container", name)
        except CannotRun as error:
            if "no such" in str(error).lower():
                return None
            raise


def _progress_of(state: Mapping[str, Any]) -> Progress:
    if state.get("Running") and not state.get("Restarting"):
        return Progress(applied=True)
    if state.get("Status") in ("created", "configured", "initialized"):
        return Progress(applied=False, note=f"the container is {state['Status']}")
    killed = ", out of memory" if state.get("OOMKilled") else ""
    return Progress(applied=False, problem=f"it exited with code {state.get('ExitCode')}{killed}")


def _environment(
    document: Mapping[str, Any], image: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """The variables that the container has and its image does not."""
    shipped = set(image["Config"].get("Env") or ())
    for text in document["Config"].get("Env") or ():
        name, _, value = text.partition("=")
        if text not in shipped and name not in ("HOSTNAME", "container", "TERM"):
            yield name, value


def _options(document: Mapping[str, Any], image: Mapping[str, Any]) -> Iterator[str]:
    """The options of `docker run` that make an equal container. Raises CannotRun."""
    host, config = document["HostConfig"], document["Config"]
    refused = [
        flag
        for key, flag in _REFUSED.items()
        if host.get(key) and host[key] not in _DEFAULTS.get(key, ())
    ]
    if refused:
        raise CannotRun(
            "this container has options that Ridgeline cannot carry over to another one",
            value=" ".join(refused),
            fix="use --apply-cmd with a script that restarts it",
        )
    for key, flag in _VALUES.items():
        value = host.get(key)
        if value and value not in _DEFAULTS.get(key, ()):
            yield from (flag, str(value / 1e9 if key == "NanoCpus" else value))
    for key, flag in _LISTS.items():
        for value in host.get(key) or ():
            yield from (flag, str(value))
    yield from (flag for key, flag in _SWITCHES.items() if host.get(key))
    for limit in host.get("Ulimits") or ():
        name = limit["Name"].removeprefix("RLIMIT_").lower()
        yield from ("--ulimit", f"{name}={limit['Soft']}:{limit['Hard']}")
    for device in host.get("Devices") or ():
        yield from ("--device", f"{device['PathOnHost']}:{device['PathInContainer']}")
    yield from _gpus(host)
    bound = {text.split(":")[1] for text in host.get("Binds") or ()}
    for mount in document.get("Mounts") or ():
        if mount["Destination"] not in bound:
            yield from ("--mount", _mount(mount))
    if config.get("User") and config["User"] != image["Config"].get("User"):
        yield from ("--user", config["User"])
    if config.get("WorkingDir") and config["WorkingDir"] != image["Config"].get("WorkingDir"):
        yield from ("--workdir", config["WorkingDir"])
    yield from _network(document)


def _gpus(host: Mapping[str, Any]) -> Iterator[str]:
    for request in host.get("DeviceRequests") or ():
        if request.get("DeviceIDs"):
            yield from ("--gpus", f'"device={",".join(request["DeviceIDs"])}"')
        elif request.get("Driver") == "cdi":
            raise CannotRun(
                "this container has CDI devices, which Ridgeline cannot carry over",
                fix="use --apply-cmd with a script that restarts it",
            )
        else:
            yield from ("--gpus", "all" if request.get("Count") == -1 else str(request["Count"]))


def _mount(mount: Mapping[str, Any]) -> str:
    if mount.get("Type") == "tmpfs":
        return f"type=tmpfs,target={mount['Destination']}"
    source = mount.get("Name") if mount.get("Type") == "volume" else mount["Source"]
    text = f"type={mount.get('Type', 'bind')},source={source},target={mount['Destination']}"
    return text if mount.get("RW", True) else f"{text},readonly"


def _network(document: Mapping[str, Any]) -> Iterator[str]:
    host = document["HostConfig"]
    for port, bindings in (host.get("PortBindings") or {}).items():
        for binding in bindings or ():
            address = f"{binding['HostIp']}:" if binding.get("HostIp") else ""
            yield from ("--publish", f"{address}{binding['HostPort']}:{port}")
    mode = host.get("NetworkMode") or "default"
    if mode in ("default", "bridge", "pasta", "slirp4netns"):
        return
    yield from ("--network", mode)
    networks = (document.get("NetworkSettings") or {}).get("Networks") or {}
    if len(networks) > 1:
        raise CannotRun(
            "this container is in several networks, and Ridgeline carries over one",
            value=" ".join(networks),
            fix="use --apply-cmd with a script that restarts it",
        )
    own = document["Config"].get("Hostname", "")
    for alias in (networks.get(mode) or {}).get("Aliases") or ():
        if alias != own:
            yield from ("--network-alias", alias)


def _words(value: object) -> tuple[str, ...]:
    """An entrypoint: a list, or text in older versions of podman."""
    if isinstance(value, str):
        return tuple(value.split())
    return tuple(map(str, value)) if isinstance(value, list) else ()
