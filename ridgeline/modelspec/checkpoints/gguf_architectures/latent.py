"""DeepSeek V2 and V3, Kimi K2, GLM-4.7-Flash and Youtu: latent attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.errors import BadModel
from ridgeline.modelspec.checkpoints.gguf_architectures.keys import count, heads
from ridgeline.modelspec.checkpoints.gguf_architectures.rope import scaling_of
from ridgeline.modelspec.checkpoints.gguf_architectures.rows import (
    YARN_MULTIPLIER,
    Architecture,
)
from ridgeline.modelspec.checkpoints.gguf_header import Gguf

LATENT = ("deepseek_v2", "deepseek_v3", "youtu")


def latent_config(file: Gguf, keys: Mapping[str, Any], row: Architecture) -> dict[str, Any]:
    """Sizes of heads, the choice of experts and the rotary embedding.

    Files since April 2025 give the sizes of a head under names ending in _mla, and those of the
    compressed cache under the common ones; older files give the former there.
    """
    end = "_mla" if "attention.key_length_mla" in keys else ""
    turned = count(file, keys, "rope.dimension_count")
    key_size = count(file, keys, f"attention.key_length{end}")
    if key_size <= turned:
        raise BadModel(
            "the GGUF file's keys have no part that is not rotated", value=key_size, limit=turned
        )
    out = {
        "head_dim": None,
        "num_key_value_heads": heads(file, keys),
        "q_lora_rank": keys.get("attention.q_lora_rank") or None,
        "qk_nope_head_dim": key_size - turned,
        "v_head_dim": count(file, keys, f"attention.value_length{end}"),
        **_scaled(keys),
    }
    return out if row.family == "youtu" else out | _experts(file, keys, row)


def _experts(file: Gguf, keys: Mapping[str, Any], row: Architecture) -> dict[str, Any]:
    groups, used = keys.get("expert_group_count") or 1, keys.get("expert_group_used_count") or 1
    out = {
        "n_group": groups,
        "topk_group": used,
        "n_shared_experts": count(file, keys, "expert_shared_count"),
        "first_k_dense_replace": keys.get("leading_dense_block_count", 0),
        "norm_topk_prob": bool(keys.get("expert_weights_norm", False)),
        "routed_scaling_factor": keys.get("expert_weights_scale") or 1.0,
    }
    if row.family == "deepseek_v2":
        out["topk_method"] = "group_limited_greedy" if groups > 1 else "greedy"
    return out


def _scaled(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Yarn with a tenth of `mscale_all_dim` in the file, to which llama.cpp takes `mscale` to be
    equal."""
    scaling = scaling_of(keys)
    if not scaling:
        return {}
    original = keys.get("rope.scaling.original_context_length")
    if original:
        scaling["original_max_position_embeddings"] = original
    multiplier = float(keys.get(YARN_MULTIPLIER) or 0.0)
    if scaling["rope_type"] == "yarn" and multiplier:
        scaling["mscale"] = scaling["mscale_all_dim"] = round(10 * multiplier, 6)
    return {"rope_scaling": scaling}
