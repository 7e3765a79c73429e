"""Gemma 3n and 4: layers with inputs, shared caches, and heads of two sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ridgeline.errors import BadModel
from ridgeline.modelspec.checkpoints.gguf_architectures.families import window_kinds
from ridgeline.modelspec.checkpoints.gguf_architectures.keys import count
from ridgeline.modelspec.checkpoints.gguf_architectures.rows import ROUTER, Architecture
from ridgeline.modelspec.checkpoints.gguf_header import Gguf, float_list


def layer_input_config(file: Gguf, keys: Mapping[str, Any], row: Architecture) -> dict[str, Any]:
    """Gemma 3n and 4: layers with inputs and shared caches, and what tells which layers slide."""
    rows = file.tensors.get("per_layer_token_embd.weight", file.tensors["token_embd.weight"])
    out = {
        "num_kv_shared_layers": keys.get("attention.shared_kv_layers", 0),
        "hidden_size_per_layer_input": keys.get("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": rows.shape[0],
        **window_kinds(file, keys, 5 if row.family == "gemma3n_text" else 6),
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


def gemma4_config(file: Gguf, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Gemma 4: heads of two sizes, and full layers that rotate a part of each head."""
    full, sliding = (count(file, keys, f"attention.key_length{end}") for end in ("", "_swa"))
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
    kinds = window_kinds(file, keys, 6)["layer_types"]
    places = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    first_full = places[0] if places else 0
    out: dict[str, Any] = {
        "head_dim": sliding,
        "global_head_dim": full,
        "attention_k_eq_v": f"blk.{first_full}.attn_v.weight" not in file.tensors,
        "enable_moe_block": ROUTER.format(0) in file.tensors,
        "final_logit_softcapping": keys.get("final_logit_softcapping", _SOFTCAP) or None,
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


_SOFTCAP = 30.0
"""What llama.cpp bounds logits by where a file does not say it."""

_STANDS_STILL = 1e20
"""Numbers whose frequency is divided by this or more do not turn; converters write 1e30."""
