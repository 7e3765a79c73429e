"""Families with latent attention: DeepSeek V2 and V3, Kimi K2, GLM-4.7-Flash, Mistral Small 4."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.modelspec.families import layer_kinds as kinds
from ridgeline.modelspec.families.config_fields import ConfigFields
from ridgeline.modelspec.families.family import COMMON, Family, MoeFields
from ridgeline.modelspec.families.rope_config import RopeFields
from ridgeline.modelspec.format import Format
from ridgeline.modelspec.model import AttentionSpec, LatentSpec, LinearSpec, RopeSpec


def latent_attention(values: ConfigFields, fmt: Format, rope: RopeSpec) -> AttentionSpec:
    """The attention of a layer by `kv_lora_rank`, `q_lora_rank` and the fields of head sizes."""
    hidden_size, heads = values.count("hidden_size"), values.count("num_attention_heads")
    q_rank, kv_rank = values.opt_count("q_lora_rank"), values.count("kv_lora_rank")
    key_dim, rope_dim = values.count("qk_nope_head_dim"), values.count("qk_rope_head_dim")
    value_dim = values.count("v_head_dim")

    def linear(num_out: int, num_in: int) -> LinearSpec:
        return LinearSpec(num_out=num_out, num_in=num_in, format=fmt)

    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=1,
        head_dim=key_dim + rope_dim,
        scale=(key_dim + rope_dim) ** -0.5 * _yarn_scale(rope),
        rope=rope,
        q=linear(heads * (key_dim + rope_dim), q_rank or hidden_size),
        k=linear(heads * key_dim, kv_rank),
        v=linear(heads * value_dim, kv_rank),
        o=linear(hidden_size, heads * value_dim),
        latent=LatentSpec(
            rank=kv_rank,
            rope_dim=rope_dim,
            kv_down=linear(kv_rank + rope_dim, hidden_size),
            q_down=linear(q_rank, hidden_size) if q_rank else None,
        ),
    )


def _yarn_scale(rope: RopeSpec) -> float:
    """The factor of the scores where the rotary embedding is stretched (`mscale_all_dim`)."""
    if rope.kind == "default" or not rope.mscale_all_dim or rope.factor <= 1:
        return 1.0
    return (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2


DEEPSEEK_EXPERTS = MoeFields(
    num_experts_key="n_routed_experts",
    expert_size_key="moe_intermediate_size",
    norm_topk_key="norm_topk_prob",
    routed_layers=kinds.sparse_after_first,
    shared_count_key="n_shared_experts",
    scoring="sigmoid",
    correction=True,
    scale_key="routed_scaling_factor",
    groups=lambda values: values.raw("n_group") is not None,
)
"""Of DeepSeek-V3 and the families after it, with latent attention or without."""
_FIXED: dict[str, tuple[object, ...]] = {
    "attention_bias": (False,),
    "moe_layer_freq": (1,),
    "rope_interleave": (True,),
}
_COMMON: dict[str, Any] = {
    **{key: value for key, value in COMMON.items() if key != "head_dim"},
    # saved by transformers, and follow from the sizes of the parts
    "head_dim": None,
    "qk_head_dim": None,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "norm_topk_prob": True,
}
_DEEPSEEK_V3 = Family(
    architecture="DeepseekV3ForCausalLM",
    defaults={
        **_COMMON,
        "vocab_size": 129_280,
        "hidden_size": 7168,
        "intermediate_size": 18_432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "routed_scaling_factor": 2.5,
        "q_lora_rank": 1536,
        "v_head_dim": 128,
        "qk_nope_head_dim": 128,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "max_position_embeddings": 4096,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    aliases={"num_local_experts": "n_routed_experts"},
    latent=True,
    rope=RopeFields(interleaved=True),
    moe=DEEPSEEK_EXPERTS,
    fixed={**_FIXED, "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
)

LATENT_FAMILIES: Mapping[str, Family] = {
    "deepseek_v2": Family(
        architecture="DeepseekV2ForCausalLM",
        defaults={
            **_COMMON,
            "vocab_size": 102_400,
            "hidden_size": 4096,
            "intermediate_size": 11_008,
            "moe_intermediate_size": 1407,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "n_shared_experts": 2,
            "n_routed_experts": 64,
            "routed_scaling_factor": 1.0,
            "q_lora_rank": 1536,
            "v_head_dim": 128,
            "qk_nope_head_dim": 128,
            "topk_method": "greedy",
            "n_group": None,
            "topk_group": None,
            "num_experts_per_tok": None,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "max_position_embeddings": 2048,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        aliases={"num_experts": "n_routed_experts"},
        latent=True,
        rope=RopeFields(interleaved=True),
        moe=replace(
            DEEPSEEK_EXPERTS,
            scoring="softmax",
            correction=False,
            groups=lambda values: (
                values.choice(
                    "topk_method",
                    {"greedy": "greedy", "group_limited_greedy": "groups"},
                )
                == "groups"
            ),
        ),
        fixed={**_FIXED, "scoring_func": ("softmax",), "mlp_bias": (False,)},
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "mistral4": Family(
        architecture="Mistral4ForCausalLM",
        defaults={
            **_COMMON,
            "vocab_size": 131_072,
            "hidden_size": 4096,
            "intermediate_size": 12_288,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "n_shared_experts": 1,
            "n_routed_experts": 128,
            "routed_scaling_factor": 1.0,
            "kv_lora_rank": 256,
            "q_lora_rank": 1024,
            "v_head_dim": 128,
            "qk_nope_head_dim": 64,
            "num_experts_per_tok": 4,
            "first_k_dense_replace": 0,
            "max_position_embeddings": 1_048_576,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        aliases={"num_local_experts": "n_routed_experts"},
        latent=True,
        rope=RopeFields(
            interleaved=True,
            scales_queries=True,
            ignored=frozenset(("partial_rotary_factor",)),  # the rotated part of a head
            scaling={
                "rope_type": "yarn",
                "factor": 128.0,
                "original_max_position_embeddings": 8192,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        ),
        moe=replace(DEEPSEEK_EXPERTS, scoring="softmax", correction=False, groups=None),
        fixed={
            **{key: _FIXED[key] for key in ("attention_bias", "rope_interleave")},
            "n_group": (1, None),
            "topk_group": (1, None),
        },
    ),
    "youtu": Family(
        architecture="YoutuForCausalLM",
        defaults={
            **{key: value for key, value in _COMMON.items() if key != "norm_topk_prob"},
            "vocab_size": 128_256,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": 1536,
            "v_head_dim": 128,
            "qk_nope_head_dim": 128,
            "max_position_embeddings": 131_072,
            "bos_token_id": 128_000,
            "eos_token_id": 128_001,
            "tie_word_embeddings": True,
        },
        latent=True,
        rope=RopeFields(interleaved=True),
        fixed={key: _FIXED[key] for key in ("attention_bias", "rope_interleave")},
    ),
    "glm4_moe_lite": Family(
        architecture="Glm4MoeLiteForCausalLM",
        defaults={
            **_COMMON,
            "vocab_size": 154_880,
            "hidden_size": 2048,
            "intermediate_size": 10_240,
            "moe_intermediate_size": 1536,
            "num_hidden_layers": 47,
            "num_attention_heads": 20,
            "num_key_value_heads": 20,
            "n_shared_experts": 1,
            "n_routed_experts": 64,
            "routed_scaling_factor": 1.8,
            "q_lora_rank": 768,
            "v_head_dim": 256,
            "qk_nope_head_dim": 192,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 4,
            "max_position_embeddings": 202_752,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "mlp_layer_types": None,
            "first_k_dense_replace": 1,
        },
        aliases={"num_local_experts": "n_routed_experts"},
        latent=True,
        rope=RopeFields(interleaved=True),
        moe=replace(DEEPSEEK_EXPERTS, routed_layers=kinds.sparse_by_type),
        fixed={**_FIXED, "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
    ),
}
