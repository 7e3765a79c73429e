"""Where downloaded models are cached, found without using the network.

Registry models and files by address lie under Ridgeline's own cache; models of the Hugging Face Hub
lie in its cache ($HF_HOME), where other tools find them too.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from ridgeline.hub.names import HubModel, ModelUrl, RemoteModel
from ridgeline.hub.registry_models import RegistryModel
from ridgeline.hub.repository_files import find_snapshot
from ridgeline.paths import default_cache_dir


def find_cached(model: RemoteModel) -> Path | None:
    """The GGUF file or the directory of a model that was downloaded whole; None if it was not."""
    if isinstance(model, HubModel):
        return find_snapshot(model)
    path = cached_file(model)
    if not path.is_file():
        return None
    if isinstance(model, RegistryModel):
        is_expected = path.stat().st_size == model.num_bytes
    else:
        is_expected = model.sha256 is None or model.sha256 == recorded_sha256(path)
    return path if is_expected else None


def cached_file(model: RegistryModel | ModelUrl) -> Path:
    """Where the file of a model is kept once it is downloaded."""
    if isinstance(model, RegistryModel):
        folder = f"{model.name}-{model.sha256[:12]}"
    else:
        folder = f"url-{hashlib.sha256(model.url.encode()).hexdigest()[:12]}"
    return default_cache_dir() / "models" / folder / model.file_name


def record_sha256(path: Path, digest: str) -> None:
    """Note the SHA-256 of a downloaded file next to it."""
    path.with_name(path.name + ".sha256").write_text(digest, "utf-8")


def recorded_sha256(path: Path) -> str | None:
    """The SHA-256 that was noted when the file was downloaded."""
    try:
        return path.with_name(path.name + ".sha256").read_text("utf-8", "replace").strip()
    except OSError:
        return None
