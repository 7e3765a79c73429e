"""Families that can be planned although the engine cannot run them yet.

    hunyuan      groups of `cla_share_factor` layers share one KV cache; shared and routed experts
    opt          MLPs without a gate, biases, learned positions
    nemotron_h   blocks of Mamba-2, attention, an MLP or experts, each alone in its layer
    nemotron-nas layers without attention, and MLPs of different sizes
    mimo_v2_flash   keys and values of different sizes, fewer KV heads in layers without a window
    minimax_m3   attention to chosen blocks, planned as dense, an upper bound
    kimi_linear  Kimi K3: delta attention and gated latent attention, experts in a smaller space

`planned_as` reduces further families to one that is known. Those with a sparse attention over
latent vectors (DeepSeek-V3.2, GLM-5) are planned with dense attention and an indexer, an upper
bound on what a long context reads.

Only fields that determine sizes, FLOPs and KV cache are read. Unknown fields are ignored and rotary
scaling is not described: unlike the families of `registry`, these specs are never run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

from msgspec.structs import replace

from ridgeline.modelspec.families.build import DTYPES, MAX_EXPERTS
from ridgeline.modelspec.families.config_fields import ConfigFields
from ridgeline.modelspec.families.latent import latent_attention
from ridgeline.modelspec.families.layer_kinds import num_layers
from ridgeline.modelspec.format import Format, dense
from ridgeline.modelspec.model import (
    AttentionSpec,
    DeltaSpec,
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
        "kimi_linear": "the engine has no delta attention with a decay per channel",
        "mimo_v2_flash": "the engine has no attention whose values are smaller than its keys",
        "minimax_m3": "the engine has no attention to chosen blocks",
        "nemotron-nas": "the engine has no layers without attention",
        "nemotron_h": "some layers are state-space models (Mamba)",
        "opt": "the engine has no learned positions and no MLP without a gate",
    }
)
"""model_type → why the engine cannot run it."""

_REASONS: Mapping[str, str] = MappingProxyType(
    {
        "gemma4_unified": "it generates images and sound as well as text",
        "bamba falcon_h1 falcon_mamba granitemoehybrid jamba mamba mamba2 zamba zamba2": (
            "some layers are state-space models (Mamba)"
        ),
        "recurrent_gemma rwkv xlstm": "layers are recurrences that the engine does not have",
        "inkling_text inkling2_text lfm2 lfm2_moe lfm3": "some layers are short convolutions",
        "deepseek_v4 hy_v4 qwen4_exp": (
            "layers carry several hidden states and mix them (hyper-connections)"
        ),
        "diffllama": "attention is the difference of two",
        "hunyuan_v1_dense hunyuan_v1_moe": "q and k are normalised after they are rotated",
        "minimax bailing_hybrid": "some layers have a linear attention that the engine lacks",
        "granitemoe granitemoeshared": "experts are stored and scaled in a way that is not read",
        "bitnet": "weights are ternary, and further norms lie within attention and MLP",
        "minicpm3": "embeddings and residuals of latent attention are scaled",
        "mllama": "some layers attend to images",
        "paligemma": "tokens of the prompt attend to those after them",
        "gemma4_assistant": "it only drafts tokens for a Gemma 4",
        "olmo": "norms have no gain",
        "longcat_flash": "experts may be the identity, and a block has two attentions",
        "bloom codegen falcon gpt2 gpt_bigcode gpt_neo gpt_neox gptj mpt nemotron phi starcoder2": (
            "norms have a bias, and MLPs have no gate"
        ),
        "phimoe stablelm": "norms have a bias",
        "bert modernbert roberta xlm-roberta": (
            "it is an encoder: it embeds texts and does not generate"
        ),
        "bart marian mbart pegasus t5 whisper": "it has an encoder and cross-attention",
    }
)
REFUSED: Mapping[str, str] = MappingProxyType(
    {name: why for names, why in _REASONS.items() for name in names.split()}
)
"""model_type → why neither the engine nor planning knows it."""

_SPARSE = "the engine has no sparse attention over latent vectors"
_FLAT: Mapping[str, tuple[str, str]] = MappingProxyType(
    {"deepseek_v32": ("deepseek_v3", _SPARSE), "glm_moe_dsa": ("deepseek_v3", _SPARSE)}
)
PLANNED_AS: Mapping[str, str] = MappingProxyType({name: why for name, (_, why) in _FLAT.items()})
"""model_type → why the engine cannot run a family that is planned as another one."""

_NESTED: Mapping[str, str] = MappingProxyType({"kimi_k3": "kimi_linear"})
_IGNORED = frozenset(
    (
        "index_head_dim",
        "index_n_heads",
        "index_topk",
        "index_topk_freq",
        "index_skip_topk_offset",
        "index_share_for_mtp_iteration",
        "indexer_rope_interleave",
        "moe_router_dtype",
        "ep_size",
        "rope_interleave",
    )
)
"""Fields that change nothing in sizes but for the indexer's, which `planned_as` adds."""


def planned_as(config: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The config.json of the nearest known family, and why the engine cannot run the model ("":
    it can).

    Of a multimodal model this is its language model.
    """
    family = str(config.get("model_type"))
    text = config.get("text_config")
    if family in _NESTED and isinstance(text, Mapping):
        return {**text, "model_type": _NESTED[family], "architectures": None}, ""
    if family not in _FLAT:
        return dict(config), ""
    name, reason = _FLAT[family]
    kept = {key: value for key, value in config.items() if key not in _IGNORED}
    if isinstance(kept.get("rope_parameters"), Mapping):
        kept["rope_theta"] = kept.pop("rope_parameters").get("rope_theta", 10_000.0)
    return {**kept, "model_type": name, "architectures": None}, reason


def with_indexer(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    """The spec with the weights of the indexer of a sparse attention, if the config has one.

    They are counted in the projection that makes the latent vector: the indexer's keys, its
    queries from the compressed query, and a weight per head.
    """
    heads, size = config.get("index_n_heads"), config.get("index_head_dim")
    if not heads or not size:
        return spec
    q_rank = int(config.get("q_lora_rank") or spec.hidden_size)
    extra = size + heads + math.ceil(heads * size * q_rank / spec.hidden_size)
    layers = []
    for layer in spec.layers:
        latent = layer.attention.latent
        if latent is None:
            layers.append(layer)
            continue
        down = replace(latent.kv_down, num_out=latent.kv_down.num_out + extra)
        attention = replace(layer.attention, latent=replace(latent, kv_down=down))
        layers.append(replace(layer, attention=attention))
    return replace(spec, layers=tuple(layers))


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


_ABSENT = LinearSpec(num_out=0, num_in=0, format=dense("bfloat16"))
_NO_MLP = MlpSpec(activation="relu2", gated=False, gate=_ABSENT, up=_ABSENT, down=_ABSENT)
_NO_STATE = DeltaSpec(
    num_key_heads=0,
    num_value_heads=0,
    key_dim=0,
    value_dim=0,
    conv_size=1,
    z=_ABSENT,
    b=_ABSENT,
    a=_ABSENT,
)


def _nemotron_layers(values: ConfigFields, fmt: Format) -> tuple[LayerSpec, ...]:
    """One layer per mixer (M, *) with the MLP or experts (-, E) behind it, if any."""
    pattern = str(values.raw("hybrid_override_pattern"))
    mixers = {"M": _mamba(values, fmt), "*": _attention(values, fmt)}
    mlps: dict[str, MlpSpec] = {}
    if "-" in pattern:
        dense_mlp = _mlp(values, values.count("intermediate_size"), fmt)
        mlps["-"] = replace(dense_mlp, activation="relu2", gated=False)
    if "E" in pattern:
        mlps["E"] = _nemotron_experts(values, fmt)
    layers: list[LayerSpec] = []
    waiting: AttentionSpec | None = None
    for kind in pattern:
        if kind in mixers:
            if waiting is not None:
                layers.append(LayerSpec(attention=waiting, mlp=_NO_MLP))
            waiting = mixers[kind]
        else:
            layers.append(LayerSpec(attention=waiting or _no_mixer(values), mlp=mlps[kind]))
            waiting = None
    if waiting is not None:
        layers.append(LayerSpec(attention=waiting, mlp=_NO_MLP))
    return tuple(layers)


def _no_mixer(values: ConfigFields) -> AttentionSpec:
    """An attention of no heads: a layer that is an MLP only."""
    attention = _attention(values, dense("bfloat16"))
    absent = {"q": _ABSENT, "k": _ABSENT, "v": _ABSENT, "o": _ABSENT}
    return replace(attention, num_heads=0, num_kv_heads=0, delta=_NO_STATE, **absent)


def _recurrent(delta: DeltaSpec, hidden_size: int, fmt: Format) -> AttentionSpec:
    """A layer that keeps a state of these sizes instead of keys and values."""
    keys = LinearSpec(num_out=delta.num_key_heads * delta.key_dim, num_in=hidden_size, format=fmt)
    size = delta.num_value_heads * delta.value_dim
    return AttentionSpec(
        num_heads=delta.num_value_heads,
        num_kv_heads=0,
        head_dim=delta.value_dim,
        scale=1.0,
        rope=RopeSpec(dim=0, theta=1.0),
        q=keys,
        k=keys,
        v=replace(keys, num_out=size),
        o=LinearSpec(num_out=hidden_size, num_in=size, format=fmt),
        delta=delta,
    )


def _mamba(values: ConfigFields, fmt: Format) -> AttentionSpec:
    """A Mamba-2 mixer (arXiv:2405.21060), by the sizes of a recurrent layer: B and C are keys and
    queries of `n_groups` heads, x are values, dt is the decay of each head."""
    hidden_size = values.count("hidden_size")
    heads, size = values.count("mamba_num_heads"), values.count("mamba_head_dim")
    groups, state = values.count("n_groups"), values.count("ssm_state_size")

    def linear(num_out: int) -> LinearSpec:
        return LinearSpec(num_out=num_out, num_in=hidden_size, format=fmt)

    delta = DeltaSpec(
        num_key_heads=groups,
        num_value_heads=heads,
        key_dim=state,
        value_dim=size,
        conv_size=values.count("conv_kernel"),
        z=linear(heads * size),
        b=linear(0),
        a=linear(heads),
    )
    return _recurrent(delta, hidden_size, fmt)


def _nemotron_experts(values: ConfigFields, fmt: Format) -> MlpSpec:
    """Routed experts, in a smaller space with `moe_latent_size`, and a shared one, all without a
    gate. The projections into that space and back count as further columns of the shared expert.
    """
    hidden_size, inner = values.count("hidden_size"), values.count("moe_intermediate_size")
    latent = values.opt_count("moe_latent_size")
    experts = _experts(
        values,
        fmt,
        inner=inner,
        num_experts_key="n_routed_experts",
        top_k_key="num_experts_per_tok",
    )
    up = replace(experts.up, num_in=latent or hidden_size)
    down = replace(experts.down, num_out=latent or hidden_size)
    width = values.count("moe_shared_expert_intermediate_size") + (latent or 0)
    shared = SharedExpertSpec(
        gate=_ABSENT,
        up=replace(experts.up, num_out=width, num_in=hidden_size),
        down=replace(experts.down, num_out=hidden_size, num_in=width),
    )
    return replace(
        experts, activation="relu2", gated=False, gate=_ABSENT, up=up, down=down, shared=shared
    )


def _nas_layers(values: ConfigFields, fmt: Format) -> tuple[LayerSpec, ...]:
    """Nemotron-NAS: `block_configs` says what each layer has. An MLP's inner size is 2/3 of
    `ffn_mult` hidden sizes, rounded up to 256."""
    hidden_size, layers = values.count("hidden_size"), []
    for block in values.raw("block_configs"):
        heads = block["attention"].get("n_heads_in_group")
        attention = _no_mixer(values) if not heads else _attention(values, fmt)
        if heads:
            kv_heads = attention.num_heads // int(heads)
            keys = replace(attention.k, num_out=kv_heads * attention.head_dim)
            attention = replace(attention, num_kv_heads=kv_heads, k=keys, v=keys)
        mult = block["ffn"].get("ffn_mult")
        inner = 256 * math.ceil(int(2 * mult * hidden_size / 3) / 256) if mult else 0
        layers.append(
            LayerSpec(attention=attention, mlp=_mlp(values, inner, fmt) if inner else _NO_MLP)
        )
    return tuple(layers)


def _mimo_layers(values: ConfigFields, fmt: Format) -> tuple[LayerSpec, ...]:
    """Layers with a window have a separate number of KV heads. `head_dim` is the mean size of keys
    and values, by which the cache and the products of attention are exact."""
    hidden_size, layers = values.count("hidden_size"), []
    experts = _experts(
        values,
        fmt,
        inner=values.count("moe_intermediate_size"),
        num_experts_key="n_routed_experts",
        top_k_key="num_experts_per_tok",
    )
    dense_mlp = _mlp(values, values.count("intermediate_size"), fmt)
    for windowed, routed in zip(
        values.raw("hybrid_layer_pattern"), values.raw("moe_layer_freq"), strict=True
    ):
        prefix = "swa_" if windowed else ""
        heads = values.count(f"{prefix}num_attention_heads")
        kv_heads = values.count(f"{prefix}num_key_value_heads")
        key, value = values.count(f"{prefix}head_dim"), values.count(f"{prefix}v_head_dim")
        plain = _attention(values, fmt)
        attention = replace(
            plain,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=(key + value) // 2,
            q=replace(plain.q, num_out=heads * key),
            k=replace(plain.k, num_out=kv_heads * key),
            v=replace(plain.v, num_out=kv_heads * value),
            o=LinearSpec(num_out=hidden_size, num_in=heads * value, format=fmt),
            window=values.count("sliding_window") if windowed else None,
        )
        layers.append(LayerSpec(attention=attention, mlp=experts if routed else dense_mlp))
    return tuple(layers)


def _minimax_layers(values: ConfigFields, fmt: Format) -> tuple[LayerSpec, ...]:
    experts = _experts(
        values,
        fmt,
        inner=values.count("moe_intermediate_size"),
        num_experts_key="num_local_experts",
        top_k_key="num_experts_per_tok",
    )
    experts = _with_shared(experts, values.count("n_shared_experts"))
    dense_mlp = _mlp(values, values.count("dense_intermediate_size"), fmt)
    attention = _attention(values, fmt)
    return tuple(
        LayerSpec(attention=attention, mlp=experts if routed else dense_mlp)
        for routed in values.raw("moe_layer_freq")
    )


def _kimi_layers(values: ConfigFields, fmt: Format) -> tuple[LayerSpec, ...]:
    """Kimi K3: latent attention in the layers of `full_attn_layers` (counted from 1), delta
    attention (arXiv:2510.26692) in the others. The projections into the experts' space and back
    count as further columns of the shared experts, gates of latent attention with its latents."""
    experts = _experts(
        values,
        fmt,
        inner=values.count("moe_intermediate_size"),
        num_experts_key="num_experts",
        top_k_key="num_experts_per_token",
    )
    small, shared_size = values.count("routed_expert_hidden_size"), experts.up.num_out
    shared_size *= values.count("num_shared_experts")
    inner = replace(experts.up, num_in=small)
    wide = replace(experts.up, num_out=shared_size + small)
    mlp = replace(
        experts,
        gate=inner,
        up=inner,
        down=replace(experts.down, num_out=small),
        shared=SharedExpertSpec(
            gate=replace(wide, num_out=shared_size),
            up=wide,
            down=replace(experts.down, num_in=wide.num_out),
        ),
    )
    first = _mlp(values, values.count("intermediate_size"), fmt)
    num_dense, linear = values.count("first_k_dense_replace"), values.raw("linear_attn_config")
    full = frozenset(linear["full_attn_layers"])
    latent, delta = _gated_latent(values, fmt), _kimi_delta(values, fmt, linear)
    return tuple(
        LayerSpec(attention=latent if i + 1 in full else delta, mlp=first if i < num_dense else mlp)
        for i in range(num_layers(values))
    )


def _gated_latent(values: ConfigFields, fmt: Format) -> AttentionSpec:
    """Latent attention whose output is multiplied by a gate of its size."""
    plain = latent_attention(values, fmt, RopeSpec(dim=0, theta=1.0))
    assert plain.latent is not None
    down = plain.latent.kv_down
    gated = replace(down, num_out=down.num_out + plain.o.num_in)
    return replace(plain, latent=replace(plain.latent, kv_down=gated))


def _kimi_delta(values: ConfigFields, fmt: Format, config: Mapping[str, Any]) -> AttentionSpec:
    """Delta attention with a decay per channel, which two products of rank `head_dim` make."""
    hidden_size = values.count("hidden_size")
    heads, size = int(config["num_heads"]), int(config["head_dim"])

    def linear(num_out: int) -> LinearSpec:
        return LinearSpec(num_out=num_out, num_in=hidden_size, format=fmt)

    delta = DeltaSpec(
        num_key_heads=heads,
        num_value_heads=heads,
        key_dim=size,
        value_dim=size,
        conv_size=int(config["short_conv_kernel_size"]),
        z=linear(heads * size),
        b=linear(heads),
        a=linear(size + math.ceil(size * heads * size / hidden_size)),
    )
    return _recurrent(delta, hidden_size, fmt)


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
        "kimi_linear": _kimi_layers,
        "mimo_v2_flash": _mimo_layers,
        "minimax_m3": _minimax_layers,
        "nemotron-nas": _nas_layers,
        "nemotron_h": _nemotron_layers,
        "opt": _opt_layers,
    }
)
