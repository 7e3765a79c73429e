"""Gemma 3n and Gemma 4: shared KV caches, layer inputs, heads of two sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from msgspec.structs import replace

from ridgeline.modelspec.families import layer_kinds as kinds
from ridgeline.modelspec.families.config_fields import ConfigFields
from ridgeline.modelspec.families.family import COMMON, Family, MoeFields
from ridgeline.modelspec.families.rope_config import RopeFields
from ridgeline.modelspec.layer_inputs import MAX_STREAMS
from ridgeline.modelspec.model import (
    AltUpSpec,
    AttentionSpec,
    LayerInputSpec,
    LayerSpec,
    LinearSpec,
    MlpSpec,
    SharedExpertSpec,
)

Layers = tuple[LayerSpec, ...]
Gated = TypeVar("Gated", MlpSpec, SharedExpertSpec)
_SPARSE_LAYERS, _SPARSITY = 10, 0.95
"""Gemma 3n without an `activation_sparsity_pattern`: the first ten layers, if there are more."""

_SHARED: dict[str, Any] = {
    **{key: value for key, value in COMMON.items() if key != "hidden_act"},
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256,
    "num_attention_heads": 8,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 512,
    "layer_types": None,
    "attention_bias": False,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
}


def _kinds_every(interval: int) -> kinds.LayerKinds:
    def layer_kinds(values: ConfigFields) -> list[str]:
        found = kinds.every_nth_full_unless_explicit(values, interval)
        # transformers sees to it that the last layer sees everything
        return [*found[:-1], kinds.FULL] if interval == _GEMMA_4_INTERVAL else found

    return layer_kinds


_GEMMA_4_INTERVAL = 6


def _plain_scores(values: ConfigFields, attention: AttentionSpec, kind: str) -> AttentionSpec:
    """Scores are not scaled, because q and k are normalised; so are the values."""
    return replace(attention, scale=1.0, v_norm=True)


def _gemma4_attention(values: ConfigFields, attention: AttentionSpec, kind: str) -> AttentionSpec:
    """Full layers have larger heads, perhaps fewer KV heads, and keys for values."""
    attention = _plain_scores(values, attention, kind)
    if kind != kinds.FULL:
        return attention
    size, num_kv_heads = _full_heads(values, attention)
    heads, v_is_k = attention.num_heads, values.flag("attention_k_eq_v")
    if heads % num_kv_heads:
        raise values.bad("num_global_key_value_heads", f"a divisor of the {heads} heads")
    return replace(
        attention,
        head_dim=size,
        num_kv_heads=num_kv_heads,
        rope=replace(attention.rope, dim=size),
        q=replace(attention.q, num_out=heads * size),
        k=replace(attention.k, num_out=num_kv_heads * size),
        v=replace(attention.v, num_out=num_kv_heads * size),
        o=replace(attention.o, num_in=heads * size),
        v_is_k=v_is_k,
    )


def _full_heads(values: ConfigFields, attention: AttentionSpec) -> tuple[int, int]:
    """(size, number of KV heads) of layers that see everything.

    Published configs name them; transformers 5 writes a `per_layer_config` in place of the names.
    """
    by_layer: Any = values.raw("per_layer_config")
    if by_layer is None:
        own = values.opt_count("num_global_key_value_heads")
        if own is None or not values.flag("attention_k_eq_v"):
            own = attention.num_kv_heads
        return values.count("global_head_dim"), own
    if by_layer == {}:  # no layer differs
        return attention.head_dim, attention.num_kv_heads
    layers = kinds.explicit(values)
    full = {i for i, kind in enumerate(layers) if kind == kinds.FULL}
    rows = list(by_layer.values()) if isinstance(by_layer, dict) else []
    alike = all(isinstance(row, dict) and row == rows[0] for row in rows)
    # numbers are padded with zeros where there are ten layers or more
    named = {int(key) for key in by_layer if str(key).isdigit()} if rows else set()
    if not rows or not alike or named != full:
        raise values.bad("per_layer_config", "equal fields of every full_attention layer")
    inner = ConfigFields(
        rows[0],
        {"num_key_value_heads": attention.num_kv_heads, "head_dim": attention.head_dim},
        where=f"{values.where}: per_layer_config",
    )
    unknown = sorted(rows[0].keys() - {"num_key_value_heads", "head_dim"})
    if unknown:
        raise values.bad("per_layer_config", f"head_dim and num_key_value_heads, not {unknown[0]}")
    return inner.count("head_dim"), inner.count("num_key_value_heads")


def _with_inputs(values: ConfigFields, layers: Layers) -> Layers:
    """The layers with their inputs, the last `num_kv_shared_layers` of them without a cache."""
    num_shared = values.whole("num_kv_shared_layers")
    first = len(layers) - num_shared
    keeping = {layer.attention.window for layer in layers[: max(0, first)]}
    if num_shared and {layer.attention.window for layer in layers} != keeping:
        raise values.bad(
            "num_kv_shared_layers", "fewer, so that a layer of each kind keeps a cache"
        )
    inputs = _layer_input(values, layers[0])
    return tuple(
        replace(
            layer,
            layer_input=inputs,
            attention=replace(layer.attention, shares_kv=i >= first, v_is_k=False)
            if i >= first
            else layer.attention,
        )
        for i, layer in enumerate(layers)
    )


def _layer_input(values: ConfigFields, layer: LayerSpec) -> LayerInputSpec | None:
    size = values.whole("hidden_size_per_layer_input") if _has_inputs(values) else 0
    if not size:
        return None
    hidden_size, fmt = values.count("hidden_size"), layer.attention.q.format
    return LayerInputSpec(
        vocab_size=values.count("vocab_size_per_layer_input"),
        size=size,
        gate=LinearSpec(num_out=size, num_in=hidden_size, format=fmt),
        up=LinearSpec(num_out=hidden_size, num_in=size, format=fmt),
    )


def _has_inputs(values: ConfigFields) -> bool:
    return values.raw("hidden_size_per_layer_input") is not None


def _gemma3n_layers(values: ConfigFields, layers: Layers) -> Layers:
    hidden_size, fmt = values.count("hidden_size"), layers[0].attention.q.format
    rank = values.count("laurel_rank")
    num_streams = values.count("altup_num_inputs", at_most=MAX_STREAMS)
    if num_streams < 2:
        raise values.bad("altup_num_inputs", "2 or more")
    altup = AltUpSpec(
        num_streams=num_streams,
        active=values.whole("altup_active_idx"),
        scales_active=values.flag("altup_correct_scale"),
        laurel_down=LinearSpec(num_out=rank, num_in=hidden_size, format=fmt),
        laurel_up=LinearSpec(num_out=hidden_size, num_in=rank, format=fmt),
    )
    if altup.active >= num_streams:
        raise values.bad("altup_active_idx", f"below altup_num_inputs {num_streams}")
    sizes, sparsities = _mlp_sizes(values), _sparsities(values)
    out = []
    for layer, size, sparsity in zip(_with_inputs(values, layers), sizes, sparsities, strict=True):
        mlp = replace(
            layer.mlp,
            gate=replace(layer.mlp.gate, num_out=size),
            up=replace(layer.mlp.up, num_out=size),
            down=replace(layer.mlp.down, num_in=size),
            sparsity=sparsity,
        )
        out.append(replace(layer, mlp=mlp, altup=altup))
    return _shared_objects(out)


def _gemma4_layers(values: ConfigFields, layers: Layers) -> Layers:
    wide = values.flag("use_double_wide_mlp")
    out = []
    for layer in _with_inputs(values, layers):
        mlp, is_wide = layer.mlp, wide and layer.attention.shares_kv
        if mlp.shared is not None:  # the MLP of dense layers, next to the experts
            shared = _twice_as_wide(mlp.shared) if is_wide else mlp.shared
            mlp = replace(mlp, shared=shared, own_norms=True)
        elif is_wide:
            mlp = _twice_as_wide(mlp)
        out.append(replace(layer, mlp=mlp, output_scale=True))
    return _shared_objects(out)


def _twice_as_wide(mlp: Gated) -> Gated:
    return replace(
        mlp,
        gate=replace(mlp.gate, num_out=2 * mlp.gate.num_out),
        up=replace(mlp.up, num_out=2 * mlp.up.num_out),
        down=replace(mlp.down, num_in=2 * mlp.down.num_in),
    )


def _shared_objects(layers: list[LayerSpec]) -> Layers:
    """Equal layers as one object, which keeps later arithmetic cheap."""
    same: dict[LayerSpec, LayerSpec] = {}
    return tuple(same.setdefault(layer, layer) for layer in layers)


def _mlp_sizes(values: ConfigFields) -> list[int]:
    """`intermediate_size`: one number, or one per layer."""
    sizes: Any = values.raw("intermediate_size")
    num = kinds.num_layers(values)
    if not isinstance(sizes, list):
        return [values.count("intermediate_size")] * num
    if len(sizes) != num or any(isinstance(s, bool) or not isinstance(s, int) for s in sizes):
        raise values.bad("intermediate_size", f"a positive integer, or {num} of them")
    where = f"{values.where}: intermediate_size"
    return [
        ConfigFields({"of a layer": size}, {}, where=where).count("of a layer") for size in sizes
    ]


def _sparsities(values: ConfigFields) -> list[float]:
    pattern: Any = values.raw("activation_sparsity_pattern")
    num = kinds.num_layers(values)
    if pattern is None:
        num_sparse = _SPARSE_LAYERS if num > _SPARSE_LAYERS else 0
        return [_SPARSITY] * num_sparse + [0.0] * (num - num_sparse)
    good = isinstance(pattern, list) and len(pattern) == num
    if not good or not all(isinstance(s, int | float) and 0 <= s < 1 for s in pattern):
        raise values.bad("activation_sparsity_pattern", f"{num} numbers of 0 or more, below 1")
    return [float(sparsity) for sparsity in pattern]


LAYER_INPUT_FAMILIES: Mapping[str, Family] = {
    "gemma3n_text": Family(
        architecture="Gemma3nForCausalLM",
        defaults={
            **_SHARED,
            "vocab_size": 262_400,
            "hidden_size": 2048,
            "intermediate_size": 16_384,
            "num_hidden_layers": 35,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32_768,
            "final_logit_softcapping": 30.0,
            "altup_active_idx": 0,
            "altup_coef_clip": 120.0,  # of training
            "altup_lr_multiplier": 1.0,  # of training
            "altup_correct_scale": True,
            "altup_num_inputs": 4,
            "num_kv_shared_layers": 15,
            "laurel_rank": 64,
            "activation_sparsity_pattern": None,
            "query_pre_attn_scalar": None,  # saved, and not read by transformers
        },
        layer_kinds=_kinds_every(5),
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        activation_key="hidden_activation",
        rope=RopeFields(default_theta=1_000_000.0, local_theta=10_000.0),
        qk_norm=True,
        norms="both",
        scaled_embedding=True,
        mlp_size=lambda values: max(_mlp_sizes(values)),
        adjust_attention=_plain_scores,
        adjust_layers=_gemma3n_layers,
    ),
    "gemma4_text": Family(
        architecture="Gemma4ForCausalLM",
        defaults={
            **_SHARED,
            "vocab_size": 262_144,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 30,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131_072,
            "final_logit_softcapping": None,
            "num_kv_shared_layers": 0,
            "attention_k_eq_v": False,
            "use_double_wide_mlp": False,
            "global_head_dim": 512,
            "num_global_key_value_heads": None,
            "per_layer_config": None,
            "enable_moe_block": False,
            "num_experts": None,
            "top_k_experts": None,
            "moe_intermediate_size": None,
        },
        layer_kinds=_kinds_every(_GEMMA_4_INTERVAL),
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        activation_key="hidden_activation",
        rope=RopeFields(
            default_theta=1_000_000.0,
            local_theta=10_000.0,
            partial=True,
            scaling={
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
                "sliding_attention": {},
            },
        ),
        qk_norm=True,
        norms="both",
        scaled_embedding=True,
        adjust_attention=_gemma4_attention,
        adjust_layers=_gemma4_layers,
        moe=MoeFields(
            num_experts_key="num_experts",
            expert_size_key="moe_intermediate_size",
            top_k_key="top_k_experts",
            routed_layers=lambda values: (
                [values.flag("enable_moe_block")] * kinds.num_layers(values)
            ),
            shared_size_key="intermediate_size",
        ),
        fixed={
            # "vision": images see all of themselves; text stays causal
            "use_bidirectional_attention": (None, False, "vision"),
        },
    ),
}
