"""Builds a ModelSpec from the fields of a config.json and the `Family` row of its model type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, cast

from ridgeline.modelspec.families import layer_kinds
from ridgeline.modelspec.families.config_fields import ConfigFields
from ridgeline.modelspec.families.latent import latent_attention
from ridgeline.modelspec.families.rope_config import rope_by_layer_kind
from ridgeline.modelspec.format import Format, dense
from ridgeline.modelspec.model import (
    Activation,
    AttentionSpec,
    DeltaSpec,
    LayerSpec,
    LinearSpec,
    MlpSpec,
    ModelSpec,
    RopeSpec,
    RoutingSpec,
    SharedExpertSpec,
)

if TYPE_CHECKING:
    from ridgeline.modelspec.families.family import Family, MoeFields

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu2": "relu2",
    "xielu": "xielu",
}
MAX_EXPERTS = 4096  # per layer; bounds the number of tensors (DeepSeek-V3 has 256 experts)
MAX_CONV = 64  # taps of a convolution, which every sequence keeps
DTYPES = {name: name for name in ("float32", "bfloat16", "float16")} | {
    f"torch.{name}": name for name in ("float32", "bfloat16", "float16")
}


def build(values: ConfigFields, row: Family, *, name: str, family: str) -> ModelSpec:
    """The frozen spec; every weight dense in the checkpoint's dtype."""
    dtype = stored_dtype(values)
    hidden_size = values.count("hidden_size")
    vocab_size = values.count("vocab_size")
    bos = values.token_ids("bos_token_id")
    return ModelSpec(
        name=name,
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        layers=_layers(values, row, dense(dtype)),
        max_positions=_max_positions(values, row),
        norm_eps=values.number("rms_norm_eps"),
        lm_head=LinearSpec(num_out=vocab_size, num_in=hidden_size, format=dense(dtype)),
        tied_embeddings=values.flag("tie_word_embeddings"),
        stored_dtype=dtype,
        dtype=dtype,
        kv_dtype=dtype,
        norm_plus_one=row.gemma_norms or row.zero_centred_norms,
        norm_centred=row.layer_norm,
        embed_scale=_multiplier(values, "embedding_multiplier")
        * (hidden_size**0.5 if row.gemma_norms or row.scaled_embedding else 1.0),
        logit_scale=_multiplier(values, "logit_scale") / _multiplier(values, "logits_scaling"),
        final_softcap=values.opt_number("final_logit_softcapping"),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=eos_in_vocabulary(values.token_ids("eos_token_id"), vocab_size),
    )


def _max_positions(values: ConfigFields, row: Family) -> int:
    """Of the config, or what its YaRN extends the context to: as vLLM.

    Users of Qwen 2.5 and 3 add `rope_scaling` by the model card, which leaves the other field.
    """
    ropes = rope_by_layer_kind(values, row.rope, _rope_dim(values, row))
    reached = [
        int(rope.factor * rope.original_max_positions)
        for rope in ropes.values()
        if rope.kind == "yarn" and rope.original_max_positions
    ]
    return max([values.count("max_position_embeddings"), *reached])


def _rope_dim(values: ConfigFields, row: Family) -> int:
    return values.count("qk_rope_head_dim") if row.latent else _heads(values)[2]


def eos_in_vocabulary(eos_token_ids: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    """The distinct ids below `vocab_size`; others have no logit and can never be sampled."""
    return tuple(token for token in dict.fromkeys(eos_token_ids) if token < vocab_size)


def stored_dtype(values: ConfigFields) -> str:
    """`dtype` or, in older configs, `torch_dtype`; float32 if neither is given."""
    key = "dtype" if values.raw("dtype") is not None else "torch_dtype"
    return "float32" if values.raw(key) is None else values.choice(key, DTYPES)


def _layers(values: ConfigFields, row: Family, fmt: Format) -> tuple[LayerSpec, ...]:
    # Equal layers share one object, which keeps later arithmetic cheap.
    kinds = row.layer_kinds(values)
    routed = _routed_layers(values, row, len(kinds))
    rotated = row.rotated(values, kinds) if row.rotated else [True] * len(kinds)
    made: dict[tuple[str, bool, bool], LayerSpec] = {}
    ropes = rope_by_layer_kind(values, row.rope, _rope_dim(values, row))
    for key in dict.fromkeys(zip(kinds, routed, rotated, strict=True)):
        is_routed = key[1]
        made[key] = LayerSpec(
            attention=_mixer(values, row, fmt, ropes, key),
            mlp=_experts(values, row, fmt) if is_routed else _mlp(values, row, fmt),
            norms=row.norms,
            residual_scale=_multiplier(values, "residual_multiplier"),
            parallel=row.parallel,
        )
    layers = tuple(made[key] for key in zip(kinds, routed, rotated, strict=True))
    return layers if row.adjust_layers is None else row.adjust_layers(values, layers)


def _mixer(
    values: ConfigFields,
    row: Family,
    fmt: Format,
    ropes: Mapping[str, RopeSpec],
    key: tuple[str, bool, bool],
) -> AttentionSpec:
    """Attention of a layer, or what stands in its place."""
    kind, _, is_rotated = key
    if kind == layer_kinds.LINEAR:
        return _delta_net(values, fmt)
    rope = ropes[kind] if is_rotated else RopeSpec(dim=0, theta=ropes[kind].theta)
    if row.latent:
        return latent_attention(values, fmt, rope)
    attention = _attention(values, row, fmt, rope, layer_kinds.window_of(values, kind))
    adjust = row.adjust_attention
    return attention if adjust is None else adjust(values, attention, kind)


def _delta_net(values: ConfigFields, fmt: Format) -> AttentionSpec:
    hidden_size = values.count("hidden_size")
    key_heads, value_heads = (values.count(f"linear_num_{of}_heads") for of in ("key", "value"))
    key_dim, value_dim = (values.count(f"linear_{of}_head_dim") for of in ("key", "value"))
    if value_heads % key_heads:
        raise values.bad("linear_num_value_heads", f"a multiple of {key_heads} key heads")

    def linear(num_out: int, num_in: int = hidden_size) -> LinearSpec:
        return LinearSpec(num_out=num_out, num_in=num_in, format=fmt)

    return AttentionSpec(
        num_heads=value_heads,
        num_kv_heads=0,
        head_dim=value_dim,
        scale=key_dim**-0.5,
        rope=RopeSpec(dim=0, theta=1.0),
        q=linear(key_heads * key_dim),
        k=linear(key_heads * key_dim),
        v=linear(value_heads * value_dim),
        o=linear(hidden_size, value_heads * value_dim),
        delta=DeltaSpec(
            num_key_heads=key_heads,
            num_value_heads=value_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            conv_size=values.count("linear_conv_kernel_dim", at_most=MAX_CONV),
            z=linear(value_heads * value_dim),
            b=linear(value_heads),
            a=linear(value_heads),
        ),
    )


def _multiplier(values: ConfigFields, key: str) -> float:
    """A field that multiplies something, in families that have it; else 1."""
    return values.number(key) if key in values else 1.0


def _routed_layers(values: ConfigFields, row: Family, num: int) -> list[bool]:
    if row.moe is None:
        return [False] * num
    return [True] * num if row.moe.routed_layers is None else row.moe.routed_layers(values)


def _heads(values: ConfigFields) -> tuple[int, int, int]:
    """(query heads, KV heads, size of a head)."""
    num_heads = values.count("num_attention_heads")
    num_kv_heads = values.opt_count("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise values.bad("num_key_value_heads", f"a divisor of num_attention_heads {num_heads}")
    hidden_size = values.count("hidden_size")
    head_dim = values.opt_count("head_dim")
    if head_dim is None and hidden_size % num_heads:
        raise values.bad("num_attention_heads", f"a divisor of hidden_size {hidden_size}")
    return num_heads, num_kv_heads, head_dim or hidden_size // num_heads


def _attention(
    values: ConfigFields, row: Family, fmt: Format, rope: RopeSpec, window: int | None
) -> AttentionSpec:
    num_heads, num_kv_heads, head_dim = _heads(values)
    hidden_size = values.count("hidden_size")
    qkv_bias, o_bias, qk_norm = (
        values.flag(has) if isinstance(has, str) else has
        for has in (row.qkv_bias, row.o_bias, row.qk_norm)
    )

    norm_heads = row.qk_norm_key is not None and values.flag(row.qk_norm_key)

    def linear(num_out: int, num_in: int, bias: bool) -> LinearSpec:
        return LinearSpec(num_out=num_out, num_in=num_in, format=fmt, bias=bias)

    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=values.opt_number("attention_multiplier")
        or (values.opt_number("query_pre_attn_scalar") or head_dim) ** -0.5,
        rope=rope,
        q=linear((1 + row.gated_attention) * num_heads * head_dim, hidden_size, qkv_bias),
        k=linear(num_kv_heads * head_dim, hidden_size, qkv_bias),
        v=linear(num_kv_heads * head_dim, hidden_size, qkv_bias),
        o=linear(hidden_size, num_heads * head_dim, o_bias),
        window=window,
        softcap=values.opt_number("attn_logit_softcapping"),
        qk_norm=qk_norm or norm_heads,
        qk_norm_heads=norm_heads,
        qk_norm_rows=row.qk_norm_rows,
        sinks=row.sinks,
        gated=row.gated_attention,
    )


def _activation(values: ConfigFields, row: Family) -> Activation:
    if row.activation is not None:
        return row.activation
    meaning = values.choice(row.activation_key, ACTIVATIONS)
    if row.gelu_is_tanh and meaning == "gelu":
        meaning = "gelu_tanh"  # Gemma 1 says "gelu" and means the tanh form
    return cast(Activation, meaning)


def _mlp(values: ConfigFields, row: Family, fmt: Format) -> MlpSpec:
    bias = values.flag(row.mlp_bias) if row.mlp_bias in values else False
    hidden_size = values.count("hidden_size")
    inner = row.mlp_size(values) if row.mlp_size else values.count(row.mlp_size_key)
    up = LinearSpec(num_out=inner, num_in=hidden_size, format=fmt, bias=bias)
    down = LinearSpec(num_out=hidden_size, num_in=inner, format=fmt, bias=bias)
    return MlpSpec(activation=_activation(values, row), gate=up, up=up, down=down, gated=row.gated)


def _experts(values: ConfigFields, row: Family, fmt: Format) -> MlpSpec:
    moe = row.moe
    assert moe is not None
    hidden_size, inner = values.count("hidden_size"), values.count(moe.expert_size_key)
    num_experts = values.count(moe.num_experts_key, at_most=MAX_EXPERTS)
    top_k = values.count(moe.top_k_key)
    if top_k > num_experts:
        raise values.bad(moe.top_k_key, f"at most {moe.num_experts_key} {num_experts}")
    up = LinearSpec(num_out=inner, num_in=hidden_size, format=fmt, bias=moe.bias)
    return MlpSpec(
        activation=_activation(values, row),
        gate=up,
        up=up,
        down=LinearSpec(num_out=hidden_size, num_in=inner, format=fmt, bias=moe.bias),
        num_experts=num_experts,
        experts_per_token=top_k,
        shared=_shared_expert(values, moe, fmt),
        routing=_routing(values, moe, num_experts),
        norm_topk=values.flag(moe.norm_topk_key) if moe.norm_topk_key else not moe.weighs_inputs,
        router=LinearSpec(num_out=num_experts, num_in=hidden_size, format=fmt, bias=moe.bias),
    )


def _routing(values: ConfigFields, moe: MoeFields, num_experts: int) -> RoutingSpec:
    num_groups = groups_kept = 1
    if moe.groups is not None and moe.groups(values):
        num_groups, groups_kept = values.count("n_group"), values.count("topk_group")
        size = num_experts // num_groups
        if num_experts % num_groups or (size < 2 and num_groups > 1):
            raise values.bad("n_group", f"a divisor of the {num_experts} experts")
        if not groups_kept <= num_groups or values.count(moe.top_k_key) > size * groups_kept:
            raise values.bad("topk_group", f"at most n_group {num_groups}, with enough experts")
    return RoutingSpec(
        scoring=moe.scoring,
        correction=moe.correction,
        num_groups=num_groups,
        groups_per_token=groups_kept,
        scale=values.number(moe.scale_key) if moe.scale_key else 1.0,
        weighs_inputs=moe.weighs_inputs,
    )


def _shared_expert(values: ConfigFields, moe: MoeFields, fmt: Format) -> SharedExpertSpec | None:
    size = 0
    if moe.shared_size_key is not None:
        size = values.whole(moe.shared_size_key)
    elif moe.shared_count_key is not None and values.raw(moe.shared_count_key) is not None:
        size = values.whole(moe.shared_count_key) * values.count(moe.expert_size_key)
    if not size:
        return None
    hidden_size = values.count("hidden_size")
    up = LinearSpec(num_out=size, num_in=hidden_size, format=fmt)
    down = LinearSpec(num_out=hidden_size, num_in=size, format=fmt)
    router = LinearSpec(num_out=1, num_in=hidden_size, format=fmt) if moe.shared_router else None
    return SharedExpertSpec(gate=up, up=up, down=down, router=router)
