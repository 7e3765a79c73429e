"""Typed access to the fields of a config.json, and a strict check of the field names.

A field is *understood* (a family gives it a default and a meaning), *harmless* (it cannot change
the result of a forward pass), or *fixed* (harmless only at the listed values). Any other field is
an error that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.errors import BadModel

HARMLESS = frozenset(
    # training, bookkeeping and output switches of transformers' configs, of any version
    """
    _attn_implementation_autoset _commit_hash _flash_attn_2_enabled _name_or_path architectures
    attention_dropout attention_probs_dropout_prob attn_dropout attn_implementation
    cache_implementation classifier_dropout dropout hidden_dropout hidden_dropout_prob
    initializer_factor max_sequence_length model_max_length n_ctx use_flash_attention
    use_flash_attn chunk_size_feed_forward dtype embd_pdrop id2label
    embedding_initializer_range initializer_range is_llama_config label2id model_type
    name_or_path neftune_noise_alpha num_labels
    output_attentions output_hidden_states output_router_logits pad_token_id pretraining_tp
    problem_type resid_pdrop residual_dropout return_dict router_aux_loss_coef router_jitter_noise
    task_specific_params tokenizer_class torch_dtype torchscript transformers.js_config
    aux_loss_alpha ep_size num_mtp_layers num_mtp_modules num_nextn_predict_layers seq_aux
    mtp_transformer_layers use_mtp
    transformers_version unsloth_fixed unsloth_version use_bfloat16 use_cache
    """.split()  # noqa: SIM905
    # generation parameters that older versions saved in config.json
    + """
    bad_words_ids begin_suppress_tokens decoder_start_token_id diversity_penalty do_sample
    early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty
    forced_bos_token_id forced_eos_token_id length_penalty max_length max_new_tokens min_length
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores prefix
    remove_invalid_values repetition_penalty return_dict_in_generate sep_token_id suppress_tokens
    temperature top_k top_p typical_p
    """.split()  # noqa: SIM905
)

FIXED: dict[str, tuple[object, ...]] = {
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "finetuning_task": (None,),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "rope_interleaved": (False,),
    "quantization_config": (None, {}),
    "tf_legacy_loss": (False,),
    "tie_encoder_decoder": (False,),
    "tie_word_embeddings": (False, True),
    "use_bidirectional_attention": (None, False),
    "use_mrope": (False,),
}

OFF: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("attention_bias", "mlp_bias", "qkv_bias", "use_bias"), (False,)),
    "qk_layer_norms": (False,),
    "use_qk_norm": (False,),
    "use_sliding_window": (False,),
}
"""Fields that name what a family without them does not have, at the values that say so."""

_REASONS = {
    "quantization": "the checkpoint is quantised by MLX (quantization), which is not read",
    "auto_map": "the model requires custom Python code (auto_map); Ridgeline never runs it",
    "quantization_config": "the checkpoint is already quantised (quantization_config), "
    "which this version cannot load",
}
OFFICIAL_CODE: Mapping[str, frozenset[str]] = {
    **{
        model_type: frozenset((f"{name}Config", f"{name}Model", f"{name}ForCausalLM"))
        for model_type, name in (
            ("deepseek_v2", "DeepseekV2"),
            ("deepseek_v3", "DeepseekV3"),
            ("kimi_k2", "DeepseekV3"),
        )
    },
    "ernie4_5": frozenset(
        f"Ernie4_5{dash}{part}" for dash in ("", "_") for part in ("Config", "Model", "ForCausalLM")
    ),
    "internlm3": frozenset(("InternLM3Config", "InternLM3Model", "InternLM3ForCausalLM")),
    "minimax_m2": frozenset(("MiniMaxM2Config", "MiniMaxM2ForCausalLM")),
    "phi3": frozenset(("Phi3Config", "Phi3ForCausalLM")),
}
"""Families whose published directories carry the code that transformers has for them since, by the
names of its classes. Code under the same names elsewhere may differ: gte's Qwen2 is bidirectional.
"""
_FIXES = {
    "auto_map": "if its model_type is one that Ridgeline knows, remove auto_map from config.json",
    "quantization_config": "use the unquantised checkpoint, and --quantization int8",
    "quantization": "use the unquantised checkpoint, and --quantization int4 or int8",
}


MAX_COUNT = 1 << 40
"""Of anything that a config.json counts."""


class ConfigFields:
    """The fields of one config.json on top of a family's defaults. Wrong types raise BadModel."""

    def __init__(
        self, config: Mapping[str, Any], defaults: Mapping[str, Any], *, where: str
    ) -> None:
        self._values = {**defaults, **config}
        self.where = where

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def raw(self, key: str) -> Any:
        return self._values.get(key)

    def bad(self, key: str, limit: str) -> BadModel:
        return bad_field(self.where, key, self.raw(key), limit)

    def count(self, key: str, at_most: int | None = None) -> int:
        """A positive integer, at most `at_most`."""
        value = self.raw(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.bad(key, "a positive integer")
        limit = MAX_COUNT if at_most is None else at_most
        if value > limit:
            raise self.bad(key, f"at most {limit}")
        return value

    def opt_count(self, key: str) -> int | None:
        return None if self.raw(key) is None else self.count(key)

    def whole(self, key: str) -> int:
        """An integer >= 0."""
        value = self.raw(key)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_COUNT:
            raise self.bad(key, f"0..{MAX_COUNT}")
        return value

    def number(self, key: str) -> float:
        """A positive finite number."""
        value = self.raw(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e300:
            raise self.bad(key, "a positive number")
        return float(value)

    def opt_number(self, key: str) -> float | None:
        return None if self.raw(key) is None else self.number(key)

    def flag(self, key: str) -> bool:
        value = self.raw(key)
        if not isinstance(value, bool):
            raise self.bad(key, "true or false")
        return value

    def choice(self, key: str, known: Mapping[str, str]) -> str:
        """The meaning of a name in a table of known names."""
        value = self.raw(key)
        if not isinstance(value, str) or value not in known:
            raise self.bad(key, f"supported: {', '.join(known)}")
        return known[value]

    def token_ids(self, key: str) -> tuple[int, ...]:
        """A token id, a list of them, or null. -1 is the id of no token."""
        value = self.raw(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < -1 for i in ids):
            raise self.bad(key, "a token id, a list of token ids, or null")
        return tuple(i for i in ids if i >= 0)


def bad_field(where: str, key: str, value: object, limit: str) -> BadModel:
    return BadModel(f"{where}: the field {key} cannot be used", value=value, limit=limit)


def without_official_code(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """`config` without an `auto_map` that names only the published code of its family."""
    official = OFFICIAL_CODE.get(str(config.get("model_type")), frozenset())
    auto_map = config.get("auto_map")
    if not isinstance(auto_map, Mapping):
        return config
    classes = {
        str(path).rsplit(".", 1)[-1] for name, path in auto_map.items() if name != "AutoTokenizer"
    }
    if not classes <= official:
        return config
    return {key: value for key, value in config.items() if key != "auto_map"}


def check_names(
    config: Mapping[str, Any],
    understood: frozenset[str],
    fixed: Mapping[str, tuple[object, ...]],
    *,
    where: str,
) -> None:
    """Raise BadModel for the first field that is not understood, harmless, or at a fixed value.

    A field that is null says nothing, and `layer_types` nothing new where all attention is full.
    """
    off = {key: values for key, values in OFF.items() if key not in understood}
    allowed = {**off, **FIXED, **fixed}
    for key, value in config.items():
        if key in allowed:
            if value not in allowed[key]:
                raise _refusal(where, key, value, f"supported: {_or(allowed[key])}")
        elif key == "layer_types" and key not in understood and _all_full(value):
            continue
        elif key not in understood and key not in HARMLESS and value is not None:
            raise _refusal(where, key, value, None)


def _all_full(kinds: object) -> bool:
    return isinstance(kinds, list) and all(kind == "full_attention" for kind in kinds)


def _refusal(where: str, key: str, value: object, limit: str | None) -> BadModel:
    if key in _REASONS:
        return BadModel(f"{where}: {_REASONS[key]}", fix=_FIXES[key])
    if limit is not None:
        return bad_field(where, key, value, limit)
    return BadModel(
        f"{where}: the field {key} is not understood, and ignoring it could change the result",
        value=str(value)[:80],
        fix=f"remove {key} from config.json if it has no effect on inference",
    )


def _or(values: tuple[object, ...]) -> str:
    return " or ".join("null" if value is None else str(value).lower() for value in values)
