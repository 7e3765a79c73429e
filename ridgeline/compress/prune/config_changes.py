"""The fields of config.json that describe a pruned model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.compress.prune.structure import PrunedShape
from ridgeline.errors import BadModel, CannotRun
from ridgeline.modelspec.checkpoints.packed_config import KEY
from ridgeline.modelspec.families.registry import spec_from_config
from ridgeline.modelspec.model import ModelSpec
from ridgeline.modelspec.rewrite import with_dtype


def config_changes(
    config: Mapping[str, Any], spec: ModelSpec, narrow: ModelSpec, shape: PrunedShape
) -> dict[str, Any]:
    """What differs in the config of `narrow` from that of `spec`.

    Raises CannotRun if a config of this family cannot describe the result, such as a pattern of
    windows with layers missing from it.
    """
    changes: dict[str, Any] = {
        name: [value[index] for index in shape.layers]
        for name, value in config.items()
        if isinstance(value, list) and len(value) == len(spec.layers) > 1 and name != "eos_token_id"
    }
    first, old = narrow.layers[0], spec.layers[0]
    if len(shape.layers) < len(spec.layers):
        changes["num_hidden_layers"] = len(shape.layers)
    if first.mlp.up.num_out != old.mlp.up.num_out:
        changes["intermediate_size"] = first.mlp.up.num_out
    if first.attention.num_kv_heads != old.attention.num_kv_heads:
        changes |= {
            "num_attention_heads": first.attention.num_heads,
            "num_key_value_heads": first.attention.num_kv_heads,
            "head_dim": first.attention.head_dim,
        }
    for extra in ({}, {"layer_types": _layer_types(narrow)}):
        if _described({**config, **changes, **extra}, narrow):
            return changes | extra
    raise CannotRun(
        "a config.json of this family cannot describe the pruned model",
        value=spec.family,
        fix="remove other parts, or none of its layers",
    )


def _layer_types(spec: ModelSpec) -> list[str]:
    return [
        "full_attention" if layer.attention.window is None else "sliding_attention"
        for layer in spec.layers
    ]


def _described(config: Mapping[str, Any], narrow: ModelSpec) -> bool:
    plain = {name: value for name, value in config.items() if name != KEY}
    plain.setdefault("dtype", plain.get("torch_dtype") or narrow.stored_dtype)
    try:
        found = with_dtype(spec_from_config(plain, name=narrow.name), "float32")
    except BadModel:
        return False
    return found.layers == narrow.layers
