"""Bring a model here: from the cache, or from where it is published."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from ridgeline.errors import DownloadFailed
from ridgeline.hub.cache import cached_file, find_cached, recorded_sha256
from ridgeline.hub.names import HubModel, ModelUrl, RemoteModel, parse_remote
from ridgeline.hub.registry_models import RegistryModel
from ridgeline.hub.repository_files import cached_commit
from ridgeline.records.progress import Observer, silent


def ensure_downloaded(name: str, observer: Observer = silent) -> None:
    """Download the model that `name` stands for, unless it is here or in the cache.

    Raises BadModel for a name that is none, DownloadFailed where it cannot be downloaded.
    """
    model = parse_remote(name)
    if model is not None and find_cached(model) is None:
        download(model, observer)


def download(model: RemoteModel, observer: Observer = silent) -> Path:
    """Download what the cache lacks of a model; returns its directory or its GGUF file.

    The hub is asked for the present commit of a branch.
    """
    if isinstance(model, HubModel):
        from ridgeline.hub.hub_download import download_repository

        return download_repository(model, observer)
    path = find_cached(model)
    if path is not None:
        return path
    path = cached_file(model)
    _check_online(model)
    if isinstance(model, RegistryModel):
        from ridgeline.hub.registry_download import download_registry_model

        download_registry_model(model, path, observer)
    else:
        from ridgeline.hub.url_download import download_url

        download_url(model, path, observer)
    return path


def config_folder(name: str, observer: Observer = silent) -> Path | None:
    """The folder with the config.json of a repository of which no weights are here.

    Downloads that file if needed. None for every other name: of a local model, of a file, or of a
    repository that is in the cache. Raises BadModel, DownloadFailed.
    """
    model = parse_remote(name)
    if not isinstance(model, HubModel) or model.quantization is not None:
        return None
    if find_cached(model) is not None:
        return None
    from ridgeline.hub.hub_download import download_config

    return download_config(model, observer)


def _check_online(model: RegistryModel | ModelUrl) -> None:
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        name = model.name if isinstance(model, RegistryModel) else str(model)
        raise DownloadFailed(
            "the model is not in the cache, and HF_HUB_OFFLINE forbids to download it",
            value=name,
            fix=f"unset HF_HUB_OFFLINE and run ridgeline pull {name}, or name a model that is here",
        )


def pinned_name(name: str) -> str:
    """The name of exactly the files that `name` stands for now: with the commit or the SHA-256.

    Names of local models, and of models that are not downloaded, are returned as they are.
    """
    model = parse_remote(name)
    if isinstance(model, HubModel):
        commit = cached_commit(model)
        return str(msgspec.structs.replace(model, revision=commit)) if commit else name
    if isinstance(model, ModelUrl) and model.sha256 is None:
        digest = recorded_sha256(cached_file(model))
        return str(msgspec.structs.replace(model, sha256=digest))
    return name
