"""Where a fleet is put: which nodes hold the device, which image serves on them.

A node is chosen by a label that the cluster itself puts on it; which one depends on who made the
cluster. An image is named by a release's tag or by its digest: a tag that moves, such as `latest`,
would start another engine than the one that was planned for, at the next restart of any pod.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files

import msgspec

from ridgeline.errors import BadInput, CannotRun
from ridgeline.hardware.catalogue import Accelerator

DEFAULT_CLUSTER = "gpu-operator"
MOVING = ("latest", "nightly", "main", "master", "dev", "stable", "edge")
_IMAGE = re.compile(
    r"[\w.\-/:]+?(?::(?P<tag>\w[\w.\-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_LABEL = re.compile(r"(?:[a-z0-9.\-]{1,253}/)?[A-Za-z0-9][\w.\-]{0,62}")
_VALUE = re.compile(r"[A-Za-z0-9](?:[\w.\-]{0,61}[A-Za-z0-9])?")


class _Image(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What serves on a vendor's devices. `resource`: what its device plugin calls one."""

    vendor: str
    resource: str
    vllm: str
    source: str
    as_of: str
    ray: str | None = None


class _Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Values of a label by the catalogue's name of the device."""

    name: str
    vendor: str
    label: str
    devices: dict[str, str]
    source: str
    as_of: str


class _Known(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    image: tuple[_Image, ...]
    cluster: tuple[_Cluster, ...]


class ManifestOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the user says of the place; None: what is known."""

    cluster: str = DEFAULT_CLUSTER
    image: str | None = None
    ray_image: str | None = None
    node_label: str | None = None


class DeploymentTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Where a fleet runs: `label` = `value` on every node of it; `resource` is one device.

    `ray_image` None: no image of Ray with an LLM engine is known for the vendor's devices.
    """

    label: str
    value: str
    resource: str
    image: str
    ray_image: str | None


def resolve_target(device: Accelerator, asked: ManifestOptions) -> DeploymentTarget:
    """Raises BadInput for an image or a label that is not one, CannotRun where none is known."""
    known = _known()
    if asked.cluster not in cluster_names():
        raise BadInput("unknown cluster", value=asked.cluster, limit=", ".join(cluster_names()))
    image = next((row for row in known.image if row.vendor == device.vendor), None)
    if image is None:
        raise CannotRun(
            f"no image of vLLM and no device plugin is known here for {device.name}",
            value=device.name,
            limit="devices of " + ", ".join(row.vendor for row in known.image),
            fix="leave out --manifests, or choose another --device",
        )
    label, value = _node(device, asked, known.cluster)
    return DeploymentTarget(
        label=label,
        value=value,
        resource=image.resource,
        image=require_pinned(asked.image or image.vllm),
        ray_image=require_pinned(asked.ray_image) if asked.ray_image else image.ray,
    )


def require_pinned(image: str) -> str:
    """The image as given. BadInput where its name does not say which one it is for good."""
    found = _IMAGE.fullmatch(image)
    tag, digest = (found["tag"], found["digest"]) if found else (None, None)
    if found is None or not (tag or digest):
        what = "an image needs a tag or a digest"
    elif digest is None and tag in MOVING:
        what = "this tag moves: what it starts tomorrow is not what was planned for"
    else:
        return image
    raise BadInput(what, value=image, limit="NAME:TAG or NAME@sha256:…", fix="name a release")


def cluster_names() -> tuple[str, ...]:
    """What `Asked.cluster` may be."""
    return tuple(dict.fromkeys(row.name for row in _known().cluster))


def _node(
    device: Accelerator, asked: ManifestOptions, clusters: Sequence[_Cluster]
) -> tuple[str, str]:
    if asked.node_label is not None:
        key, _, value = asked.node_label.partition("=")
        if not (_LABEL.fullmatch(key) and _VALUE.fullmatch(value)):
            raise BadInput("a node label is KEY=VALUE", value=asked.node_label)
        return key, value
    for row in clusters:
        if row.name == asked.cluster and device.name in row.devices:
            return row.label, row.devices[device.name]
    elsewhere = [row.name for row in clusters if device.name in row.devices]
    raise CannotRun(
        f"what {asked.cluster} calls nodes with {device.name} is not known here",
        value=device.name,
        limit=f"known for {', '.join(elsewhere)}" if elsewhere else None,
        fix="say it: --node-label KEY=VALUE (kubectl get nodes --show-labels)",
    )


@lru_cache(maxsize=1)
def _known() -> _Known:
    text = files("ridgeline.plan.deploy").joinpath("clusters.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), _Known)
