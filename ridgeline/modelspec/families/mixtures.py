"""Families with routed experts, beyond Mixtral and Qwen3-MoE."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from ridgeline.modelspec.families import layer_kinds as kinds
from ridgeline.modelspec.families.config_fields import ConfigFields
from ridgeline.modelspec.families.family import COMMON, Family, MoeFields
from ridgeline.modelspec.families.latent import DEEPSEEK_EXPERTS
from ridgeline.modelspec.families.rope_config import RopeFields
from ridgeline.modelspec.model import AttentionSpec


def _llama4_attention(values: ConfigFields, attention: AttentionSpec, kind: str) -> AttentionSpec:
    """Chunks and plain norms where q and k rotate; elsewhere q grows with its position."""
    chunk = values.count("attention_chunk_size") if kind == kinds.CHUNKED else None
    rope, is_rotated = attention.rope, attention.rope.dim > 0
    if not is_rotated and values.flag("attn_temperature_tuning"):
        floor, scale = values.count("floor_scale"), values.number("attn_scale")
        rope = replace(rope, query_floor=floor, query_scale=scale)
    normed = is_rotated and values.flag("use_qk_norm")
    return replace(attention, chunk=chunk, rope=rope, qk_norm=normed, qk_norm_plain=normed)


MIXTURES: Mapping[str, Family] = {
    "llama4_text": Family(
        architecture="Llama4ForCausalLM",
        defaults={
            **COMMON,
            "vocab_size": 202_048,
            "hidden_size": 5120,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16_384,
            "num_hidden_layers": 48,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "num_experts_per_tok": 1,
            "num_local_experts": 16,
            "moe_layers": None,
            "interleave_moe_layer_step": 1,
            "use_qk_norm": True,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "attention_chunk_size": 8192,
            "layer_types": None,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
            "attention_bias": False,
        },
        layer_kinds=kinds.chunked_where_rotated,
        rotated=lambda values, _: kinds.rotated_layers(values),
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        rope=RopeFields(default_theta=500_000.0, interleaved=True),
        mlp_size_key="intermediate_size_mlp",
        adjust_attention=_llama4_attention,
        moe=MoeFields(
            num_experts_key="num_local_experts",
            expert_size_key="intermediate_size",
            routed_layers=kinds.sparse_by_list_or_step,
            shared_size_key="intermediate_size",
            scoring="sigmoid",
            weighs_inputs=True,
        ),
        fixed={"for_llm_compressor": (False,)},
    ),
    "qwen2_moe": Family(
        architecture="Qwen2MoeForCausalLM",
        defaults={
            **COMMON,
            "vocab_size": 151_936,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "max_position_embeddings": 32_768,
            # saved, and read only where use_sliding_window is true, which is refused
            "sliding_window": 4096,
            "max_window_layers": 28,
            "layer_types": None,
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts_per_tok": 4,
            "num_experts": 60,
            "norm_topk_prob": False,
            "mlp_only_layers": None,
            "qkv_bias": True,
        },
        qkv_bias="qkv_bias",
        moe=MoeFields(
            num_experts_key="num_experts",
            expert_size_key="moe_intermediate_size",
            norm_topk_key="norm_topk_prob",
            routed_layers=kinds.sparse_layers,
            shared_size_key="shared_expert_intermediate_size",
            shared_router=True,
        ),
        fixed={"use_sliding_window": (False,)},
    ),
    "glm4_moe": Family(
        architecture="Glm4MoeForCausalLM",
        defaults={
            **COMMON,
            "vocab_size": 151_552,
            "hidden_size": 4096,
            "intermediate_size": 10_944,
            "num_hidden_layers": 46,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "use_qk_norm": False,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_routed_experts": 128,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
        },
        aliases={"num_local_experts": "n_routed_experts"},
        qkv_bias="attention_bias",
        qk_norm="use_qk_norm",
        rope=RopeFields(partial=True, default_partial=0.5),
        moe=DEEPSEEK_EXPERTS,
    ),
    "minimax_m2": Family(
        architecture="MiniMaxM2ForCausalLM",
        defaults={
            **COMMON,
            "vocab_size": 200_064,
            "hidden_size": 3072,
            "intermediate_size": 1536,
            "num_hidden_layers": 62,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 196_608,
            "bos_token_id": 200_034,
            "eos_token_id": 200_020,
            "num_experts_per_tok": 8,
            "num_local_experts": 256,
            "rotary_dim": None,
            "attn_type_list": None,
        },
        aliases={"num_experts": "num_local_experts"},
        layer_kinds=kinds.all_full_by_type_list,
        qk_norm=True,
        qk_norm_rows=True,
        rope=RopeFields(default_theta=5_000_000.0, partial=True),
        moe=MoeFields(
            num_experts_key="num_local_experts",
            expert_size_key="intermediate_size",
            scoring="sigmoid",
            correction=True,
        ),
        fixed={
            "qk_norm_type": ("per_layer",),
            "scoring_func": ("sigmoid",),
            "shared_intermediate_size": (0,),
            "sliding_window": (None,),
            "use_qk_norm": (True,),
            "use_routing_bias": (True,),
        },
    ),
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
