"""Families that can be planned although the engine cannot run them yet.

    hunyuan    groups of `cla_share_factor` layers share one KV cache; shared and routed experts
    opt        MLPs without a gate, biases, learned positions

Only fields that determine sizes, FLOPs and KV cache are read. Unknown fields are ignored and rotary
scaling is not described: unlike the families of `registry`, these specs are never run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

from msgspec.structs import replace

from ridgeline.modelspec.families.build import DTYPES, MAX_EXPERTS
from ridgeline.modelspec.families.config_fields import ConfigFields
from ridgeline.modelspec.families.layer_kinds import num_layers
from ridgeline.modelspec.format import Format, dense
from ridgeline.modelspec.model import (
    AttentionSpec,
    LayerSpec,
    LinearSpec,
    MlpSpec,
    ModelSpec,
    RopeSpec,
    SharedExpertSpec,
)

UNSUPPORTED: Mapping[str, str] = MappingProxyType(
    {
        "hunyuan": "the engine does not share a KV cache between layers",
        "opt": "the engine has no learned positions and no MLP without a gate",
    }
)
"""model_type → why the engine cannot run it."""

_GEMMA_4 = "layers share KV caches, have per-layer inputs, or heads of two sizes"
_STATE_SPACE = "some layers are state-space models (Mamba)"
_ENCODER = "it is an encoder: it embeds texts and does not generate"
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("gemma4", "gemma4_text", "gemma4_unified"), _GEMMA_4),
        **dict.fromkeys(("gemma3n", "gemma3n_text"), f"{_GEMMA_4}; AltUp and Laurel are missing"),
        **dict.fromkeys(
            ("bamba", "falcon_h1", "granitemoehybrid", "jamba", "mamba", "mamba2", "nemotron_h"),
            _STATE_SPACE,
        ),
        **dict.fromkeys(("bert", "modernbert", "roberta", "xlm-roberta"), _ENCODER),
        **dict.fromkeys(("t5", "whisper"), "it has an encoder and cross-attention"),
    }
)
"""model_type → why neither the engine nor planning knows it."""

_DEFAULTS: dict[str, Any] = {
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "num_shared_expert": 0,
    "cla_share_factor": 1,
}


def unsupported_spec(config: Mapping[str, Any], *, name: str) -> ModelSpec:
    """The spec of a config.json whose model_type is a key of `UNSUPPORTED`, every weight dense.

    Raises BadModel naming a field that is missing or has the wrong type.
    """
    given = {key: value for key, value in config.items() if value is not None}
    values = ConfigFields(given, _DEFAULTS, where=f"config.json of {name}")
    dtype = values.choice("torch_dtype" if "torch_dtype" in given else _dtype_key(given), DTYPES)
    hidden_size, vocab_size = values.count("hidden_size"), values.count("vocab_size")
    family = str(config["model_type"])
    spec = ModelSpec(
        name=name,
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        layers=_LAYERS[family](values, dense(dtype)),
        max_positions=values.count("max_position_embeddings"),
        norm_eps=values.number("rms_norm_eps"),
        lm_head=LinearSpec(num_out=vocab_size, num_in=hidden_size, format=dense(dtype)),
        tied_embeddings=values.flag("tie_word_embeddings"),
        stored_dtype=dtype,
        dtype=dtype,
        kv_dtype=dtype,
        unsupported=UNSUPPORTED[family],
    )
    if family == "opt":  # transformers' table has two rows more than positions
        spec = replace(
            spec, norm_centred=True, norm_bias=True, learned_positions=spec.max_positions + 2
        )
    return spec


def _dtype_key(given: Mapping[str, Any]) -> Literal["dtype", "torch_dtype"]:
    return "dtype" if "dtype" in given else "torch_dtype"


def _hunyuan_layers(values: ConfigFields, fmt: Format) -> tuple[LayerSpec, ...]:
    """Cross-layer attention: the first of `cla_share_factor` layers computes and caches the KV."""
    attention = _attention(values, fmt)
    experts = _experts(
        values,
        fmt,
        inner=values.count("intermediate_size"),
        num_experts_key="num_experts",
        top_k_key="moe_topk",
    )
    experts = _with_shared(experts, values.whole("num_shared_expert"))
    keeps = LayerSpec(attention=attention, mlp=experts)
    shares = replace(keeps, attention=replace(attention, shares_kv=True))
    group = values.count("cla_share_factor")
    return tuple(shares if i % group else keeps for i in range(num_layers(values)))


def _opt_layers(values: ConfigFields, fmt: Format) -> tuple[LayerSpec, ...]:
    mlp = _mlp(values, values.count("ffn_dim"), fmt, bias=True)
    attention = _attention(values, fmt, bias=True)
    attention = replace(attention, rope=replace(attention.rope, dim=0))
    layer = LayerSpec(attention=attention, mlp=replace(mlp, activation="relu", gated=False))
    return (layer,) * num_layers(values)


def _attention(values: ConfigFields, fmt: Format, *, bias: bool = False) -> AttentionSpec:
    hidden_size, heads = values.count("hidden_size"), values.count("num_attention_heads")
    kv_heads = values.opt_count("num_key_value_heads") or heads
    head_dim = values.opt_count("head_dim") or hidden_size // heads

    def linear(num_out: int, num_in: int) -> LinearSpec:
        return LinearSpec(num_out=num_out, num_in=num_in, format=fmt, bias=bias)

    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=RopeSpec(dim=head_dim, theta=values.number("rope_theta")),
        q=linear(heads * head_dim, hidden_size),
        k=linear(kv_heads * head_dim, hidden_size),
        v=linear(kv_heads * head_dim, hidden_size),
        o=linear(hidden_size, heads * head_dim),
    )


def _mlp(values: ConfigFields, inner: int, fmt: Format, *, bias: bool = False) -> MlpSpec:
    hidden_size = values.count("hidden_size")
    up = LinearSpec(num_out=inner, num_in=hidden_size, format=fmt, bias=bias)
    down = LinearSpec(num_out=hidden_size, num_in=inner, format=fmt, bias=bias)
    return MlpSpec(activation="silu", gate=up, up=up, down=down)


def _with_shared(experts: MlpSpec, count: int) -> MlpSpec:
    """`experts` with `count` shared ones of the same size, described as one of their joint size."""
    if not count:
        return experts
    up = replace(experts.up, num_out=count * experts.up.num_out)
    down = replace(experts.down, num_in=count * experts.down.num_in)
    return replace(experts, shared=SharedExpertSpec(gate=up, up=up, down=down))


def _experts(
    values: ConfigFields,
    fmt: Format,
    *,
    inner: int,
    num_experts_key: str,
    top_k_key: str,
    bias: bool = False,
) -> MlpSpec:
    num_experts = values.count(num_experts_key, at_most=MAX_EXPERTS)
    return replace(
        _mlp(values, inner, fmt, bias=bias),
        num_experts=num_experts,
        experts_per_token=values.count(top_k_key, at_most=num_experts),
        router=LinearSpec(
            num_out=num_experts, num_in=values.count("hidden_size"), format=fmt, bias=bias
        ),
    )


_LAYERS: Mapping[str, Callable[[ConfigFields, Format], tuple[LayerSpec, ...]]] = MappingProxyType(
    {
        "hunyuan": _hunyuan_layers,
        "opt": _opt_layers,
    }
)
