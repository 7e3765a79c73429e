"""Where servers keep compiled kernels from one start to the next (`--compile-cache`).

A start compiles and tunes kernels for minutes, and finds them again in a folder that an environment
variable names. A process keeps it in the home directory, which outlives it; a container and a pod
lose it with their files. A container therefore gets a volume unless it mounts a cache already; a
pod needs a claim or a folder of the node, which only the user can name. A variable that the server
has already is left as it is, so that a cache which someone filled before is used.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from pathlib import Path

import msgspec

from ridgeline.errors import BadInput

MOUNTED_AT = "/var/cache/ridgeline-compile"
LITERAL = "="
"""Begins a value that is no folder's name, such as a switch."""

NONE = "none"
"""The option's value for no cache where there would be one."""

OPEN_MODE = 0o1777  # the container's user may be another one
_VOLUME, _CLAIM, _HOST = "volume:", "pvc:", "host:"
_COMPILER = "TRITON_CACHE_DIR"  # of servers that compile at a start
_THEIRS = re.compile(r"/\.cache(/(?!huggingface)[^/]+)?/?$|/\.triton/?$")


class CompileCache(msgspec.Struct, frozen=True):
    """`place`: the option's value. `variables`: name → folder in it, or LITERAL and a value."""

    place: str
    variables: Mapping[str, str]

    def environment(self, folder: str, present: Container[str]) -> dict[str, str]:
        """The variables that put the caches into `folder`, without those that are `present`."""
        return {
            name: value.removeprefix(LITERAL) if value.startswith(LITERAL) else f"{folder}/{value}"
            for name, value in self.variables.items()
            if name not in present
        }

    @property
    def is_worthwhile(self) -> bool:
        """Whether the server compiles for long enough that losing the kernels matters."""
        return _COMPILER in self.variables

    @property
    def volume(self) -> str | None:
        """The name of the volume that holds it; None for another place."""
        return self.place.removeprefix(_VOLUME) if self.place.startswith(_VOLUME) else None

    def folder(self) -> Path:
        """The folder on this machine, made if it is missing. Raises BadInput for another place."""
        self._refuse(_VOLUME, _CLAIM, _HOST)
        path = Path(self.place).expanduser().absolute()
        path.mkdir(parents=True, exist_ok=True)
        return path

    def mount_of_container(self) -> str:
        """The value of docker's `--mount`. Raises BadInput for a place in a cluster."""
        self._refuse(_CLAIM, _HOST)
        if self.volume is not None:
            return f"type=volume,source={self.volume},target={MOUNTED_AT}"
        is_new = not Path(self.place).expanduser().exists()
        path = self.folder()
        if is_new:  # the rights of a folder that someone else made are theirs to set
            path.chmod(OPEN_MODE)
        return f"type=bind,source={path},target={MOUNTED_AT}"

    def volume_of_pod(self) -> dict[str, object]:
        """What a pod mounts, as in its `volumes`. Raises BadInput for another place."""
        kind, _, name = self.place.partition(":")
        if kind == "pvc" and name:
            return {"persistentVolumeClaim": {"claimName": name}}
        if kind == "host" and name.startswith("/"):
            return {"hostPath": {"path": name, "type": "DirectoryOrCreate"}}
        raise BadInput(
            "--compile-cache names nothing that outlives a pod",
            value=self.place,
            fix="pvc:CLAIM, or host:/FOLDER of the node",
        )

    def _refuse(self, *kinds: str) -> None:
        if self.place.startswith(kinds):
            raise BadInput(
                "--compile-cache names a place that this server cannot reach",
                value=self.place,
                fix="a folder; volume:NAME for --docker; pvc:CLAIM or host:/FOLDER for a copy on "
                "Kubernetes",
            )


def volume_for(container: str) -> str:
    """The place of a container's cache if the user names none."""
    return f"{_VOLUME}ridgeline-compile-{container}"


def mounts_a_cache(destinations: Iterable[str]) -> bool:
    """Whether a container's mounts include the folders in which servers keep compiled kernels."""
    return any(_THEIRS.search(path) for path in destinations)
