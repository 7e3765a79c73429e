"""Families that alternate attention with recurrent layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.modelspec.families import layer_kinds as kinds
from ridgeline.modelspec.families.family import COMMON, Family, MoeFields
from ridgeline.modelspec.families.rope_config import RopeFields

_DELTA_NET: dict[str, Any] = {
    **COMMON,
    "num_attention_heads": 16,
    "max_position_embeddings": 32_768,
    "attention_bias": False,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "layer_types": None,
    "full_attention_interval": 4,
}
_FIXED: dict[str, tuple[object, ...]] = {
    "attn_output_gate": (True,),
    "hidden_act": ("silu",),
    "mamba_ssm_dtype": ("float32",),
    "mtp_num_hidden_layers": (0, 1),  # its tensors are left unread
    "mtp_use_dedicated_embeddings": (False,),
}

_EXPERTS: dict[str, Any] = {
    **_DELTA_NET,
    "hidden_size": 2048,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_MOE = MoeFields(
    num_experts_key="num_experts",
    expert_size_key="moe_intermediate_size",
    shared_size_key="shared_expert_intermediate_size",
    shared_router=True,
)

_QWEN3_5 = Family(
    architecture="Qwen3_5ForCausalLM",
    defaults={
        **_DELTA_NET,
        "vocab_size": 248_320,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
    },
    layer_kinds=kinds.every_nth_not_linear,
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    zero_centred_norms=True,
    gated_attention=True,
    rope=RopeFields(partial=True, mrope=True),
    fixed={**_FIXED, "mlp_only_layers": ([], None)},
)

HYBRIDS: Mapping[str, Family] = {
    "qwen3_next": replace(
        _QWEN3_5,
        architecture="Qwen3NextForCausalLM",
        defaults={
            **_EXPERTS,
            "vocab_size": 151_936,
            "intermediate_size": 5632,
            "num_hidden_layers": 48,
            "decoder_sparse_step": 1,
            "num_experts_per_tok": 10,
            "num_experts": 512,
            "norm_topk_prob": True,
            "mlp_only_layers": None,
        },
        rope=RopeFields(partial=True),
        moe=replace(_MOE, norm_topk_key="norm_topk_prob", routed_layers=kinds.sparse_layers),
        fixed=_FIXED,
    ),
    "qwen3_5_moe_text": replace(
        _QWEN3_5,
        architecture="Qwen3_5MoeForCausalLM",
        defaults={
            **_EXPERTS,
            "vocab_size": 248_320,
            "num_hidden_layers": 40,
            "num_experts_per_tok": 8,
            "num_experts": 256,
            "intermediate_size": None,  # saved by some versions; every layer has experts
        },
        moe=_MOE,
    ),
    "qwen3_5_text": _QWEN3_5,
}
