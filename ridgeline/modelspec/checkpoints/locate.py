"""Where a model's files are: built in, a directory, a GGUF file, or the cache of downloads."""

from __future__ import annotations

import difflib
from pathlib import Path

from ridgeline.errors import BadModel
from ridgeline.hub.cache import find_cached
from ridgeline.hub.names import parse_remote
from ridgeline.hub.registry_models import registry_models
from ridgeline.modelspec.families.shapes import (
    hub_repository,
    known_shapes,
    shape_of_repository,
    shape_table,
)

BUILT_IN = ("demo", "demo-draft")
_DUMMY = "dummy:"
_FIX = (
    "name a model directory, a GGUF file, OWNER/REPO of the Hugging Face Hub, 'smollm2' or 'demo'"
)
_UNSAFE = "pickled weights can run code when loaded; convert them to safetensors"
_FOREIGN = {
    ".gguf": "name the .gguf file itself",
    ".bin": _UNSAFE,
    ".pt": _UNSAFE,
    ".pth": _UNSAFE,
    ".ckpt": _UNSAFE,
    ".safetensors": "name the directory that holds this file and its config.json",
}
_OTHER_KINDS = {
    "adapter_config.json": "this is a LoRA adapter; merge it into its base model first",
    "params.json": "this is Meta's or Mistral's own layout; convert it with transformers",
    "model_index.json": "this is a diffusers pipeline, not a language model",
}


def is_dummy(name: str) -> bool:
    """True for `dummy:NAME`: a published shape with random weights."""
    return name.startswith(_DUMMY)


def is_built_in(name: str) -> bool:
    """True for what needs no directory: a shipped model, or random weights."""
    return name in BUILT_IN or is_dummy(name)


def is_short_name(name: str) -> bool:
    """True for a name without a slash that always means a model: built in, or of the registry."""
    return is_built_in(name) or name in registry_models()


def dummy_shape(name: str) -> str:
    """NAME of `dummy:NAME`."""
    return name.removeprefix(_DUMMY)


def local_path(name: str) -> Path:
    """Where the files of a model are, or would be: a directory or a GGUF file.

    Of a directory without config.json that holds one GGUF file, that is the file. Of a model that
    is published under this name, it is its place in the cache. Raises BadModel where it is not
    downloaded. Never uses the network.
    """
    if name in BUILT_IN:
        return Path(__file__).parents[2] / "assets" / name
    remote = parse_remote(name)
    if remote is None:
        return _only_gguf(Path(name).expanduser())
    cached = find_cached(remote)
    if cached is None:
        raise BadModel(
            "the model is not downloaded, or only in part",
            value=name,
            fix=f"run ridgeline pull {name}, or name a model directory",
        )
    return cached


def _only_gguf(path: Path) -> Path:
    """The GGUF file of a directory that holds one and no config.json; else the path itself."""
    if not path.is_dir() or (path / "config.json").is_file():
        return path
    found = [file for file in path.glob("*.gguf") if file.is_file()]
    return found[0] if len(found) == 1 else path


def model_path(name: str) -> Path:
    """The directory that holds config.json; BadModel says what is there instead, and what to do."""
    if is_dummy(name):
        raise BadModel("a dummy model has no directory", value=name, fix="load it by its shape")
    path = local_path(name)
    if not path.exists():
        raise BadModel("there is no such model directory", value=name, fix=_missing_fix(name))
    if not path.is_dir():
        raise BadModel(
            "a model is a directory, and this is a file",
            value=name,
            fix=_FOREIGN.get(path.suffix, _FIX),
        )
    if not (path / "config.json").is_file():
        raise BadModel("the directory holds no config.json", value=name, fix=_what_is_there(path))
    return path


def _missing_fix(name: str) -> str:
    if name in BUILT_IN:
        return "this installation lacks its built-in models; install Ridgeline again"
    shape = shape_of_repository(name) or ""
    repository = hub_repository(shape)
    if repository is not None and "/" not in name:
        dummy = f"; dummy:{shape} is its shape with random weights" * (shape in shape_table())
        return f"on the Hugging Face Hub it is OWNER/REPO, as {repository}{dummy}"
    if shape in shape_table():
        return f"dummy:{shape} is this shape with random weights; for the model itself, {_FIX}"
    if shape in known_shapes():
        return f"inspect, plan and predict know this shape without weights; for others, {_FIX}"
    near = difflib.get_close_matches(name.lower(), (*registry_models(), *known_shapes()), n=3)
    meant = [n if n in registry_models() else hub_repository(n) or _DUMMY + n for n in near]
    return f"perhaps {' or '.join(meant)} is meant; or {_FIX}" if near else _FIX


def _what_is_there(path: Path) -> str:
    names = sorted(child.name for child in path.iterdir())
    for name, meaning in _OTHER_KINDS.items():
        if name in names:
            return meaning
    for name in names:
        if Path(name).suffix in _FOREIGN and Path(name).suffix != ".safetensors":
            return f"it holds {name}: {_FOREIGN[Path(name).suffix]}"
    return _FIX if names else f"the directory is empty; {_FIX}"
