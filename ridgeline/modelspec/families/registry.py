"""The model families: transformers' defaults and the features in which each family differs.

`spec_from_config` is the entry point. The rows are data; `ridgeline.modelspec.families.build` turns
a row and a config.json into a ModelSpec without branching on a family's name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from difflib import SequenceMatcher
from typing import Any

from ridgeline.errors import BadModel
from ridgeline.modelspec.families import layer_kinds as kinds
from ridgeline.modelspec.families.build import build
from ridgeline.modelspec.families.config_fields import (
    FIXED,
    HARMLESS,
    ConfigFields,
    check_names,
    without_official_code,
)
from ridgeline.modelspec.families.family import COMMON, Family, MoeFields
from ridgeline.modelspec.families.hybrids import HYBRIDS
from ridgeline.modelspec.families.latent import LATENT_FAMILIES
from ridgeline.modelspec.families.layer_inputs import LAYER_INPUT_FAMILIES
from ridgeline.modelspec.families.llama_variants import LLAMA_VARIANTS
from ridgeline.modelspec.families.mixtures import MIXTURES
from ridgeline.modelspec.families.rope_config import RopeFields
from ridgeline.modelspec.families.unsupported import REFUSED, UNSUPPORTED, planned_as
from ridgeline.modelspec.families.wrappers import WRAPPERS, text_part
from ridgeline.modelspec.model import ModelSpec

_LLAMA_LIKE = {**COMMON, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 32000}
_MISTRAL_LIKE = {
    **_LLAMA_LIKE,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
}
_QWEN_LIKE = {
    **COMMON,
    "vocab_size": 151_936,
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "sliding_window": 4096,
}
_QWEN_DENSE = {
    **_QWEN_LIKE,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_window_layers": 28,
    "layer_types": None,
}
_GEMMA_LIKE = {
    **COMMON,
    "head_dim": 256,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
    "attention_bias": False,
}
_GEMMA_23 = {
    **{key: value for key, value in _GEMMA_LIKE.items() if key != "hidden_act"},
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
}
_UNREAD_ACT = {"hidden_act": ("gelu_pytorch_tanh", "gelu", None)}

_GEMMA_2 = Family(
    architecture="Gemma2ForCausalLM",
    defaults={
        **_GEMMA_23,
        "vocab_size": 256_000,
        "max_position_embeddings": 8192,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    aliases={"sliding_window_size": "sliding_window"},
    layer_kinds=kinds.alternating,
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    activation_key="hidden_activation",
    gemma_norms=True,
    norms="both",
    fixed=_UNREAD_ACT,
)

FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        defaults={
            **_LLAMA_LIKE,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 2048,
            "attention_bias": False,
            "mlp_bias": False,
        },
        qkv_bias="attention_bias",
        o_bias="attention_bias",
    ),
    "mistral": Family(
        architecture="MistralForCausalLM",
        defaults={**_MISTRAL_LIKE, "sliding_window": 4096},
        layer_kinds=kinds.all_sliding_if_window,
    ),
    "ministral": Family(
        architecture="MinistralForCausalLM",
        defaults={**_MISTRAL_LIKE, "sliding_window": 4096, "layer_types": None},
        layer_kinds=kinds.sliding_if_window_unless_explicit,
    ),
    "ministral3": Family(
        architecture="Ministral3ForCausalLM",
        defaults={
            **_MISTRAL_LIKE,
            "vocab_size": 131_072,
            "num_hidden_layers": 34,
            "head_dim": 128,
            "max_position_embeddings": 262_144,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
        },
        layer_kinds=kinds.all_sliding_if_window,
        rope=RopeFields(
            default_theta=1_000_000.0,
            scales_queries=True,
            scaling={
                "rope_type": "yarn",
                "factor": 16.0,
                "original_max_position_embeddings": 16_384,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        ),
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        defaults={
            **_MISTRAL_LIKE,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        aliases={"num_experts": "num_local_experts"},
        layer_kinds=kinds.all_sliding_if_window,
        rope=RopeFields(default_theta=1_000_000.0),
        moe=MoeFields(num_experts_key="num_local_experts", expert_size_key="intermediate_size"),
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        defaults=_QWEN_DENSE,
        layer_kinds=kinds.sliding_from_layer,
        qkv_bias=True,
        rope=RopeFields(mrope=True),
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        defaults={**_QWEN_DENSE, "head_dim": 128, "attention_bias": False},
        layer_kinds=kinds.sliding_from_layer,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        rope=RopeFields(mrope=True),
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        defaults={
            **_QWEN_LIKE,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_experts": 128,
            "norm_topk_prob": False,
            "mlp_only_layers": None,
            "max_window_layers": None,
        },
        aliases={"num_local_experts": "num_experts"},
        layer_kinds=kinds.all_sliding_if_used,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        rope=RopeFields(mrope=True),
        moe=MoeFields(
            num_experts_key="num_experts",
            expert_size_key="moe_intermediate_size",
            norm_topk_key="norm_topk_prob",
            routed_layers=kinds.sparse_layers,
        ),
    ),
    "gemma": Family(
        architecture="GemmaForCausalLM",
        defaults={
            **_GEMMA_LIKE,
            "vocab_size": 256_000,
            "hidden_size": 3072,
            "intermediate_size": 24576,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 8192,
        },
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        gemma_norms=True,
        gelu_is_tanh=True,
        fixed={"hidden_activation": (None, "gelu_pytorch_tanh")},
    ),
    "gemma2": _GEMMA_2,
    "vaultgemma": replace(_GEMMA_2, architecture="VaultGemmaForCausalLM", norms="before"),
    "gemma3_text": Family(
        architecture="Gemma3ForCausalLM",
        defaults={
            **_GEMMA_23,
            "vocab_size": 262_208,
            "max_position_embeddings": 131_072,
            "final_logit_softcapping": None,
            "_sliding_window_pattern": 6,
            "sliding_window_pattern": None,
        },
        layer_kinds=kinds.every_nth_full,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        activation_key="hidden_activation",
        rope=RopeFields(default_theta=1_000_000.0, local_theta=10_000.0),
        qk_norm=True,
        gemma_norms=True,
        norms="both",
        # transformers reads Gemma 3's attn_logit_softcapping and then does not apply it
        fixed={**_UNREAD_ACT, "attn_logit_softcapping": (None,)},
    ),
    "phi3": Family(
        architecture="Phi3ForCausalLM",
        defaults={
            **COMMON,
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 1,
            "eos_token_id": 32000,
            "sliding_window": None,
        },
        layer_kinds=kinds.all_sliding_if_window,
        rope=RopeFields(partial=True, yarn_means_longrope=True),
        fixed={
            "attention_bias": (False,),
            "full_attn_mod": (1,),
            "interpolate_factor": (1,),
            "lm_head_bias": (False,),
            "mlp_bias": (False,),
        },
    ),
    **LLAMA_VARIANTS,
    **MIXTURES,
    **LATENT_FAMILIES,
    **HYBRIDS,
    **LAYER_INPUT_FAMILIES,
}


def spec_from_config(config: Mapping[str, Any], *, name: str) -> ModelSpec:
    """Build the spec of a Hugging Face config.json.

    Raises BadModel, naming the field, for anything not understood: an unknown architecture,
    rope type or activation, remote code (auto_map), a quantised checkpoint, a field of unknown
    effect.
    """
    where = f"config.json of {name}"
    config = without_official_code(_text_part(config, where))
    model_type = _family_name(config, where)
    row = FAMILIES[model_type]
    check_names(config, row.understood, row.fixed, where=where)
    values = ConfigFields(_with_aliases(config, row, where), row.defaults, where=where)
    return build(values, row, name=name, family=model_type)


def _text_part(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The language model of a wrapper, which also describes an encoder of images; else `config`."""
    model_type: Any = config.get("model_type")
    wrapper = WRAPPERS.get(model_type) if isinstance(model_type, str) else None
    if wrapper is None:
        return config
    _refuse_early(config, where)
    _check_architecture(config, wrapper.architecture, str(model_type), where)
    return text_part(config, wrapper, where)


def _refuse_early(config: Mapping[str, Any], where: str) -> None:
    refused = {key: config[key] for key in ("auto_map", "quantization_config") if key in config}
    check_names(refused, frozenset(), {}, where=where)


def _family_name(config: Mapping[str, Any], where: str) -> str:
    model_type: Any = config.get("model_type")
    architectures = _architectures(config, where)
    _refuse_early(config, where)
    if model_type is None:
        by_architecture = {row.architecture: key for key, row in FAMILIES.items()}
        model_type = next((by_architecture.get(a) for a in architectures), None)
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise _unsupported(config, where)
    row = FAMILIES[model_type]
    if row.saved_as not in architectures:
        _check_architecture(config, row.architecture, model_type, where)
    return model_type


def _unsupported(config: Mapping[str, Any], where: str) -> BadModel:
    """The refusal of a family that does not run: the reason if it is known, or the nearest one."""
    asked = config.get("model_type") or config.get("architectures") or None
    if asked is None:
        return BadModel(f"{where}: it names no architecture (model_type)", limit=_nearest(config))
    reason = UNSUPPORTED.get(str(asked)) or planned_as(config)[1]
    if reason:
        return BadModel(
            f"{where}: the engine does not run this architecture",
            value=asked,
            limit=reason,
            fix="only `ridgeline inspect`, `plan` and `predict` read it",
        )
    return BadModel(
        f"{where}: the architecture is not supported",
        value=asked,
        limit=REFUSED.get(str(asked)) or _nearest(config),
        fix=f"{len(FAMILIES)} families run, and the text of {len(WRAPPERS)} image models: see "
        "docs/reference/models.md",
    )


def _architectures(config: Mapping[str, Any], where: str) -> list[str]:
    found: Any = config.get("architectures") or []
    if not isinstance(found, list) or not all(isinstance(entry, str) for entry in found):
        raise BadModel(f"{where}: architectures is not a list of names", value=str(found))
    return found


def _check_architecture(
    config: Mapping[str, Any], expected: str, model_type: str, where: str
) -> None:
    architectures = _architectures(config, where)
    # K-EXAONE was published as ExaoneMoE and is ExaoneMoe since, KimiK25 is also Kimi_K25
    names = {name.lower().replace("_", "") for name in architectures}
    if names and expected.lower().replace("_", "") not in names:
        raise BadModel(
            f"{where}: {architectures[0]} is not a text-generating {model_type} model",
            limit=f"supported: {expected}",
        )


def _with_aliases(config: Mapping[str, Any], row: Family, where: str) -> dict[str, Any]:
    merged = dict(config)
    for alias, key in row.aliases.items():
        if alias == key or alias not in merged:
            continue
        value = merged.pop(alias)
        if merged.setdefault(key, value) != value:
            raise BadModel(
                f"{where}: {alias} and {key} contradict each other", value=value, limit=merged[key]
            )
    return merged


_SHOWN = 12
_INNER = ("text_config", "llm_config", "language_config", "thinker_config")
"""Where models of images and sound describe their language model."""


def nearest_family(config: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """The family that understands most fields of `config`, and the fields that it does not.

    A related name is worth two fields. Of families that are as near, the one whose name is the most
    alike, then the one that reads the fewest other fields.
    """
    fields = {key for key in config if key not in HARMLESS and key not in FIXED}
    asked = str(config.get("model_type") or "")

    def distance(name: str) -> tuple[float, float, int]:
        known = FAMILIES[name].understood | FAMILIES[name].fixed.keys()
        alike = _stem(asked) == _stem(name) and SequenceMatcher(None, asked, name).ratio()
        return len(fields - known) - 2 * bool(alike), -alike, len(known - fields)

    name = min(FAMILIES, key=distance)
    row = FAMILIES[name]
    return name, tuple(sorted(fields - row.understood - row.fixed.keys()))


def _stem(name: str) -> str:
    """The letters that a family's versions share: qwen of qwen3_moe."""
    return re.split(r"[^a-z]", name.lower())[0]


def _nearest(config: Mapping[str, Any]) -> str:
    """The nearest family and the fields that differ, in words."""
    inner = next((key for key in _INNER if isinstance(config.get(key), dict)), None)
    name, unknown = nearest_family(config if inner is None else config[inner])
    start = f"nearest known{f' to its {inner}' if inner else ''}: {name}"
    if not unknown:
        return f"{start}, whose fields it has"
    more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
    return f"{start}, which has no {', '.join(unknown[:_SHOWN])}{more}"
