"""Every family against transformers: defaults, parameter counts, and the shapes of tiny models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from ridgeline.errors import BadModel
from ridgeline.modelspec import cost
from ridgeline.modelspec.families.registry import FAMILIES, spec_from_config
from ridgeline.modelspec.families.unsupported import REFUSED
from ridgeline.modelspec.model import ModelSpec

pytestmark = pytest.mark.slow

CONFIG_CLASSES = {
    "llama": "LlamaConfig",
    "mistral": "MistralConfig",
    "mixtral": "MixtralConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "qwen3_moe": "Qwen3MoeConfig",
    "gemma": "GemmaConfig",
    "gemma2": "Gemma2Config",
    "gemma3n_text": "Gemma3nTextConfig",
    "gemma4_text": "Gemma4TextConfig",
    "gemma3_text": "Gemma3TextConfig",
    "phi3": "Phi3Config",
    "smollm3": "SmolLM3Config",
    "olmo2": "Olmo2Config",
    "olmo3": "Olmo3Config",
    "granite": "GraniteConfig",
    "seed_oss": "SeedOssConfig",
    "exaone4": "Exaone4Config",
    "ernie4_5": "Ernie4_5Config",
    "internlm3": "InternLM3Config",
    "arcee": "ArceeConfig",
    "helium": "HeliumConfig",
    "gpt_oss": "GptOssConfig",
    "cohere": "CohereConfig",
    "qwen3_5_text": "Qwen3_5TextConfig",
    "llama4_text": "Llama4TextConfig",
    "qwen3_5_moe_text": "Qwen3_5MoeTextConfig",
    "qwen3_next": "Qwen3NextConfig",
    "cohere2": "Cohere2Config",
    "apertus": "ApertusConfig",
    "deepseek_v2": "DeepseekV2Config",
    "deepseek_v3": "DeepseekV3Config",
    "kimi_k2": "DeepseekV3Config",
    "glm4_moe_lite": "Glm4MoeLiteConfig",
    "glm4": "Glm4Config",
    "glm4_moe": "Glm4MoeConfig",
    "minimax_m2": "MiniMaxM2Config",
    "qwen2_moe": "Qwen2MoeConfig",
    "glm": "GlmConfig",
    "ministral": "MinistralConfig",
    "ministral3": "Ministral3Config",
    "cwm": "CwmConfig",
    "vaultgemma": "VaultGemmaConfig",
    "hyperclovax": "HyperCLOVAXConfig",
    "solar_open": "SolarOpenConfig",
    "dots1": "Dots1Config",
    "exaone_moe": "ExaoneMoeConfig",
    "olmoe": "OlmoeConfig",
    "mellum": "MellumConfig",
    "youtu": "YoutuConfig",
    "mistral4": "Mistral4Config",
}
BARE: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},  # by default none
    # by default none, and as published
    "dots1": {
        "hidden_size": 4096,
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
    },
    "glm4_moe": {"head_dim": 128},  # by default 4096 / 96, which is no whole number
}
"""Fields that a config has to have in addition to the family's defaults."""
TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
}
ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "n_shared_experts": 2,
}  # fmt: skip
TINY_OF: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "mistral": {"head_dim": 16},
    "mixtral": {"num_local_experts": 4},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16, "attention_bias": True},
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "mlp_only_layers": [0],
        "decoder_sparse_step": 2,
    },
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16},
    "gemma3n_text": {
        "head_dim": 16,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 0,
        "laurel_rank": 4,
    },
    "gemma4_text": {"head_dim": 16, "global_head_dim": 32, "hidden_size_per_layer_input": 8},
    "phi3": {},
    "smollm3": {"attention_bias": True, "mlp_bias": True},
    "olmo2": {"attention_bias": True},
    "olmo3": {},
    "granite": {
        "embedding_multiplier": 12.0,
        "logits_scaling": 8.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.015625,
    },
    "seed_oss": {"head_dim": 16, "attention_out_bias": True},
    "exaone4": {},
    "ernie4_5": {"head_dim": 16, "use_bias": True},
    "internlm3": {"attention_bias": True, "mlp_bias": True},
    "arcee": {"mlp_bias": True},
    "helium": {"head_dim": 8},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "cohere": {"use_qk_norm": True},
    "llama4_text": {
        "head_dim": 16,
        "intermediate_size_mlp": 40,
        "num_local_experts": 4,
        "interleave_moe_layer_step": 2,
    },
    "qwen3_5_moe_text": {
        "head_dim": 16,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 20,
    },
    "qwen3_next": {
        "head_dim": 16,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 20,
        "mlp_only_layers": [0],
    },
    "qwen3_5_text": {
        "head_dim": 16,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
    "cohere2": {"attention_bias": True},
    "apertus": {"attention_bias": True},
    "deepseek_v2": LATENT,
    "deepseek_v3": {**LATENT, "n_group": 4, "topk_group": 2},
    "kimi_k2": {**LATENT, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "glm4_moe_lite": LATENT,
    "glm4": {"head_dim": 16},
    "glm4_moe": {
        "head_dim": 16,
        "use_qk_norm": True,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_shared_experts": 2,
    },
    "minimax_m2": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
    "glm": {"head_dim": 16},
    "ministral": {"head_dim": 16, "sliding_window": 8},
    "ministral3": {"head_dim": 16},
    "cwm": {"head_dim": 16},
    "vaultgemma": {"head_dim": 16},
    "hyperclovax": {"embedding_multiplier": 12.0, "logits_scaling": 0.2},
    "solar_open": {**ROUTED, "head_dim": 16},
    "dots1": {**ROUTED, "first_k_dense_replace": 1, "max_window_layers": 4},
    "exaone_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "mellum": {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
    "mistral4": LATENT,
    "youtu": {key: LATENT[key] for key in LATENT if "expert" not in key and "moe" not in key},
}


def config_class(family: str) -> Any:
    return getattr(transformers, CONFIG_CLASSES[family])


def model_of(config: Any) -> Any:
    """The model of a config; transformers lists Mistral 4 as part of image models only."""
    if config.model_type == "mistral4":
        return transformers.Mistral4ForCausalLM(config)
    return AutoModelForCausalLM.from_config(config)


def saved(config: Any, directory: Path) -> dict[str, Any]:
    """The config.json that transformers writes."""
    config.save_pretrained(directory)
    loaded: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return loaded


def test_every_family_has_an_oracle() -> None:
    assert CONFIG_CLASSES.keys() == FAMILIES.keys() == TINY_OF.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bare_config_means_what_transformers_defaults_mean(family: str, tmp_path: Path) -> None:
    fields = BARE.get(family, {})
    bare = spec_from_config({"model_type": family, **fields}, name="x")
    full = spec_from_config(saved(config_class(family)(**fields), tmp_path), name="x")
    if family == "kimi_k2":  # saved as what its architecture is
        assert full.family == "deepseek_v3"
        bare = msgspec.structs.replace(bare, family=full.family)
    assert bare == full


@pytest.mark.parametrize("family", FAMILIES)
def test_default_values_are_those_of_the_config_class(family: str) -> None:
    config = config_class(family)()
    derived = {"head_dim", "num_key_value_heads", "layer_types", "sliding_window_pattern"}
    derived |= {
        "moe_layers",
        "no_rope_layers",
        "rotary_dim",
        "attn_type_list",
        "mlp_layer_types",
        "qk_head_dim",
        "is_moe_layer",
    }
    only_here = {"max_window_layers"} if family in ("qwen3_moe", "smollm3") else set()
    names = {key: alias for alias, key in FAMILIES[family].aliases.items()}
    only_here |= {"first_k_dense_replace"} if family in ("glm4_moe_lite", "mellum") else set()
    routed_only = family in ("qwen3_5_moe_text", "solar_open")
    only_here |= {"intermediate_size"} if routed_only else set()
    only_here |= (
        {"altup_lr_multiplier", "query_pre_attn_scalar"} if family == "gemma3n_text" else set()
    )
    only_here |= (
        {"global_head_dim", "num_global_key_value_heads"} if family == "gemma4_text" else set()
    )
    derived |= {"activation_sparsity_pattern", "attention_multiplier", "per_layer_config"}
    for key, value in FAMILIES[family].defaults.items():
        if value is None and key in derived | only_here | {"mlp_only_layers"}:
            continue
        if key in only_here and not hasattr(config, key):
            continue
        if (family, key) == ("gemma4_text", "head_dim"):
            continue  # the class answers for each layer alone
        if (family, key) == ("gemma3n_text", "intermediate_size"):
            value = [value] * config.num_hidden_layers
        if key == "sliding_window" and hasattr(config, "use_sliding_window"):
            continue  # the class replaces it by None while use_sliding_window is False
        read = ("sliding_window_pattern", "full_attention_interval", "partial_rotary_factor")
        if key in read and not hasattr(config, key):
            continue  # by the class, which keeps layer_types or rope_parameters
        name = key if hasattr(config, key) else names[key]
        assert getattr(config, name) == value, key


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_equal_those_of_a_transformers_model(family: str, tmp_path: Path) -> None:
    config = config_class(family)(**{**TINY, **TINY_OF[family]})
    spec = spec_from_config(saved(config, tmp_path), name="tiny")
    with torch.device("meta"):
        model = model_of(config)
    stored = ("correction", "layer_scalar")
    corrections = sum(
        b.numel() for name, b in model.named_buffers() if any(mark in name for mark in stored)
    )
    assert cost.num_params(spec) == model.num_parameters() + corrections


@pytest.mark.parametrize("family", FAMILIES)
def test_facts_that_transformers_models_hold_as_attributes(family: str, tmp_path: Path) -> None:
    config = config_class(family)(**{**TINY, **TINY_OF[family]})
    spec = spec_from_config(saved(config, tmp_path), name="tiny")
    with torch.device("meta"):
        model = model_of(config)
    for layer, theirs in zip(spec.layers, model.model.layers, strict=True):
        mlp = getattr(theirs, "mlp", None) or theirs.feed_forward
        assert (layer.mlp.num_experts > 0) == hasattr(mlp, "experts")
        gemma = hasattr(theirs, "pre_feedforward_layernorm") and family != "vaultgemma"
        both = gemma or hasattr(theirs, "post_mlp_layernorm") or hasattr(theirs, "post_norm2")
        assert (layer.norms == "both") == both
        assert (layer.norms == "after") == (
            hasattr(theirs, "post_feedforward_layernorm") and layer.norms != "both"
        )
        assert (layer.attention.delta is not None) == hasattr(theirs, "linear_attn")
        if layer.attention.delta is not None:
            continue
        assert layer.attention.scale == pytest.approx(theirs.self_attn.scaling)
        own = "head_dim" if layer.attention.latent is None else "qk_head_dim"
        assert layer.attention.head_dim == getattr(theirs.self_attn, own)
        has_norm = hasattr(theirs.self_attn, "q_norm") or hasattr(theirs.self_attn, "qk_norm")
        assert layer.attention.qk_norm == has_norm
        if hasattr(theirs.self_attn, "sliding_window"):
            slides = getattr(theirs.self_attn, "is_sliding", True)
            window = theirs.self_attn.sliding_window if slides else None
            assert layer.attention.window == window
        if hasattr(theirs.self_attn, "q_proj") and layer.attention.latent is None:
            for name in ("q", "k", "v", "o"):
                linear = getattr(layer.attention, name)
                module = getattr(theirs.self_attn, f"{name}_proj")
                assert (linear.num_out, linear.num_in) == tuple(module.weight.shape)
                assert linear.bias == (module.bias is not None)
    embed_scale = getattr(model.model.embed_tokens, "scalar_embed_scale", 1.0)
    embed_scale *= getattr(config, "embedding_multiplier", 1.0)
    logit_scale = getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)
    logit_scale = 1.0 / logit_scale if family == "hyperclovax" else logit_scale
    assert spec.logit_scale == pytest.approx(logit_scale)
    assert spec.embed_scale == pytest.approx(embed_scale)


@pytest.mark.parametrize(
    ("family", "change", "windows"),
    [
        ("mistral", {"sliding_window": 8}, [8, 8, 8, 8]),
        ("mistral", {"sliding_window": None}, [None] * 4),
        ("phi3", {"sliding_window": 8}, [8, 8, 8, 8]),
        ("qwen2", {"sliding_window": 8, "max_window_layers": 2}, [None] * 4),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
            [None, None, 8, 8],
        ),
        ("gemma2", {"sliding_window": 8}, [8, None, 8, None]),
        ("gemma3_text", {"sliding_window": 8}, [8, 8, 8, 8]),
        ("gemma3_text", {"sliding_window": 8, "sliding_window_pattern": 3}, [8, 8, None, 8]),
        (
            "gemma3_text",
            {"sliding_window": 8, "layer_types": ["full_attention"] + ["sliding_attention"] * 3},
            [None, 8, 8, 8],
        ),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8}, [8, 8, 8, 8]),
    ],
)
def test_windows_per_layer(
    family: str, change: dict[str, Any], windows: list[int | None], tmp_path: Path
) -> None:
    fields = {**TINY, **TINY_OF[family], **change}
    direct = spec_from_config({"model_type": family, **fields}, name="x")
    via_transformers = spec_from_config(saved(config_class(family)(**fields), tmp_path), name="x")
    for spec in (direct, via_transformers):
        assert [layer.attention.window for layer in spec.layers] == windows


def gemma3_wrapper(**text: Any) -> dict[str, Any]:
    """As google/gemma-3-4b-it writes it: a text_config with little in it."""
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "image_token_index": 262144,
        "mm_tokens_per_image": 256,
        "initializer_range": 0.02,
        "eos_token_id": [1, 106],
        "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0.dev0",
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
            **text,
        },
    }


def test_gemma3_wrapper_reads_its_text_model() -> None:
    spec = spec_from_config(gemma3_wrapper(), name="x")
    theirs = AutoConfig.for_model(**gemma3_wrapper()).text_config
    assert spec.family == "gemma3_text"
    assert spec.eos_token_ids == (1, 106)
    assert spec.stored_dtype == "bfloat16"
    kinds = ["sliding_attention" if y.attention.window else "full_attention" for y in spec.layers]
    assert kinds == theirs.layer_types
    for layer, kind in zip(spec.layers, kinds, strict=True):
        rope = theirs.rope_parameters[kind]
        assert (layer.attention.rope.theta, layer.attention.rope.kind) == (
            rope["rope_theta"],
            rope["rope_type"],
        )
        assert layer.attention.rope.factor == rope.get("factor", 1.0)


def test_equal_layers_are_one_object() -> None:
    spec = spec_from_config({"model_type": "gemma2", **TINY}, name="x")
    assert len({id(layer) for layer in spec.layers}) == 2


def test_mixture_of_experts_layers() -> None:
    fields = {**TINY, **TINY_OF["qwen3_moe"], "norm_topk_prob": True}
    spec = spec_from_config({"model_type": "qwen3_moe", **fields}, name="x")
    assert [layer.mlp.num_experts for layer in spec.layers] == [0, 4, 0, 4]
    routed = spec.layers[1].mlp
    assert routed.norm_topk
    assert routed.up.num_out == 24
    assert routed.router is not None
    assert spec.layers[0].mlp.up.num_out == 48


def test_gemma1_gelu_means_the_tanh_form() -> None:
    spec = spec_from_config({"model_type": "gemma", **TINY, "hidden_act": "gelu"}, name="x")
    assert spec.layers[0].mlp.activation == "gelu_tanh"


def test_soft_caps() -> None:
    spec = spec_from_config({"model_type": "gemma2", **TINY}, name="x")
    assert (spec.layers[0].attention.softcap, spec.final_softcap) == (50.0, 30.0)
    off: dict[str, Any] = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    spec = spec_from_config({"model_type": "gemma2", **TINY, **off}, name="x")
    assert (spec.layers[0].attention.softcap, spec.final_softcap) == (None, None)


def hub_llama() -> dict[str, Any]:
    """The fields of a published Llama config.json, with the noise that older versions leave."""
    return {
        "_name_or_path": "x",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "do_sample": True,
        "id2label": {"0": "LABEL_0"},
        "is_decoder": True,
        "is_encoder_decoder": False,
        "max_length": 4096,
        "model_type": "llama",
        "pretraining_tp": 1,
        "pruned_heads": {},
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        **TINY,
    }


def test_old_noise_is_accepted() -> None:
    spec: ModelSpec = spec_from_config(hub_llama(), name="x")
    assert spec.stored_dtype == spec.kv_dtype == spec.dtype == "bfloat16"


@pytest.mark.parametrize("model_type", REFUSED)
def test_known_families_that_do_not_run_are_refused_with_the_reason(model_type: str) -> None:
    with pytest.raises(BadModel) as refused:
        spec_from_config({"model_type": model_type}, name="x")
    assert REFUSED[model_type] in str(refused.value)
