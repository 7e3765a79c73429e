"""Selects the nodes and container images of a deployment.

Nodes are selected by a label that the cluster sets; which label depends on the cluster's provider.
Images are pinned by a release tag or a digest: with a moving tag such as `latest`, the next restart
of a pod could start a different engine version from the one that was planned for.
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
    """Images for a vendor's devices. `resource`: the device plugin's name of one device."""

    vendor: str
    resource: str
    vllm: str
    source: str
    as_of: str
    ray: str | None = None
    sglang: str | None = None
    trtllm: str | None = None


class _Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A node label, and its value by the catalogue's device name."""

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
    """The user's choices for a deployment; None: the known default."""

    cluster: str = DEFAULT_CLUSTER
    image: str | None = None
    ray_image: str | None = None
    node_label: str | None = None


class DeploymentTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes and images of a deployment: node label `label` = `value`, device resource `resource`.

    `ray_image` None: no Ray image with an LLM engine is known for the vendor's devices, and so for
    SGLang and TensorRT-LLM. `image`: of vLLM.
    """

    label: str
    value: str
    resource: str
    image: str
    ray_image: str | None
    sglang_image: str | None = None
    trtllm_image: str | None = None


def resolve_target(device: Accelerator, options: ManifestOptions) -> DeploymentTarget:
    """Resolve nodes and images for a device. Raises BadInput for a malformed image or label,
    CannotRun if none is known."""
    known = _known()
    if options.cluster not in cluster_names():
        raise BadInput("unknown cluster", value=options.cluster, limit=", ".join(cluster_names()))
    image = next((row for row in known.image if row.vendor == device.vendor), None)
    if image is None:
        raise CannotRun(
            f"no vLLM image and no device plugin are known for {device.name}",
            value=device.name,
            limit="devices of " + ", ".join(row.vendor for row in known.image),
            fix="leave out --manifests, or choose another --accelerator",
        )
    label, value = _node(device, options, known.cluster)
    return DeploymentTarget(
        label=label,
        value=value,
        resource=image.resource,
        image=require_pinned(options.image or image.vllm),
        ray_image=require_pinned(options.ray_image) if options.ray_image else image.ray,
        sglang_image=image.sglang,
        trtllm_image=image.trtllm,
    )


def require_pinned(image: str) -> str:
    """Return the image name. Raises BadInput unless it has a digest or a release tag."""
    match = _IMAGE.fullmatch(image)
    tag, digest = (match["tag"], match["digest"]) if match else (None, None)
    if match is None or not (tag or digest):
        what = "an image needs a tag or a digest"
    elif digest is None and tag in MOVING:
        what = "the image has a moving tag, which may start another version later"
    else:
        return image
    raise BadInput(what, value=image, limit="NAME:TAG or NAME@sha256:…", fix="name a release")


def cluster_names() -> tuple[str, ...]:
    """The known values of `ManifestOptions.cluster`."""
    return tuple(dict.fromkeys(row.name for row in _known().cluster))


def _node(
    device: Accelerator, options: ManifestOptions, clusters: Sequence[_Cluster]
) -> tuple[str, str]:
    if options.node_label is not None:
        key, _, value = options.node_label.partition("=")
        if not (_LABEL.fullmatch(key) and _VALUE.fullmatch(value)):
            raise BadInput("a node label must have the form KEY=VALUE", value=options.node_label)
        return key, value
    for row in clusters:
        if row.name == options.cluster and device.name in row.devices:
            return row.label, row.devices[device.name]
    elsewhere = [row.name for row in clusters if device.name in row.devices]
    raise CannotRun(
        f"the node label of {device.name} on {options.cluster} is unknown",
        value=device.name,
        limit=f"known for {', '.join(elsewhere)}" if elsewhere else None,
        fix="use --node-label KEY=VALUE (see kubectl get nodes --show-labels)",
    )


@lru_cache(maxsize=1)
def _known() -> _Known:
    text = files("ridgeline.plan.deploy").joinpath("clusters.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), _Known)
