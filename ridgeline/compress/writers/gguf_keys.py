"""The metadata of a model in a GGUF file, under the keys that llama.cpp's converter writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ridgeline.modelspec.checkpoints.gguf_architectures.rows import YARN_MULTIPLIER
from ridgeline.modelspec.model import LayerSpec, ModelSpec, RopeSpec
from ridgeline.modelspec.rope import attention_factor

WRITTEN = {
    "llama": "llama",
    "mistral": "llama",
    "ministral3": "mistral3",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "apertus": "apertus",
    "smollm3": "smollm3",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "granite": "granite",
    "seed_oss": "seed_oss",
    "exaone4": "exaone4",
    "ernie4_5": "ernie4_5",
    "glm4": "glm4",
    "glm": "chatglm",
    "arcee": "arcee",
    "llama4_text": "llama4",
    "qwen2_moe": "qwen2moe",
    "glm4_moe": "glm4moe",
    "solar_open": "glm4moe",
    "dots1": "dots1",
    "exaone_moe": "exaone-moe",
    "olmoe": "olmoe",
    "mellum": "mellum",
    "minimax_m2": "minimax-m2",
    "gpt_oss": "gpt-oss",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "kimi_k2": "deepseek2",
    "youtu": "deepseek2",
    "glm4_moe_lite": "deepseek2",
    "qwen3_next": "qwen3next",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_5_text": "qwen35",
    "gemma4_text": "gemma4",
}
"""Families that are written, and llama.cpp's name of their architecture."""

_GATING = {"softmax": 1, "sigmoid": 2}
_LIKE_DEEPSEEK = ("glm4moe", "deepseek2", "dots1", "exaone-moe")


def full_rope(spec: ModelSpec) -> RopeSpec:
    """The rotary embedding of layers that see everything, or of those that have one."""
    turning = [layer for layer in spec.layers if layer.attention.rope.dim]
    full = [layer for layer in turning if layer.attention.window is None] or turning
    return (full or list(spec.layers))[0].attention.rope


def model_keys(spec: ModelSpec, lists: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """The keys of the architecture; and `lists`, whose keys llama.cpp wants without its name."""
    name = WRITTEN[spec.family]
    found = {
        "block_count": len(spec.layers),
        "context_length": spec.max_positions,
        "embedding_length": spec.hidden_size,
        "feed_forward_length": _feed_forward(spec),
        "vocab_size": spec.vocab_size,
        _EPSILONS[spec.norm_centred]: float(spec.norm_eps),
        **(_gemma4_heads(spec) if spec.family == "gemma4_text" else _heads(spec)),
        **_delta_nets(spec),
        **_rope(spec),
        **_windows(spec),
        **_experts(spec),
        **_scales(spec),
    }
    return {**{f"{name}.{key}": value for key, value in found.items()}, **lists}


_EPSILONS = {False: "attention.layer_norm_rms_epsilon", True: "attention.layer_norm_epsilon"}


def _feed_forward(spec: ModelSpec) -> int | list[int]:
    """The size of a dense layer; where every layer has experts, that of an expert."""
    if spec.family == "gemma4_text":  # whose dense MLPs stand next to the experts
        sizes = [(layer.mlp.shared or layer.mlp).up.num_out for layer in spec.layers]
        return _one_if_equal(sizes)
    dense = (layer.mlp for layer in spec.layers if layer.mlp.router is None)
    return next(dense, spec.layers[0].mlp).up.num_out


def _one_if_equal(numbers: list[int]) -> int | list[int]:
    return numbers[0] if len(set(numbers)) == 1 else numbers


def _heads(spec: ModelSpec) -> dict[str, Any]:
    layers = [layer.attention for layer in spec.layers if layer.attention.delta is None]
    attention = (layers or [spec.layers[0].attention])[0]
    latent = attention.latent
    if latent is None:
        return {
            "attention.head_count": attention.num_heads,
            "attention.head_count_kv": attention.num_kv_heads,
            "attention.key_length": attention.head_dim,
            "attention.value_length": attention.head_dim,
        }
    heads, rank = attention.num_heads, latent.rank
    found = {
        "attention.head_count": heads,
        "attention.head_count_kv": 1,  # the compressed row serves every head
        "attention.key_length": rank + attention.rope.dim,
        "attention.value_length": rank,
        "attention.key_length_mla": attention.head_dim,
        "attention.value_length_mla": attention.v.num_out // heads,
        "attention.kv_lora_rank": rank,
    }
    if latent.q_down is not None:
        found["attention.q_lora_rank"] = latent.q_down.num_out
    return found


def _gemma4_heads(spec: ModelSpec) -> dict[str, Any]:
    """Heads of two sizes, caches that layers share, and inputs of layers."""
    layers = [layer.attention for layer in spec.layers]
    full = next((one for one in layers if one.window is None), layers[0])
    sliding = next((one for one in layers if one.window is not None), layers[0])
    inputs = spec.layers[0].layer_input
    found = {
        "attention.head_count": full.num_heads,
        "attention.head_count_kv": _one_if_equal([one.num_kv_heads for one in layers]),
        "attention.shared_kv_layers": sum(one.shares_kv for one in layers),
        "embedding_length_per_layer_input": 0 if inputs is None else inputs.size,
    }
    for end, one in (("", full), ("_swa", sliding)):
        for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
            found[key + end] = one.head_dim
    return found


def _delta_nets(spec: ModelSpec) -> dict[str, Any]:
    kinds = [layer.attention.delta for layer in spec.layers]
    delta = next((kind for kind in kinds if kind is not None), None)
    if delta is None:
        return {}
    found: dict[str, Any] = {
        "ssm.conv_kernel": delta.conv_size,
        "ssm.state_size": delta.key_dim,
        "ssm.group_count": delta.num_key_heads,
        "ssm.time_step_rank": delta.num_value_heads,
        "ssm.inner_size": delta.num_value_heads * delta.value_dim,
        "attention.recurrent_layers": [kind is not None for kind in kinds],
        "full_attention_interval": next((i for i, kind in enumerate(kinds, 1) if not kind), 0),
    }
    if spec.family != "qwen3_next":  # positions of images, which on text are all alike
        third, more = divmod(full_rope(spec).dim // 2, 3)
        sections = [third + (more > 0), third + (more > 1), third, 0]
        found["rope.dimension_sections"] = sections
    return found


def _rope(spec: ModelSpec) -> dict[str, Any]:
    rope = full_rope(spec)
    found: dict[str, Any] = {
        "rope.freq_base": float(rope.theta),
        "rope.dimension_count": rope.dim,
    }
    two_bases = spec.family in ("gemma3_text", "gemma4_text")
    bases = {layer.attention.rope.theta for layer in spec.layers if layer.attention.window}
    if two_bases and bases:
        found["rope.freq_base_swa"] = float(min(bases))
    if rope.kind == "longrope":
        found["rope.scaling.attn_factor"] = float(attention_factor(rope))
        found["rope.scaling.original_context_length"] = rope.original_max_positions
    if spec.norm_centred:
        found["rope.scaling.type"] = "none"
    if rope.kind not in ("linear", "yarn"):
        return found
    found |= {"rope.scaling.type": rope.kind, "rope.scaling.factor": float(rope.factor)}
    if rope.original_max_positions is not None:
        found["rope.scaling.original_context_length"] = rope.original_max_positions
    if (rope.beta_fast, rope.beta_slow) != _YARN_LIMITS:
        found["rope.scaling.yarn_beta_fast"] = float(rope.beta_fast)
        found["rope.scaling.yarn_beta_slow"] = float(rope.beta_slow)
    if rope.mscale_all_dim:  # a tenth in older architectures
        of_deepseek = WRITTEN[spec.family] == "deepseek2"
        found[YARN_MULTIPLIER] = (0.1 if of_deepseek else 1.0) * rope.mscale_all_dim
    if rope.query_floor is not None:
        found["attention.temperature_scale"] = float(rope.query_scale)
    return found


_YARN_LIMITS = (RopeSpec(dim=0, theta=1.0).beta_fast, RopeSpec(dim=0, theta=1.0).beta_slow)


def _windows(spec: ModelSpec) -> dict[str, Any]:
    windows = [layer.attention.window for layer in spec.layers]
    largest = max((window for window in windows if window), default=None)
    if spec.family == "phi3":  # 0 tells Phi-4 from the others
        return {"attention.sliding_window": largest or 0}
    if spec.family == "llama4_text" and not any(layer.attention.chunk for layer in spec.layers):
        return {"attention.sliding_window": 0}
    if largest is None:
        return {}
    return {
        "attention.sliding_window": largest,
        "attention.sliding_window_pattern": [window is not None for window in windows],
    }


def _experts(spec: ModelSpec) -> dict[str, Any]:
    places = [i for i, layer in enumerate(spec.layers) if layer.mlp.router is not None]
    if not places and spec.family == "youtu":
        sizes = {"leading_dense_block_count": len(spec.layers), "expert_shared_count": 0}
        return {**sizes, "expert_feed_forward_length": _feed_forward(spec)}
    if not places:
        return {}
    layer, name = spec.layers[places[0]], WRITTEN[spec.family]
    mlp, routing = layer.mlp, layer.mlp.routing
    found: dict[str, Any] = {
        "expert_count": mlp.num_experts,
        "expert_used_count": mlp.experts_per_token,
        "expert_feed_forward_length": mlp.up.num_out,
    }
    if mlp.shared is not None and name in ("qwen2moe", "qwen35moe", "qwen3next", "exaone-moe"):
        found["expert_shared_feed_forward_length"] = mlp.shared.up.num_out
    if name == "llama4":
        found["interleave_moe_layer_step"] = places[0] + 1
    if name in ("minimax-m2", *_LIKE_DEEPSEEK):
        found["expert_gating_func"] = _GATING[routing.scoring]
    if name in _LIKE_DEEPSEEK:
        found |= _deepseek_experts(layer)
        found["leading_dense_block_count"] = places[0]
    return found


def _deepseek_experts(layer: LayerSpec) -> dict[str, Any]:
    mlp, routing = layer.mlp, layer.mlp.routing
    shared = 0 if mlp.shared is None else mlp.shared.up.num_out
    return {
        "expert_shared_count": shared // mlp.up.num_out,
        "expert_weights_scale": float(routing.scale),
        "expert_weights_norm": mlp.norm_topk,
        "expert_group_count": routing.num_groups,
        "expert_group_used_count": routing.groups_per_token,
    }


def _scales(spec: ModelSpec) -> dict[str, Any]:
    """Factors of embeddings, scores, residuals and logits, and what bounds the last."""
    layer, found = spec.layers[0], dict[str, Any]()
    if spec.family == "granite":
        found = {
            "attention.scale": float(layer.attention.scale),
            "embedding_scale": float(spec.embed_scale),
            "residual_scale": float(layer.residual_scale),
            "logit_scale": 1.0 / spec.logit_scale,
        }
    if spec.norm_centred:
        found["logit_scale"] = float(spec.logit_scale)
    if layer.attention.softcap is not None:
        found["attn_logit_softcapping"] = float(layer.attention.softcap)
    if spec.family == "gemma4_text":  # llama.cpp bounds logits by 30 where the key is absent
        found["final_logit_softcapping"] = float(spec.final_softcap or 0.0)
    elif spec.final_softcap is not None:
        found["final_logit_softcapping"] = float(spec.final_softcap)
    return found
