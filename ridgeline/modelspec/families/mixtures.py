"""Families with routed experts, beyond Mixtral and Qwen3-MoE."""

from __future__ import annotations

from collections.abc import Mapping

from ridgeline.modelspec.families import layer_kinds as kinds
from ridgeline.modelspec.families.family import COMMON, Family, MoeFields
from ridgeline.modelspec.families.rope_config import RopeFields

MIXTURES: Mapping[str, Family] = {
    "gpt_oss": Family(
        architecture="GptOssForCausalLM",
        defaults={
            **COMMON,
            "vocab_size": 201_088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "sliding_window": 128,
            "layer_types": None,
            "attention_bias": True,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
        },
        aliases={
            "num_experts": "num_local_experts",
            "experts_per_token": "num_experts_per_tok",
            "initial_context_length": "original_max_position_embeddings",
        },
        layer_kinds=kinds.alternating,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        activation="clamped_swiglu",
        sinks=True,
        rope=RopeFields(
            default_theta=150_000.0,
            scaling={
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        ),
        moe=MoeFields(
            num_experts_key="num_local_experts", expert_size_key="intermediate_size", bias=True
        ),
        fixed={
            "hidden_act": ("silu",),
            "swiglu_alpha": (1.702,),
            "swiglu_limit": (7.0,),
        },
    ),
}
