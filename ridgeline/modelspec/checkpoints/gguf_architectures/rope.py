"""Rotary embeddings of GGUF files: how much of a head turns, and how fast."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ridgeline.errors import BadModel
from ridgeline.modelspec.checkpoints.gguf_architectures.keys import keys_of
from ridgeline.modelspec.checkpoints.gguf_architectures.rows import SAFETENSORS
from ridgeline.modelspec.checkpoints.gguf_header import Gguf, float_list


def rope_config(file: Gguf, keys: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary embedding: how much of a head turns, and how its frequencies are scaled."""
    out: dict[str, Any] = {}
    head_dim, turned = config.get("head_dim"), keys.get("rope.dimension_count")
    if keys.get("attention.value_length", head_dim) != head_dim:
        raise BadModel(
            "GGUF files with values of another size than keys are not supported",
            value=keys["attention.value_length"],
            limit=head_dim,
        )
    if isinstance(head_dim, int):  # llama.cpp turns the whole head where the key is absent
        part = turned if isinstance(turned, int) and turned else head_dim
        out["partial_rotary_factor"] = part / head_dim
    original = keys.get("rope.scaling.original_context_length")
    scaling = frequency_factors(file) or scaling_of(keys)
    if scaling and original:
        scaling.setdefault("original_max_position_embeddings", original)
    return out | ({"rope_scaling": scaling} if scaling else {})


def frequency_factors(file: Gguf) -> dict[str, Any]:
    """Frequencies divided one by one: the same factors at every length (Llama 3.1), or two sets."""
    keys = keys_of(file)
    attention = float(keys.get("rope.scaling.attn_factor", 1.0))
    once = float_list(file, "rope_freqs.weight")
    if once and any(factor != 1.0 for factor in once):
        _refuse_other_scaling(keys, "rope_freqs.weight")
        return {
            "rope_type": "longrope",
            "short_factor": once,
            "long_factor": once,
            "attention_factor": attention,
        }
    long, short = (float_list(file, f"rope_factors_{name}.weight") for name in ("long", "short"))
    if not long and not short:
        return {}
    _refuse_other_scaling(keys, "rope_factors_long.weight")
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "attention_factor": attention,
    }


def _refuse_other_scaling(keys: Mapping[str, Any], tensor: str) -> None:
    kind, factor = keys.get("rope.scaling.type", "none"), keys.get("rope.scaling.factor", 0.0)
    if kind not in ("none", "linear", "longrope") or (
        kind == "linear" and factor not in (0.0, 1.0)
    ):
        raise BadModel(
            f"GGUF files with both {tensor} and rope.scaling.type are not supported",
            value=str(kind),
            fix=SAFETENSORS,
        )


def scaling_of(keys: Mapping[str, Any]) -> dict[str, Any]:
    kind = keys.get("rope.scaling.type", "linear")
    factor = float(keys.get("rope.scaling.factor") or keys.get("rope.scale_linear") or 1.0)
    if kind != "yarn" and keys.get("rope.scaling.attn_factor", 1.0) != 1.0:
        raise BadModel(
            "GGUF files with rope.scaling.attn_factor are supported with YaRN and with factors of "
            "single frequencies only",
            value=keys["rope.scaling.attn_factor"],
            fix=SAFETENSORS,
        )
    if kind == "none" or (kind in ("linear", "longrope") and factor == 1.0):
        return {}
    out = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if keys.get(f"rope.scaling.{theirs}"):
                out[ours] = float(keys[f"rope.scaling.{theirs}"])
        extra = float(keys.get("rope.scaling.attn_factor", 1.0))
        if extra != 1.0:  # llama.cpp multiplies yarn's own factor with it
            out["attention_factor"] = extra * yarn_attention_factor(keys)
    return out


def yarn_attention_factor(keys: Mapping[str, Any]) -> float:
    """YaRN's own factor of q and k, which llama.cpp takes whatever `yarn_attn_factor` says."""
    factor = float(keys.get("rope.scaling.factor") or 1.0)
    return 1.0 + 0.1 * math.log(max(factor, 1.0))
