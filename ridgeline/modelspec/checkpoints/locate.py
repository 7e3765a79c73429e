"""Where a model lives: a built-in one by name, `dummy:NAME`, or a Hugging Face model directory."""

from __future__ import annotations

from pathlib import Path

from ridgeline.errors import BadModel

BUILT_IN = ("demo", "demo-draft")
_DUMMY = "dummy:"
_FIX = "name a Hugging Face model directory, 'demo', or 'dummy:SHAPE' (random weights)"
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


def dummy_shape(name: str) -> str:
    """NAME of `dummy:NAME`."""
    return name.removeprefix(_DUMMY)


def model_path(name: str) -> Path:
    """The directory that holds config.json; BadModel says what is there instead, and what to do."""
    if is_dummy(name):
        raise BadModel("a dummy model has no directory", value=name, fix="load it by its shape")
    path = Path(__file__).parents[2] / "assets" / name if name in BUILT_IN else Path(name)
    path = path.expanduser()
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
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return f"Ridgeline downloads nothing: run hf download {name}, then name its folder"
    return _FIX


def _what_is_there(path: Path) -> str:
    names = sorted(child.name for child in path.iterdir())
    for name, meaning in _OTHER_KINDS.items():
        if name in names:
            return meaning
    for name in names:
        if Path(name).suffix in _FOREIGN and Path(name).suffix != ".safetensors":
            return f"it holds {name}: {_FOREIGN[Path(name).suffix]}"
    return _FIX if names else f"the directory is empty; {_FIX}"
