"""Maps GGUF metadata to Hugging Face config fields, for each supported llama.cpp architecture.

Every key of the architecture is understood, harmless (with the reason), neutral at a listed value,
or an error that names it. Defaults are llama.cpp's, because its converter omits fields that equal
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.errors import BadModel
from ridgeline.modelspec.checkpoints.gguf_architectures.families import (
    special_config,
    windowed_config,
)
from ridgeline.modelspec.checkpoints.gguf_architectures.keys import SHARED, count, heads, keys_of
from ridgeline.modelspec.checkpoints.gguf_architectures.latent import LATENT, latent_config
from ridgeline.modelspec.checkpoints.gguf_architectures.layer_inputs import (
    gemma4_config,
    layer_input_config,
)
from ridgeline.modelspec.checkpoints.gguf_architectures.rope import (
    rope_config,
    yarn_attention_factor,
)
from ridgeline.modelspec.checkpoints.gguf_architectures.rows import (
    SAFETENSORS,
    Architecture,
    architecture_of,
)
from ridgeline.modelspec.checkpoints.gguf_header import Gguf
from ridgeline.modelspec.checkpoints.gguf_tokens import end_of_generation, special_id

_ROPE = {
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scale_linear",
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.dimension_count",
    "attention.value_length",
    "attention.sliding_window_pattern",
}
"""Keys that are read below, or checked against others."""

_HARMLESS = {
    "vocab_size": "the rows of token_embd.weight are the vocabulary",
    "rope.scaling.finetuned": "says how the model was trained, not how it runs",
    "rope.dimension_sections": "positions of images; on text all sections turn alike",
    "n_deepstack_layers": "layers that take features of images",
    "tensor_data_layout": "names the converter's layout; tensors are checked by shape",
    "attention.layer_norm_epsilon": "of LayerNorm, which the other architectures do not have",
    "interleave_moe_layer_step": "the tensors say which layers are routed",
    "leading_dense_block_count": "the tensors say which layers are routed",
}
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attention.sliding_window": (0,),
    "attention.temperature_scale": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "expert_feed_forward_length": (0,),
    "expert_gating_func": (0, 1),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_used_count": (0,),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0.0, 1.0),
    "logit_scale": (0.0, 1.0),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "residual_scale": (0.0, 1.0),
    "rope.scaling.alpha": (0.0,),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "router_logit_softcapping": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "use_parallel_residual": (False,),
}
"""Keys whose listed values mean that the model has no such thing."""


_REQUIRED = ("block_count", "context_length", "embedding_length", "attention.head_count")
"""Keys without which llama.cpp does not load a file."""

_NO_MODELS: Mapping[str, str] = {
    "adapter": "a LoRA adapter: name the model's own file, and this one converted to safetensors "
    "with --lora-modules",
    "imatrix": "statistics for quantisation, without weights",
    "mmproj": "the image encoder of a model: name the model's own file",
    "vocab": "a tokenizer without weights",
}
_TOKENIZER_KEYS = frozenset(
    # read by gguf_tokens and by the engine's tokenizer
    """
    model pre tokens token_type scores merges add_bos_token add_eos_token add_space_prefix
    bos_token_id eos_token_id eot_token_id eom_token_id unknown_token_id
    fim_pad_token_id fim_rep_token_id fim_sep_token_id
    """.split()  # noqa: SIM905
    # of encoders, or names of tokens that generation does not use
    + """
    token_type_count cls_token_id mask_token_id padding_token_id seperator_token_id add_sep_token
    fim_pre_token_id fim_suf_token_id fim_mid_token_id prefix_token_id suffix_token_id
    middle_token_id remove_extra_whitespaces precompiled_charsmap
    """.split()  # noqa: SIM905
)
"""Keys after `tokenizer.ggml.`; the last two are read for unigram tokenizers, which are refused."""


def _check_outside(file: Gguf) -> None:
    """Keys outside the architecture. Those of `general`, `split`, `quantize` and of unknown tools
    are notes about the file: llama.cpp reads none of them to compute."""
    kind = file.metadata.get("general.type", "model")
    if "adapter.type" in file.metadata:
        kind = "adapter"
    if kind in _NO_MODELS:
        raise BadModel("the GGUF file holds no model", value=kind, fix=_NO_MODELS[str(kind)])
    for name, value in file.metadata.items():
        key = name.removeprefix("tokenizer.ggml.")
        if key != name and key not in _TOKENIZER_KEYS and value not in (False, [], 0):
            raise BadModel(
                f"the GGUF key {name} is not understood, and leaving it out could change texts",
                value=str(value)[:80],
                fix=SAFETENSORS,
            )


def gguf_config(file: Gguf) -> dict[str, Any]:
    """The Hugging Face config of the model. Raises BadModel for what would be lost."""
    _check_outside(file)
    row = architecture_of(file)
    keys = keys_of(file)
    _check(file, keys, row)
    config: dict[str, Any] = {"model_type": row.family, "dtype": "float32"}
    for theirs, ours in (SHARED | dict(row.fields)).items():
        value = keys.get(theirs)
        if value not in (None, 0) or (theirs in SHARED and value is not None):
            config[ours] = value
    config.setdefault("rope_theta", 10_000.0)
    if "head_dim" not in config and isinstance(config.get("num_attention_heads"), int):
        config["head_dim"] = count(file, keys, "embedding_length") // heads(file, keys)
    if row.family == "gemma4_text":
        config |= gemma4_config(file, keys)
    elif row.family in LATENT:
        config |= latent_config(file, keys, row)
    else:
        config |= rope_config(file, keys, config)
    config |= special_config(file, keys, row) | windowed_config(file, keys, row)
    config["vocab_size"] = file.tensors["token_embd.weight"].shape[0]
    if row.family in ("gemma3n_text", "gemma4_text"):
        config |= layer_input_config(file, keys, row)
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config["bos_token_id"] = special_id(file.metadata, "bos")
    config["eos_token_id"] = list(end_of_generation(file.metadata))
    return config


def _is_neutral(key: str, value: object, keys: Mapping[str, Any]) -> bool:
    """Whether the model is the same without a key that is not read."""
    if key == "rope.freq_base_swa":  # converters repeat the only base
        return bool(value == keys.get("rope.freq_base", 10_000.0))
    if key == "rope.scaling.yarn_attn_factor" and isinstance(value, float):
        return value == 1.0 or abs(value - yarn_attention_factor(keys)) < 1e-4
    return value in _NEUTRAL.get(key, ())


def _check(file: Gguf, keys: Mapping[str, Any], row: Architecture) -> None:
    start = str(file.metadata["general.architecture"])
    known = SHARED.keys() | row.fields.keys() | row.read | _ROPE | _HARMLESS.keys()
    for key, value in keys.items():
        if key not in known and not _is_neutral(key, value, keys):
            raise BadModel(
                f"the GGUF key {start}.{key} is not understood, and leaving it out could change "
                "the result",
                value=str(value)[:80],
                fix=SAFETENSORS,
            )
    eps = "attention.layer_norm_epsilon"
    eps = eps if eps in row.fields else "attention.layer_norm_rms_epsilon"
    for key in (*_REQUIRED, eps):
        if key not in keys:
            raise BadModel(f"the GGUF file lacks the key {start}.{key}", fix=SAFETENSORS)
    if row.family in ("mixtral", "qwen3_moe") and "blk.0.ffn_gate.0.weight" in file.tensors:
        raise BadModel(
            "GGUF files with one tensor per expert (written before April 2024) are not supported",
            value=str(file.path),
            fix="convert the model again: current converters stack the experts (ffn_gate_exps)",
        )
    if "token_embd.weight" not in file.tensors:
        raise BadModel("the GGUF file lacks a tensor", value="token_embd.weight")
