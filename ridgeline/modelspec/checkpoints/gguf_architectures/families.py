"""What llama.cpp knows of a family without a key that says so."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ridgeline.errors import BadModel
from ridgeline.modelspec.checkpoints.gguf_architectures.keys import count, heads
from ridgeline.modelspec.checkpoints.gguf_architectures.rope import frequency_factors, scaling_of
from ridgeline.modelspec.checkpoints.gguf_architectures.rows import (
    PREDICTION,
    ROUTER,
    SAFETENSORS,
    YARN_MULTIPLIER,
    Architecture,
)
from ridgeline.modelspec.checkpoints.gguf_header import Gguf


def special_config(file: Gguf, keys: Mapping[str, Any], row: Architecture) -> dict[str, Any]:
    """What llama.cpp knows of a family without a key that says so."""
    num_layers = keys.get("block_count")
    if row.family == "qwen3_moe":  # llama.cpp renormalises, whatever the original says
        depth = range(num_layers if isinstance(num_layers, int) and num_layers < 4096 else 0)
        plain = [i for i in depth if ROUTER.format(i) not in file.tensors]
        return {"norm_topk_prob": True, "mlp_only_layers": plain}
    if row.family == "phi3":
        return {
            "original_max_position_embeddings": keys.get(
                "rope.scaling.original_context_length", keys.get("context_length")
            )
        }
    if row.family in ("qwen2_moe", "glm4_moe", "minimax_m2", "dots1", "exaone_moe"):
        return _expert_config(file, keys, row)
    if row.family == "olmoe":  # llama.cpp never renormalises, whatever the original says
        return {"norm_topk_prob": False}
    if row.family == "mellum":
        return _mellum_config(file, keys)
    if row.family == "ministral3":
        return _scaled_queries(keys)
    if row.family in DELTA_NETS:
        return _delta_config(file, keys, row)
    if row.family == "apertus" and not frequency_factors(file) and not scaling_of(keys):
        return {"rope_scaling": {"rope_type": "default"}}  # the family's own default is llama3
    if row.family == "llama4_text":
        return _llama4_config(file, keys)
    if row.family == "cohere":
        return {"use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors}
    if row.family == "cohere2":
        return window_kinds(file, keys, 4)
    if row.family not in ("gemma2", "gemma3_text"):
        return {}
    out: dict[str, Any] = {}
    largest = 46 if row.family == "gemma2" else 62  # the 27B models scale by the width
    if num_layers == largest:
        out["query_pre_attn_scalar"] = count(file, keys, "embedding_length") // heads(file, keys)
    else:
        out["query_pre_attn_scalar"] = keys.get("attention.key_length")
    return out | window_kinds(file, keys, 2 if row.family == "gemma2" else 6)


_SIGMOID = 2


def _expert_config(file: Gguf, keys: Mapping[str, Any], row: Architecture) -> dict[str, Any]:
    """How experts are chosen: scores of Qwen2-MoE are never renormalised in llama.cpp."""
    if row.family == "qwen2_moe":
        layers = range(min(count(file, keys, "block_count"), 4096))
        plain = [i for i in layers if ROUTER.format(i) not in file.tensors]
        return {"norm_topk_prob": False, "mlp_only_layers": plain}
    if keys.get("expert_gating_func", _SIGMOID) != _SIGMOID:
        raise BadModel(
            "the experts of this GGUF file are chosen by another function than a sigmoid",
            value=f"expert_gating_func {keys['expert_gating_func']}",
            limit=_SIGMOID,
            fix=SAFETENSORS,
        )
    if row.family == "minimax_m2":
        return {"rotary_dim": keys.get("rope.dimension_count"), "partial_rotary_factor": None}
    depth = count(file, keys, "block_count") - int(keys.get(PREDICTION) or 0)
    out = {
        "num_hidden_layers": depth,
        "first_k_dense_replace": keys.get("leading_dense_block_count", 0),
        "norm_topk_prob": bool(keys.get("expert_weights_norm", False)),
        "routed_scaling_factor": keys.get("expert_weights_scale") or 1.0,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
    }
    if row.family == "glm4_moe":
        out["use_qk_norm"] = "blk.0.attn_q_norm.weight" in file.tensors
    if row.family == "exaone_moe":
        out |= _exaone_experts(file, keys, depth)
    return out


def _exaone_experts(file: Gguf, keys: Mapping[str, Any], depth: int) -> dict[str, Any]:
    """K-EXAONE: the size of the shared expert, and windows in every layer but each fourth."""
    size = count(file, keys, "expert_feed_forward_length")
    shared = keys.get("expert_shared_feed_forward_length") or size
    if not isinstance(shared, int) or shared % size:
        raise BadModel(
            "the GGUF file's shared expert is no multiple of another one", value=shared, limit=size
        )
    count(file, keys, "attention.sliding_window")
    kinds = window_kinds(file, keys, 4)["layer_types"][:depth]
    return {"num_shared_experts": shared // size, "layer_types": kinds}


def _mellum_config(file: Gguf, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Experts in every layer, whose scores are renormalised; windows turn by the only base."""
    windowed = bool(keys.get("attention.sliding_window"))
    out = {
        "norm_topk_prob": True,
        "first_k_dense_replace": 0,
        "rope_local_base_freq": keys.get("rope.freq_base", 10_000.0),
    }
    return out | (window_kinds(file, keys, 4) if windowed else {})


def _scaled_queries(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Ministral 3: queries that grow beyond the trained context, and YaRN's second multiplier."""
    scaling = scaling_of(keys)
    original = keys.get("rope.scaling.original_context_length")
    if scaling.get("rope_type") != "yarn" or not original:
        raise BadModel(
            "GGUF files whose queries grow with their position need YaRN and its trained context",
            value=str(keys.get("rope.scaling.type")),
            limit="rope.scaling.type yarn, rope.scaling.original_context_length",
            fix=SAFETENSORS,
        )
    multiplier = float(keys.get(YARN_MULTIPLIER) or 0.0)
    if multiplier and "attention_factor" in scaling:
        scaling["attention_factor"] /= 1.0 + 0.1 * multiplier * math.log(scaling["factor"])
    elif multiplier:
        scaling |= {"mscale": 1.0, "mscale_all_dim": multiplier}
    return {
        "rope_scaling": {
            **scaling,
            "original_max_position_embeddings": original,
            "llama_4_scaling_beta": keys.get("attention.temperature_scale") or 0.0,
        }
    }


DELTA_NETS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


def _delta_config(file: Gguf, keys: Mapping[str, Any], row: Architecture) -> dict[str, Any]:
    """Which layers are delta nets, the size of their values, and the rotated part of a head."""
    depth = count(file, keys, "block_count") - int(keys.get(PREDICTION) or 0)
    inner, num = count(file, keys, "ssm.inner_size"), count(file, keys, "ssm.time_step_rank")
    if depth < 1 or inner % num:
        raise BadModel("the GGUF file's sizes of delta nets do not fit", value=inner, limit=num)
    layers = range(min(depth, 4096))
    out: dict[str, Any] = {
        "num_hidden_layers": depth,
        "linear_value_head_dim": inner // num,
        "layer_types": _delta_layers(keys, len(layers)),
        "partial_rotary_factor": count(file, keys, "rope.dimension_count")
        / count(file, keys, "attention.key_length"),
    }
    if row.family == "qwen3_next":
        plain = [i for i in layers if ROUTER.format(i) not in file.tensors]
        out |= {"norm_topk_prob": True, "mlp_only_layers": plain}
    return out


def _delta_layers(keys: Mapping[str, Any], depth: int) -> list[str]:
    """The kind of each layer: flags in files since the summer of 2026, a period in older ones."""
    every = keys.get("full_attention_interval", 4)
    flags = keys.get("attention.recurrent_layers", [bool((i + 1) % every) for i in range(depth)])
    if not isinstance(flags, list) or len(flags) < depth:
        raise BadModel(
            "the GGUF key attention.recurrent_layers must be a list of one flag per layer",
            value=str(flags)[:80],
            limit=depth,
        )
    return ["linear_attention" if flag else "full_attention" for flag in flags[:depth]]


_LARGEST_LLAMA4 = 128
"""Experts of the model whose heads are not normalised."""


def _llama4_config(file: Gguf, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Chunks of 8192 and every fourth layer without rotation, unless the window is 0."""
    pattern = keys.get("attention.sliding_window_pattern", 4)
    if pattern != 4:
        raise BadModel(
            "GGUF files of Llama 4 with another pattern of layers are not supported",
            value=str(pattern)[:80],
            limit=4,
            fix=SAFETENSORS,
        )
    out: dict[str, Any] = {"use_qk_norm": keys.get("expert_count") != _LARGEST_LLAMA4}
    if keys.get("attention.sliding_window") == 0:
        depth = min(count(file, keys, "block_count"), 4096)
        return out | {"attention_chunk_size": None, "no_rope_layers": [1] * depth}
    return out


_WINDOW_PERIODS = {"olmo3": 4, "exaone4": 4, "gpt_oss": 2}
_LAYERS_OF_WINDOWED_EXAONE = 64


def windowed_config(file: Gguf, keys: Mapping[str, Any], row: Architecture) -> dict[str, Any]:
    """Windows and rotary embeddings as llama.cpp computes them, whatever the original says."""
    if row.family == "granite" and keys.get("rope.scaling.finetuned") is False:
        raise BadModel(
            "GGUF files of Granite without rotary embeddings are not supported",
            value="granite.rope.scaling.finetuned false",
            fix=SAFETENSORS,
        )
    if row.family not in _WINDOW_PERIODS:
        return {}
    num_layers = count(file, keys, "block_count")
    if row.family == "exaone4" and num_layers != _LAYERS_OF_WINDOWED_EXAONE:
        if keys.get("attention.sliding_window"):
            raise BadModel(
                "llama.cpp reads windows of EXAONE 4 only in models of "
                f"{_LAYERS_OF_WINDOWED_EXAONE} layers",
                value=f"{num_layers} layers, a window of {keys['attention.sliding_window']}",
                fix=SAFETENSORS,
            )
        return {"sliding_window": None}
    out = window_kinds(file, keys, _WINDOW_PERIODS[row.family])
    if row.family == "exaone4":
        out.setdefault("sliding_window", keys.get("attention.sliding_window") or 4096)
    if row.family == "gpt_oss" and not frequency_factors(file) and not scaling_of(keys):
        out["rope_scaling"] = {"rope_type": "default"}  # the family's own default is yarn
    return out


def window_kinds(file: Gguf, keys: Mapping[str, Any], default: int) -> dict[str, Any]:
    """Which layers slide: a period, or a flag per layer."""
    pattern = keys.get("attention.sliding_window_pattern", default)
    num_layers = count(file, keys, "block_count")
    if default == 6 and not keys.get("attention.sliding_window"):
        pattern = [False] * num_layers
    if isinstance(pattern, int):
        pattern = [bool((i + 1) % max(1, pattern)) for i in range(min(num_layers, 4096))]
    names = ["sliding_attention" if sliding else "full_attention" for sliding in pattern]
    return {"layer_types": names}
