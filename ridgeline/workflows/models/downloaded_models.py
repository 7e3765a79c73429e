"""The models that are here: built in, or in the caches of downloads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import msgspec

from ridgeline.errors import BadModel, UserError
from ridgeline.hardware.system import memory
from ridgeline.hub.cache import find_cached
from ridgeline.hub.names import HubModel
from ridgeline.hub.registry_models import registry_models
from ridgeline.hub.repository_files import (
    cached_repositories,
    select_files,
    snapshot_files,
)
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.checkpoints.locate import BUILT_IN, local_path
from ridgeline.modelspec.cost import num_params, resident_weight_bytes
from ridgeline.modelspec.rewrite import linears
from ridgeline.paths import default_cache_dir
from ridgeline.report.result import Result

_QUANTIZATION = re.compile(r"(?:^|[._-])((?:UD-)?I?Q\d\w*|MXFP4|BF16|F16|F32)$", re.IGNORECASE)
_PART = re.compile(r"-\d{5}-of-\d{5}$")


class DownloadedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is here.

    `path`: its directory or GGUF file; `commit`: of a repository. `weights` names the format of its
    weights, `num_params` counts them; both are None where the engine cannot read the model, and
    `problem` says why. `fits`: whether the weights fit the memory that is available now.
    """

    name: str
    path: str
    disk_bytes: int
    commit: str | None = None
    family: str | None = None
    weights: str | None = None
    num_params: int | None = None
    memory_bytes: float | None = None
    fits: bool = False
    problem: str | None = None


class DownloadedModels(Result, frozen=True, kw_only=True):
    """What `ridgeline models` lists."""

    models: tuple[DownloadedModel, ...]
    available_bytes: int


def list_downloaded() -> DownloadedModels:
    """Every model that is here, without loading any weights."""
    available = memory().available_bytes
    return DownloadedModels(
        models=tuple(describe_model(name, available) for name in _names()),
        available_bytes=available,
    )


def describe_model(name: str, available_bytes: int) -> DownloadedModel:
    """A downloaded model, from the headers of its files. Raises BadModel if it is not here."""
    path = local_path(name)
    row = DownloadedModel(name=name, path=str(path), disk_bytes=_disk_bytes(path))
    row = msgspec.structs.replace(row, commit=_commit(path))
    try:
        spec = load_spec(name)
    except UserError as error:
        return msgspec.structs.replace(row, problem=str(error))
    resident = resident_weight_bytes(spec)
    formats = {linear.format for linear in linears(spec).values()}
    names = {
        spec.stored_dtype if format.kind == "dense" else f"{format.kind} ({format.bits:g} bits)"
        for format in formats
    }
    quantization = _QUANTIZATION.search(_PART.sub("", path.stem))
    if path.suffix == ".gguf" and quantization:
        names = {quantization[1]}
    return msgspec.structs.replace(
        row,
        family=spec.family,
        weights=" + ".join(sorted(names)),
        num_params=num_params(spec),
        memory_bytes=resident,
        fits=resident < available_bytes,
    )


def _names() -> Iterator[str]:
    for name, model in registry_models().items():
        if find_cached(model) is not None:
            yield name
    yield from (str(file) for file in sorted((default_cache_dir() / "models").glob("url-*/*.gguf")))
    for repo, revision in cached_repositories():
        yield from _names_in(HubModel(repo=repo, revision=revision))
    yield from BUILT_IN


def _names_in(model: HubModel) -> Iterator[str]:
    """The model of a snapshot of safetensors; one per GGUF file otherwise."""
    names = snapshot_files(model)
    ggufs = [name for name in names if name.endswith(".gguf")]
    if not ggufs:
        if find_cached(model) is not None:
            yield str(model)
        return
    stems = {_PART.sub("", PurePosixPath(name).stem) for name in ggufs}
    for stem in sorted(stems):
        match = _QUANTIZATION.search(stem)
        quantization = match[1] if match else stem
        row = msgspec.structs.replace(model, quantization=quantization)
        try:
            select_files(names, row)
        except BadModel:  # two files of one quantisation: only the whole name is unique
            row = msgspec.structs.replace(model, quantization=stem)
        if find_cached(row) is not None:
            yield str(row)


def _commit(path: Path) -> str | None:
    parts = path.parts
    return parts[parts.index("snapshots") + 1] if "snapshots" in parts else None


def _disk_bytes(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
