"""The architectures of llama.cpp: the family of each, its keys and its names of tensors."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from ridgeline.errors import BadModel
from ridgeline.modelspec.checkpoints.gguf_header import Gguf

ROUTER, EXPERTS = "blk.{}.ffn_gate_inp.weight", "_exps"
"""A layer that has the first is routed: its feed-forward's tensors then end in the second, and hold
all experts, [experts, outputs, inputs]."""

PREDICTION = "nextn_predict_layers"
"""The number of layers after the model's own, which predict further tokens and are left unread."""

YARN_MULTIPLIER = "rope.scaling.yarn_log_multiplier"

SAFETENSORS = "use the model's safetensors directory"


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """How llama.cpp stores a family.

    `fields`: keys (after the architecture's name) and our config's field for each, in addition to
    those that all architectures share. `paired_rows`: rows of q and k are in the order of a rotary
    embedding that turns adjacent numbers. `gain_includes_one`: norms are stored as 1 + w. `read`:
    further keys, which are read one by one.
    `tensors`: names of tensors (after the layer's) that differ from the common ones, by the key of
    their part.
    """

    family: str
    fields: Mapping[str, str] = {}
    paired_rows: bool = False
    gain_includes_one: bool = False
    tensors: Mapping[str, str] = {}
    read: frozenset[str] = frozenset()


_EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_SOFTCAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_CENTRED = {"attention.layer_norm_epsilon": "rms_norm_eps", "logit_scale": "logit_scale"}
_LAYER_INPUTS = {
    **_WINDOW,
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base_swa": "rope_local_base_freq",
}
_DELTA_NET = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
_READ_OF_DELTA_NETS = frozenset(
    ("attention.recurrent_layers", "full_attention_interval", "ssm.inner_size", PREDICTION)
)
_QWEN_EXPERTS = {
    **_EXPERTS,
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_SIGMOID_EXPERTS = {
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_READ_OF_SIGMOIDS = frozenset(
    ("expert_gating_func", "expert_weights_norm", "expert_weights_scale", PREDICTION)
)
_NORM_AFTER_ATTENTION = {"mlp_norm": "post_attention_norm"}
"""The norm before the feed-forward layer under the name of one after the attention."""

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(family="llama", paired_rows=True),
    "mistral3": Architecture(family="mistral", paired_rows=True),
    "qwen2": Architecture(family="qwen2"),
    "qwen2vl": Architecture(family="qwen2"),
    "qwen3": Architecture(family="qwen3"),
    "qwen3vl": Architecture(family="qwen3"),
    "qwen3moe": Architecture(
        family="qwen3_moe",
        fields={**_EXPERTS, "expert_feed_forward_length": "moe_intermediate_size"},
    ),
    "gemma": Architecture(family="gemma", gain_includes_one=True),
    "gemma2": Architecture(
        family="gemma2", fields={**_SOFTCAPS, **_WINDOW}, gain_includes_one=True
    ),
    "gemma3": Architecture(
        family="gemma3_text",
        fields={
            **_WINDOW,
            "final_logit_softcapping": "final_logit_softcapping",
            "rope.freq_base_swa": "rope_local_base_freq",
        },
        gain_includes_one=True,
    ),
    "gemma3n": Architecture(
        family="gemma3n_text",
        fields={
            **_LAYER_INPUTS,
            "altup.active_idx": "altup_active_idx",
            "altup.num_inputs": "altup_num_inputs",
        },
        read=frozenset(("activation_sparsity_scale",)),
    ),
    "gemma4": Architecture(
        family="gemma4_text",
        fields={
            **_LAYER_INPUTS,
            "expert_count": "num_experts",
            "expert_used_count": "top_k_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        # the MLP of dense layers, next to the experts
        tensors={f"shared_{key}": f"ffn_{key}" for key in ("gate", "up", "down")},
        read=frozenset(
            f"{key}_swa"
            for key in ("attention.key_length", "attention.value_length", "rope.dimension_count")
        ),
    ),
    "phi3": Architecture(family="phi3", fields=_WINDOW),
    "command-r": Architecture(family="cohere", fields=_CENTRED),
    "cohere2": Architecture(family="cohere2", fields={**_CENTRED, **_WINDOW}),
    "chatglm": Architecture(family="glm"),
    "glm4": Architecture(family="glm4"),
    "olmoe": Architecture(
        family="olmoe",
        fields={**_EXPERTS, "expert_feed_forward_length": "intermediate_size"},
    ),
    "mellum": Architecture(
        family="mellum",
        fields={**_EXPERTS, **_WINDOW, "expert_feed_forward_length": "moe_intermediate_size"},
    ),
    "dots1": Architecture(
        family="dots1",
        fields={
            **_SIGMOID_EXPERTS,
            "expert_count": "n_routed_experts",
            "expert_shared_count": "n_shared_experts",
        },
        read=_READ_OF_SIGMOIDS,
    ),
    "exaone-moe": Architecture(
        family="exaone_moe",
        fields={**_SIGMOID_EXPERTS, **_WINDOW, "expert_count": "num_experts"},
        read=_READ_OF_SIGMOIDS | {"expert_shared_count", "expert_shared_feed_forward_length"},
    ),
    "qwen2moe": Architecture(
        family="qwen2_moe",
        fields={
            **_EXPERTS,
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
    ),
    "glm4moe": Architecture(
        family="glm4_moe",
        fields={
            **_SIGMOID_EXPERTS,
            "expert_count": "n_routed_experts",
            "expert_shared_count": "n_shared_experts",
        },
        tensors=_NORM_AFTER_ATTENTION,
        read=_READ_OF_SIGMOIDS,
    ),
    "minimax-m2": Architecture(
        family="minimax_m2",
        fields={
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "intermediate_size",
        },
        read=frozenset(("expert_gating_func",)),
    ),
    "smollm3": Architecture(family="smollm3", paired_rows=True),
    "olmo2": Architecture(family="olmo2", fields=_WINDOW),
    "granite": Architecture(
        family="granite",
        fields={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        paired_rows=True,
    ),
    "seed_oss": Architecture(family="seed_oss", tensors=_NORM_AFTER_ATTENTION),
    "exaone4": Architecture(family="exaone4", fields=_WINDOW),
    "ernie4_5": Architecture(family="ernie4_5"),
    "arcee": Architecture(family="arcee", paired_rows=True),
    **{
        name: Architecture(
            family=family,
            fields={**_DELTA_NET, **experts},
            gain_includes_one=True,
            tensors=_NORM_AFTER_ATTENTION,
            read=_READ_OF_DELTA_NETS,
        )
        for name, family, experts in (
            ("qwen35", "qwen3_5_text", {}),
            ("qwen35moe", "qwen3_5_moe_text", _QWEN_EXPERTS),
            ("qwen3next", "qwen3_next", _QWEN_EXPERTS),
        )
    },
    "deepseek2": Architecture(
        family="deepseek_v3",
        fields={
            "attention.kv_lora_rank": "kv_lora_rank",
            "rope.dimension_count": "qk_rope_head_dim",
            "expert_count": "n_routed_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        read=frozenset(
            (
                "attention.q_lora_rank",
                "attention.key_length_mla",
                "attention.value_length_mla",
                "expert_gating_func",
                "expert_group_count",
                "expert_group_used_count",
                "expert_shared_count",
                "expert_weights_norm",
                "expert_weights_scale",
                YARN_MULTIPLIER,
            )
        ),
    ),
    "apertus": Architecture(family="apertus"),
    "llama4": Architecture(
        family="llama4_text",
        fields={
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "intermediate_size",
            "feed_forward_length": "intermediate_size_mlp",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
        read=frozenset(("attention.sliding_window",)),
    ),
    "gpt-oss": Architecture(
        family="gpt_oss",
        fields={
            **_WINDOW,
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "intermediate_size",
        },
        tensors=_NORM_AFTER_ATTENTION,
    ),
}
_OLMO3 = Architecture(family="olmo3", fields=_WINDOW)
_MIXTRAL = Architecture(
    family="mixtral",
    fields={**_EXPERTS, "expert_feed_forward_length": "intermediate_size"},
    paired_rows=True,
)
_WINDOWED_LLAMA = Architecture(family="mistral", fields=_WINDOW, paired_rows=True)


_SOFTMAX, _SIGMOID = 1, 2


def _scores_are_sigmoids(file: Gguf) -> bool:
    """DeepSeek-V3 and later, against V2. Files without the key are of V2, but for one model."""
    function = file.metadata.get("deepseek2.expert_gating_func") or 0
    if function == 0:  # as llama.cpp recognises GLM-4.7-Flash
        rows = file.tensors.get("token_embd.weight")
        is_flash = file.metadata.get("deepseek2.block_count") == 47
        return is_flash and rows is not None and rows.shape[0] == 154_880
    if function not in (_SOFTMAX, _SIGMOID):
        raise BadModel(
            "the experts of this GGUF file are chosen by an unknown function",
            value=f"expert_gating_func {function}",
            limit="1 (softmax), 2 (sigmoid)",
            fix=SAFETENSORS,
        )
    return bool(function == _SIGMOID)


_YOUTU = replace(
    ARCHITECTURES["deepseek2"],
    family="youtu",
    fields={
        "attention.kv_lora_rank": "kv_lora_rank",
        "rope.dimension_count": "qk_rope_head_dim",
    },
    read=frozenset(
        (
            "attention.q_lora_rank",
            "attention.key_length_mla",
            "attention.value_length_mla",
            "expert_feed_forward_length",
            YARN_MULTIPLIER,
        )
    ),
)
_OF_MINISTRAL = ("attention.temperature_scale", YARN_MULTIPLIER)
_MINISTRAL = replace(ARCHITECTURES["mistral3"], family="ministral3", read=frozenset(_OF_MINISTRAL))


def architecture_of(file: Gguf) -> Architecture:
    """The row of the file's architecture. Raises BadModel for those that are not read."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise BadModel(
            "the architecture of this GGUF file is not supported",
            value=str(name),
            limit=", ".join(sorted(ARCHITECTURES)),
            fix=SAFETENSORS,
        )
    if name == "deepseek2" and not file.metadata.get("deepseek2.expert_count"):
        return _YOUTU
    if name == "deepseek2" and not _scores_are_sigmoids(file):
        return replace(ARCHITECTURES[name], family="deepseek_v2")
    if name == "mistral3" and any(file.metadata.get(f"mistral3.{key}") for key in _OF_MINISTRAL):
        return _MINISTRAL
    if name == "llama" and file.metadata.get("llama.expert_count"):
        return _MIXTRAL
    if name == "llama" and file.metadata.get("llama.attention.sliding_window"):
        return _WINDOWED_LLAMA
    if name == "olmo2" and file.metadata.get("olmo2.attention.sliding_window"):
        return _OLMO3
    return ARCHITECTURES[name]
