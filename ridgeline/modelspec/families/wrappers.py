"""Extracts the language model from the config.json of a multimodal model.

Such a config describes a language model and an encoder for images, video or sound. The engine runs
the language model. For text, positions are equal on all axes of a multi-dimensional rotary
embedding, so mrope reduces to the plain rotary embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ridgeline.errors import BadModel
from ridgeline.modelspec.families.config_fields import HARMLESS, check_names

_OUTER_WINS = ("tie_word_embeddings", "torch_dtype", "dtype", "eos_token_id", "bos_token_id")
_COMMON_FIELDS = "text_config vision_config image_token_id image_token_index " + " ".join(
    _OUTER_WINS
)
_QWEN_FIELDS = _COMMON_FIELDS + " video_token_id vision_start_token_id vision_end_token_id "

_GEMMA_SOUND_FIELDS = _COMMON_FIELDS + (
    " audio_config audio_token_id audio_soft_tokens_per_image vision_soft_tokens_per_image"
    " boa_token_id boi_token_id eoa_token_id eoa_token_index eoi_token_id video_token_id"
)


_IMAGE_FIELDS = (
    _COMMON_FIELDS
    + " projector_hidden_act vision_feature_layer vision_feature_select_strategy image_seq_length"
)


_IDEFICS_FIELDS = frozenset(
    (
        _IMAGE_FIELDS
        + " _pad_token_id scale_factor perceiver_config pixel_shuffle_factor use_resampler"
    ).split()
)


def _same(*families: str) -> dict[str, str]:
    """Text types that are named as the families are; the first is the default."""
    return {family: family for family in families}


@dataclass(frozen=True, kw_only=True)
class Wrapper:
    """One multimodal model type.

    `text_types` maps the model_type of `text_config` to a family; the first key is the default.
    `fields`: top-level names that describe the other modality. `flat`: the text fields may be at
    the top level, without a text_config. `defaults`: the text model's defaults where they differ
    from its family's.
    """

    architecture: str
    text_types: Mapping[str, str]
    fields: frozenset[str]
    flat: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)


_QWEN2_VL_TEXT = {
    "vocab_size": 152_064,
    "hidden_size": 8192,
    "intermediate_size": 29_568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_window_layers": 80,
    "rope_theta": 1_000_000.0,
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
}

WRAPPERS: Mapping[str, Wrapper] = {
    "gemma3": Wrapper(
        architecture="Gemma3ForConditionalGeneration",
        text_types={"gemma3_text": "gemma3_text"},
        fields=frozenset(
            (
                _COMMON_FIELDS
                + " mm_tokens_per_image boi_token_index boi_token_id eoi_token_index eoi_token_id"
            ).split()
        ),
    ),
    "gemma3n": Wrapper(
        architecture="Gemma3nForConditionalGeneration",
        text_types={"gemma3n_text": "gemma3n_text"},
        fields=frozenset(_GEMMA_SOUND_FIELDS.split()),
    ),
    "gemma4": Wrapper(
        architecture="Gemma4ForConditionalGeneration",
        text_types={"gemma4_text": "gemma4_text"},
        fields=frozenset(_GEMMA_SOUND_FIELDS.split()),
    ),
    "glm4v": Wrapper(
        architecture="Glm4vForConditionalGeneration",
        text_types={"glm4v_text": "glm4"},
        defaults={"head_dim": None},
        fields=frozenset(
            (
                _QWEN_FIELDS
                + " image_start_token_id image_end_token_id video_start_token_id video_end_token_id"
            ).split()
        ),
    ),
    "llama4": Wrapper(
        architecture="Llama4ForConditionalGeneration",
        text_types={"llama4_text": "llama4_text"},
        fields=frozenset(
            (_COMMON_FIELDS + " boi_token_index boi_token_id eoi_token_index eoi_token_id").split()
        ),
    ),
    "llava": Wrapper(
        architecture="LlavaForConditionalGeneration",
        text_types=_same("llama", "mistral", "qwen2"),
        fields=frozenset((_IMAGE_FIELDS + " multimodal_projector_bias").split()),
    ),
    "llava_next": Wrapper(
        architecture="LlavaNextForConditionalGeneration",
        text_types=_same("llama", "mistral", "qwen2"),
        fields=frozenset(
            (
                _IMAGE_FIELDS
                + " multimodal_projector_bias image_grid_pinpoints use_image_newline_parameter"
            ).split()
        ),
    ),
    "llava_onevision": Wrapper(
        architecture="LlavaOnevisionForConditionalGeneration",
        text_types=_same("qwen2"),
        fields=frozenset(
            (
                _IMAGE_FIELDS
                + " multimodal_projector_bias image_grid_pinpoints vision_aspect_ratio"
                + " video_token_index use_image_newline_parameter"
            ).split()
        ),
    ),
    "internvl": Wrapper(
        architecture="InternVLForConditionalGeneration",
        text_types=_same("qwen2", "qwen3", "qwen3_moe", "llama", "gpt_oss"),
        fields=frozenset((_IMAGE_FIELDS + " downsample_ratio").split()),
    ),
    "idefics3": Wrapper(
        architecture="Idefics3ForConditionalGeneration",
        text_types=_same("llama"),
        fields=_IDEFICS_FIELDS,
    ),
    "smolvlm": Wrapper(
        architecture="SmolVLMForConditionalGeneration",
        text_types=_same("llama"),
        fields=_IDEFICS_FIELDS,
    ),
    "aya_vision": Wrapper(
        architecture="AyaVisionForConditionalGeneration",
        text_types=_same("cohere2"),
        fields=frozenset((_IMAGE_FIELDS + " downsample_factor adapter_layer_norm_eps").split()),
    ),
    "cohere2_vision": Wrapper(
        architecture="Cohere2VisionForConditionalGeneration",
        text_types=_same("cohere2"),
        fields=frozenset(
            (_IMAGE_FIELDS + " downsample_factor alignment_intermediate_size").split()
        ),
    ),
    "kimi_k25": Wrapper(
        architecture="KimiK25ForConditionalGeneration",
        text_types={**_same("kimi_k2"), "deepseek_v3": "kimi_k2"},
        fields=frozenset(
            (
                _QWEN_FIELDS
                + " projection_hidden_size projection_layer_norm_eps media_placeholder_token_id"
                + " ignore_index use_unified_vision_chunk video_placeholder"
            ).split()
        ),
    ),
    "lighton_ocr": Wrapper(
        architecture="LightOnOcrForConditionalGeneration",
        text_types=_same("qwen3"),
        fields=frozenset((_IMAGE_FIELDS + " spatial_merge_size").split()),
    ),
    "mistral3": Wrapper(
        architecture="Mistral3ForConditionalGeneration",
        text_types={"mistral": "mistral", "ministral3": "ministral3", "mistral4": "mistral4"},
        fields=frozenset(
            (
                _COMMON_FIELDS
                + " projector_hidden_act vision_feature_layer multimodal_projector_bias"
                + " spatial_merge_size"
            ).split()
        ),
    ),
    "qwen2_vl": Wrapper(
        architecture="Qwen2VLForConditionalGeneration",
        text_types={"qwen2_vl_text": "qwen2"},
        fields=frozenset((_QWEN_FIELDS + " vision_token_id").split()),
        flat=True,
        defaults=_QWEN2_VL_TEXT,
    ),
    "qwen2_5_vl": Wrapper(
        architecture="Qwen2_5_VLForConditionalGeneration",
        text_types={"qwen2_5_vl_text": "qwen2"},
        fields=frozenset((_QWEN_FIELDS + " vision_token_id").split()),
        flat=True,
        defaults=_QWEN2_VL_TEXT,
    ),
    "qwen3_5": Wrapper(
        architecture="Qwen3_5ForConditionalGeneration",
        text_types={"qwen3_5_text": "qwen3_5_text"},
        fields=frozenset(_QWEN_FIELDS.split()),
    ),
    "qwen3_5_moe": Wrapper(
        architecture="Qwen3_5MoeForConditionalGeneration",
        text_types={"qwen3_5_moe_text": "qwen3_5_moe_text"},
        fields=frozenset(_QWEN_FIELDS.split()),
    ),
    "qwen3_vl": Wrapper(
        architecture="Qwen3VLForConditionalGeneration",
        text_types={"qwen3_vl_text": "qwen3"},
        fields=frozenset(_QWEN_FIELDS.split()),
        defaults={"max_position_embeddings": 128_000, "rope_theta": 500_000.0},
    ),
    "qwen3_vl_moe": Wrapper(
        architecture="Qwen3VLMoeForConditionalGeneration",
        text_types={"qwen3_vl_moe_text": "qwen3_moe"},
        fields=frozenset(_QWEN_FIELDS.split()),
        defaults={
            "intermediate_size": 5632,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "max_position_embeddings": 128_000,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": True,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
        },
    ),
}


def text_part(config: Mapping[str, Any], wrapper: Wrapper, where: str) -> dict[str, Any]:
    """The config of the language model within `config`, under its family's model_type.

    Raises BadModel if there is none, or if the top level and text_config contradict each other.
    """
    own = {key: value for key, value in config.items() if key not in wrapper.fields}
    text = config.get("text_config")
    if text is None and wrapper.flat:
        text = {**own, "model_type": next(iter(wrapper.text_types))}
    if not isinstance(text, dict):
        raise BadModel(f"{where}: a {config['model_type']} config needs a text_config")
    _check_top_level(own, text, where)
    named = text.get("model_type", next(iter(wrapper.text_types)))
    if not isinstance(named, str) or named not in wrapper.text_types:
        raise BadModel(
            f"{where}: the text_config of a {config['model_type']} model has an unknown model_type",
            value=named,
            limit=f"supported: {', '.join(wrapper.text_types)}",
        )
    outer = {key: config[key] for key in _OUTER_WINS if config.get(key) is not None}
    if outer.keys() & {"dtype", "torch_dtype"}:
        text = {key: text[key] for key in text.keys() - {"dtype", "torch_dtype"}}
    inner = {k: v for k, v in text.items() if k in _OUTER_WINS or k not in wrapper.fields}
    merged = {**wrapper.defaults, **inner, **outer}
    return {**merged, "model_type": wrapper.text_types[named], "architectures": None}


def _check_top_level(own: Mapping[str, Any], text: Mapping[str, Any], where: str) -> None:
    """Some versions repeat text fields at the top level; they must agree with text_config."""
    check_names({k: v for k, v in own.items() if k not in text}, frozenset(), {}, where=where)
    for key in own.keys() & text.keys() - HARMLESS:
        if own[key] != text[key]:
            raise BadModel(
                f"{where}: {key} at the top level contradicts the one in text_config",
                value=own[key],
                limit=text[key],
            )
