"""How an embedding model wants its states pooled: the files of sentence-transformers.

`modules.json` lists the steps after the model; `1_Pooling/config.json` says which states are
pooled. Steps that Ridgeline does not have (a dense layer after pooling) are errors, because leaving
one out would give other vectors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from ridgeline.errors import BadModel
from ridgeline.modelspec.checkpoints.json_files import read_json, read_json_objects
from ridgeline.modelspec.checkpoints.locate import is_dummy, local_path

Pooling = Literal["mean", "last"]
_MODES: dict[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}


class EmbeddingSettings(msgspec.Struct, frozen=True):
    """Pooling over the last layer's states, and whether vectors are scaled to length 1.

    `source` says where this comes from.
    """

    pooling: Pooling = "mean"
    normalize: bool = True
    source: str = "the default: the model has no modules.json of sentence-transformers"


def embedding_settings(model: str) -> EmbeddingSettings:
    """The settings of a model by any of its names. Raises BadModel for an unsupported step."""
    if is_dummy(model):
        return EmbeddingSettings()
    directory = local_path(model)
    file = directory / "modules.json"
    if not file.is_file():
        return EmbeddingSettings()
    modules = read_json_objects(file)
    types = [str(module.get("type", "")).rsplit(".", 1)[-1] for module in modules]
    unknown = [name for name in types if name not in ("Transformer", "Pooling", "Normalize")]
    if unknown:
        raise BadModel(
            "modules.json has a step that Ridgeline does not run",
            value=unknown[0],
            limit="Transformer, Pooling, Normalize",
        )
    pooling: Pooling = "mean"
    for name, module in zip(types, modules, strict=True):
        if name == "Pooling":
            pooling = _pooling(directory / str(module.get("path", "1_Pooling")) / "config.json")
    return EmbeddingSettings(pooling, "Normalize" in types, "modules.json and its pooling config")


def _pooling(file: Path) -> Pooling:
    config = read_json(file)
    modes = [key for key, value in config.items() if key.startswith("pooling_mode_") and value]
    if isinstance(config.get("pooling_mode"), str):  # as newer versions write it
        modes = [f"pooling_mode_{config['pooling_mode']}"]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise BadModel(
            f"{file.parent.name}/{file.name}: the pooling is not supported",
            value=", ".join(modes) or "none",
            limit=", ".join(_MODES),
        )
    return _MODES[modes[0]]
