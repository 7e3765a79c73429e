"""Maps GGUF metadata to Hugging Face config fields, for each supported llama.cpp architecture.

Every key of the architecture is understood, harmless (with the reason), neutral at a listed value,
or an error that names it. Defaults are llama.cpp's, because its converter omits fields that equal
them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from ridgeline.errors import BadModel
from ridgeline.modelspec.checkpoints.gguf_header import Gguf, float_list
from ridgeline.modelspec.checkpoints.gguf_tokens import end_of_generation, special_id

ROUTER, EXPERTS = "blk.{}.ffn_gate_inp.weight", "_exps"
"""A layer that has the first is routed: its feed-forward's tensors then end in the second, and hold
all experts, [experts, outputs, inputs]."""

PREDICTION = "nextn_predict_layers"
"""The number of layers after the model's own, which predict further tokens and are left unread."""

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
        fields=_LAYER_INPUTS,
        read=frozenset(
            f"{key}_swa"
            for key in ("attention.key_length", "attention.value_length", "rope.dimension_count")
        ),
    ),
    "phi3": Architecture(family="phi3", fields=_WINDOW),
    "command-r": Architecture(family="cohere", fields=_CENTRED),
    "cohere2": Architecture(family="cohere2", fields={**_CENTRED, **_WINDOW}),
    "glm4": Architecture(family="glm4"),
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
            "expert_count": "n_routed_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_shared_count": "n_shared_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_weights_scale": "routed_scaling_factor",
            "leading_dense_block_count": "first_k_dense_replace",
        },
        tensors=_NORM_AFTER_ATTENTION,
        read=frozenset(("expert_gating_func", "expert_weights_norm", PREDICTION)),
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

_SHARED = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
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
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "router_logit_softcapping": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "use_parallel_residual": (False,),
}
"""Keys whose listed values mean that the model has no such thing."""


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
    if name == "llama" and file.metadata.get("llama.expert_count"):
        return _MIXTRAL
    if name == "llama" and file.metadata.get("llama.attention.sliding_window"):
        return _WINDOWED_LLAMA
    if name == "olmo2" and file.metadata.get("olmo2.attention.sliding_window"):
        return _OLMO3
    return ARCHITECTURES[name]


def gguf_config(file: Gguf) -> dict[str, Any]:
    """The Hugging Face config of the model. Raises BadModel for what would be lost."""
    row = architecture_of(file)
    keys = _keys(file)
    _check(file, keys, row)
    config: dict[str, Any] = {"model_type": row.family, "dtype": "float32"}
    for theirs, ours in (_SHARED | dict(row.fields)).items():
        value = keys.get(theirs)
        if value not in (None, 0) or (theirs in _SHARED and value is not None):
            config[ours] = value
    config.setdefault("rope_theta", 10_000.0)
    if "head_dim" not in config and isinstance(config.get("num_attention_heads"), int):
        config["head_dim"] = _count(file, keys, "embedding_length") // _heads(file, keys)
    if row.family == "gemma4_text":
        config |= _gemma4_config(file, keys)
    else:
        config |= _rope_config(file, keys, config)
    config |= _special_config(file, keys, row) | _windowed_config(file, keys, row)
    config["vocab_size"] = file.tensors["token_embd.weight"].shape[0]
    if row.family in ("gemma3n_text", "gemma4_text"):
        config |= _layer_input_config(file, keys, row)
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config["bos_token_id"] = special_id(file.metadata, "bos")
    config["eos_token_id"] = list(end_of_generation(file.metadata))
    return config


def _keys(file: Gguf) -> dict[str, Any]:
    """The architecture's keys without its name; one value where all layers have the same."""
    start = str(file.metadata["general.architecture"]) + "."
    found = {
        key.removeprefix(start): value
        for key, value in file.metadata.items()
        if key.startswith(start)
    }
    return {key: _same(key, value) for key, value in found.items()}


def _same(key: str, value: Any) -> Any:
    if isinstance(value, list) and value and key in _SHARED and value.count(value[0]) == len(value):
        return value[0]
    return value


def _count(file: Gguf, keys: Mapping[str, Any], key: str) -> int:
    value = keys.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        start = file.metadata["general.architecture"]
        raise BadModel(
            f"the GGUF key {start}.{key} is not a positive integer", value=str(value)[:80]
        )
    return value


def _heads(file: Gguf, keys: Mapping[str, Any]) -> int:
    return _count(file, keys, "attention.head_count")


def _check(file: Gguf, keys: Mapping[str, Any], row: Architecture) -> None:
    start = str(file.metadata["general.architecture"])
    known = _SHARED.keys() | row.fields.keys() | row.read | _ROPE | _HARMLESS.keys()
    for key, value in keys.items():
        if key not in known and value not in _NEUTRAL.get(key, ()):
            raise BadModel(
                f"the GGUF key {start}.{key} is not understood, and leaving it out could change "
                "the result",
                value=str(value)[:80],
                fix=SAFETENSORS,
            )
    for name in ("adapter.type", "tokenizer.ggml.suppress_tokens"):
        if file.metadata.get(name):
            raise BadModel(f"the GGUF key {name} is not understood", value=file.metadata[name])
    if row.family in ("mixtral", "qwen3_moe") and "blk.0.ffn_gate.0.weight" in file.tensors:
        raise BadModel(
            "GGUF files with one tensor per expert (written before April 2024) are not supported",
            value=str(file.path),
            fix="convert the model again: current converters stack the experts (ffn_gate_exps)",
        )
    if "token_embd.weight" not in file.tensors:
        raise BadModel("the GGUF file lacks a tensor", value="token_embd.weight")


def _rope_config(file: Gguf, keys: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary embedding: how much of a head turns, and how its frequencies are scaled."""
    out: dict[str, Any] = {}
    head_dim, turned = config.get("head_dim"), keys.get("rope.dimension_count")
    if keys.get("attention.value_length", head_dim) != head_dim:
        raise BadModel(
            "GGUF files with values of another size than keys are not supported",
            value=keys["attention.value_length"],
            limit=head_dim,
        )
    if isinstance(turned, int) and isinstance(head_dim, int) and turned not in (0, head_dim):
        out["partial_rotary_factor"] = turned / head_dim
    original = keys.get("rope.scaling.original_context_length")
    scaling = _factors(file) or _scaling(keys)
    if scaling and original:
        scaling.setdefault("original_max_position_embeddings", original)
    return out | ({"rope_scaling": scaling} if scaling else {})


def _factors(file: Gguf) -> dict[str, Any]:
    """Frequencies divided one by one: the same factors at every length (Llama 3.1), or two sets."""
    keys = _keys(file)
    attention = float(keys.get("rope.scaling.attn_factor", 1.0))
    once = float_list(file, "rope_freqs.weight")
    if once and any(factor != 1.0 for factor in once):
        _refuse_other_scaling(keys, "rope_freqs.weight")
        return {
            "rope_type": "longrope",
            "short_factor": once,
            "long_factor": once,
            "attention_factor": attention,
        }
    long, short = (float_list(file, f"rope_factors_{name}.weight") for name in ("long", "short"))
    if not long and not short:
        return {}
    _refuse_other_scaling(keys, "rope_factors_long.weight")
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "attention_factor": attention,
    }


def _refuse_other_scaling(keys: Mapping[str, Any], tensor: str) -> None:
    kind, factor = keys.get("rope.scaling.type", "none"), keys.get("rope.scaling.factor", 0.0)
    if kind not in ("none", "linear", "longrope") or (
        kind == "linear" and factor not in (0.0, 1.0)
    ):
        raise BadModel(
            f"GGUF files with both {tensor} and rope.scaling.type are not supported",
            value=str(kind),
            fix=SAFETENSORS,
        )


def _scaling(keys: Mapping[str, Any]) -> dict[str, Any]:
    kind = keys.get("rope.scaling.type", "linear")
    factor = float(keys.get("rope.scaling.factor") or keys.get("rope.scale_linear") or 1.0)
    if kind == "none" or (kind in ("linear", "longrope") and factor == 1.0):
        return {}
    out = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if keys.get(f"rope.scaling.{theirs}"):
                out[ours] = float(keys[f"rope.scaling.{theirs}"])
        extra = float(keys.get("rope.scaling.attn_factor", 1.0))
        if extra != 1.0:  # llama.cpp multiplies yarn's own factor with it
            out["attention_factor"] = extra * (1.0 + 0.1 * math.log(factor))
    return out


def _special_config(file: Gguf, keys: Mapping[str, Any], row: Architecture) -> dict[str, Any]:
    """What llama.cpp knows of a family without a key that says so."""
    num_layers = keys.get("block_count")
    if row.family == "qwen3_moe":  # llama.cpp renormalises, whatever the original says
        depth = range(num_layers if isinstance(num_layers, int) and num_layers < 4096 else 0)
        plain = [i for i in depth if ROUTER.format(i) not in file.tensors]
        return {"norm_topk_prob": True, "mlp_only_layers": plain}
    if row.family == "phi3":
        return {
            "original_max_position_embeddings": keys.get(
                "rope.scaling.original_context_length", keys.get("context_length")
            )
        }
    if row.family in ("qwen2_moe", "glm4_moe", "minimax_m2"):
        return _expert_config(file, keys, row)
    if row.family == "cohere":
        return {"use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors}
    if row.family == "cohere2":
        return _gemma_windows(file, keys, 4)
    if row.family not in ("gemma2", "gemma3_text"):
        return {}
    out: dict[str, Any] = {}
    largest = 46 if row.family == "gemma2" else 62  # the 27B models scale by the width
    if num_layers == largest:
        out["query_pre_attn_scalar"] = _count(file, keys, "embedding_length") // _heads(file, keys)
    else:
        out["query_pre_attn_scalar"] = keys.get("attention.key_length")
    return out | _gemma_windows(file, keys, 2 if row.family == "gemma2" else 6)


_SIGMOID = 2


def _expert_config(file: Gguf, keys: Mapping[str, Any], row: Architecture) -> dict[str, Any]:
    """How experts are chosen: scores of Qwen2-MoE are never renormalised in llama.cpp."""
    if row.family == "qwen2_moe":
        layers = range(min(_count(file, keys, "block_count"), 4096))
        plain = [i for i in layers if ROUTER.format(i) not in file.tensors]
        return {"norm_topk_prob": False, "mlp_only_layers": plain}
    if keys.get("expert_gating_func", _SIGMOID) != _SIGMOID:
        raise BadModel(
            "the experts of this GGUF file are chosen by another function than a sigmoid",
            value=f"expert_gating_func {keys['expert_gating_func']}",
            limit=_SIGMOID,
            fix=SAFETENSORS,
        )
    if row.family == "minimax_m2":
        return {"rotary_dim": keys.get("rope.dimension_count"), "partial_rotary_factor": None}
    depth = _count(file, keys, "block_count") - int(keys.get(PREDICTION) or 0)
    return {
        "num_hidden_layers": depth,
        "first_k_dense_replace": keys.get("leading_dense_block_count", 0),
        "norm_topk_prob": bool(keys.get("expert_weights_norm", False)),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
    }


_WINDOW_PERIODS = {"olmo3": 4, "exaone4": 4, "gpt_oss": 2}
_LAYERS_OF_WINDOWED_EXAONE = 64


def _windowed_config(file: Gguf, keys: Mapping[str, Any], row: Architecture) -> dict[str, Any]:
    """Windows and rotary embeddings as llama.cpp computes them, whatever the original says."""
    if row.family == "granite" and keys.get("rope.scaling.finetuned") is False:
        raise BadModel(
            "GGUF files of Granite without rotary embeddings are not supported",
            value="granite.rope.scaling.finetuned false",
            fix=SAFETENSORS,
        )
    if row.family not in _WINDOW_PERIODS:
        return {}
    num_layers = _count(file, keys, "block_count")
    if row.family == "exaone4" and num_layers != _LAYERS_OF_WINDOWED_EXAONE:
        if keys.get("attention.sliding_window"):
            raise BadModel(
                "llama.cpp reads windows of EXAONE 4 only in models of "
                f"{_LAYERS_OF_WINDOWED_EXAONE} layers",
                value=f"{num_layers} layers, a window of {keys['attention.sliding_window']}",
                fix=SAFETENSORS,
            )
        return {"sliding_window": None}
    out = _gemma_windows(file, keys, _WINDOW_PERIODS[row.family])
    if row.family == "exaone4":
        out.setdefault("sliding_window", keys.get("attention.sliding_window") or 4096)
    if row.family == "gpt_oss" and not _factors(file) and not _scaling(keys):
        out["rope_scaling"] = {"rope_type": "default"}  # the family's own default is yarn
    if row.family == "olmo3" and _scaling(keys):
        raise BadModel(
            "GGUF files of OLMo 3 whose rotary embedding is scaled are not supported",
            value=str(keys.get("rope.scaling.type")),
            fix=SAFETENSORS,
        )
    return out


def _gemma_windows(file: Gguf, keys: Mapping[str, Any], default: int) -> dict[str, Any]:
    """Which layers slide: a period, or a flag per layer."""
    pattern = keys.get("attention.sliding_window_pattern", default)
    num_layers = _count(file, keys, "block_count")
    if default == 6 and not keys.get("attention.sliding_window"):
        pattern = [False] * num_layers
    if isinstance(pattern, int):
        pattern = [bool((i + 1) % max(1, pattern)) for i in range(min(num_layers, 4096))]
    names = ["sliding_attention" if sliding else "full_attention" for sliding in pattern]
    return {"layer_types": names}


def _layer_input_config(file: Gguf, keys: Mapping[str, Any], row: Architecture) -> dict[str, Any]:
    """Gemma 3n and 4: layers with inputs and shared caches, and what tells which layers slide."""
    rows = file.tensors.get("per_layer_token_embd.weight", file.tensors["token_embd.weight"])
    out = {
        "num_kv_shared_layers": keys.get("attention.shared_kv_layers", 0),
        "hidden_size_per_layer_input": keys.get("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": rows.shape[0],
        **_gemma_windows(file, keys, 5 if row.family == "gemma3n_text" else 6),
    }
    if row.family == "gemma3n_text":
        laurel = file.tensors.get("blk.0.laurel_l.weight")
        if laurel is None:
            raise BadModel("the GGUF file lacks a tensor", value="blk.0.laurel_l.weight")
        out["laurel_rank"] = laurel.shape[0]
        deviations = keys.get("activation_sparsity_scale")
        if deviations is not None:  # standard deviations above the mean that a gate must exceed
            shares = (0.5 * (1.0 + math.erf(x / math.sqrt(2.0))) for x in deviations)
            out["activation_sparsity_pattern"] = [round(share, 6) for share in shares]
    return out


def _gemma4_config(file: Gguf, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Gemma 4: heads of two sizes, and full layers that rotate a part of each head."""
    full, sliding = (_count(file, keys, f"attention.key_length{end}") for end in ("", "_swa"))
    for end, size in (("", full), ("_swa", sliding)):
        for key in ("attention.value_length", "rope.dimension_count"):
            if keys.get(key + end, size) != size:
                raise BadModel(
                    f"GGUF files of Gemma 4 with another {key}{end} than attention.key_length{end} "
                    "are not supported",
                    value=keys[key + end],
                    limit=size,
                )
    factors = float_list(file, "rope_freqs.weight") or [1.0]
    turned = [factor for factor in factors if factor < _STANDS_STILL]
    if any(factor != 1.0 for factor in turned):
        raise BadModel("GGUF files of Gemma 4 with scaled frequencies are not supported")
    kinds = _gemma_windows(file, keys, 6)["layer_types"]
    places = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    first_full = places[0] if places else 0
    out: dict[str, Any] = {
        "head_dim": sliding,
        "global_head_dim": full,
        "attention_k_eq_v": f"blk.{first_full}.attn_v.weight" not in file.tensors,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": len(turned) / len(factors),
            },
            "sliding_attention": {},
        },
    }
    for key, ours in (("attention.head_count_kv", "num_key_value_heads"),):
        by_layer = keys.get(key)
        if isinstance(by_layer, list) and len(by_layer) == len(kinds):
            others = [
                n for n, kind in zip(by_layer, kinds, strict=True) if kind != kinds[first_full]
            ]
            out |= {
                ours: (others or by_layer)[0],
                "num_global_key_value_heads": by_layer[first_full],
            }
    sizes = keys.get("feed_forward_length")
    if isinstance(sizes, list) and sizes:
        out |= {"intermediate_size": sizes[0], "use_double_wide_mlp": sizes[-1] == 2 * sizes[0]}
    return out


_STANDS_STILL = 1e20
"""Numbers whose frequency is divided by this or more do not turn; converters write 1e30."""
