"""Families that can be sized although the engine does not run them: what is special in them.

    deepseek_v2, deepseek_v3, kimi_k2   multi-head latent attention: per token and layer only
                                        kv_lora_rank + qk_rope_head_dim numbers are cached, whole on
                                        every device; shared experts beside the routed ones
    gpt_oss                             alternating windows, experts in every layer, biases
    hunyuan                             KV shared by cla_share_factor neighbouring layers
    opt                                 un-gated layers of two matrices, biases, learned positions

Latent attention has two forms of the same product (DeepSeek-V2, arXiv 2405.04434, 2.1): a prompt
expands the latent to heads of nope + rope and v numbers; a decode step absorbs the expansion into
the query and attends over the latent itself, at more FLOPs per pair and far fewer bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from ridgeline.errors import BadModel
from ridgeline.plan.model.outline import Attention, Experts, Outline

Config = dict[str, Any]


class _Fields:
    """Whole numbers of a config.json, or a BadModel that names the field."""

    def __init__(self, config: Config, name: str) -> None:
        self._config, self._name = config, name

    def __call__(self, key: str, default: int | None = None) -> int:
        value = self._config.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise BadModel(
                f"config.json of {self._name}: the field {key} cannot be used",
                value=value,
                limit="a whole number",
            )
        return value


def _outline(
    config: Config,
    name: str,
    attention: tuple[Attention, ...],
    *,
    shared: tuple[int, int],
    experts: tuple[Experts, ...],
    small: int,
    widest: int,
) -> Outline:
    """`shared`: parameters and rows of the linears that every token uses."""
    f = _Fields(config, name)
    tied = bool(config.get("tie_word_embeddings", False))
    tables = (1 if tied else 2) * f("vocab_size") * f("hidden_size")
    fixed = shared[0] + small + tables
    return Outline(
        name=name,
        family=str(config["model_type"]),
        num_layers=f("num_hidden_layers"),
        hidden_size=f("hidden_size"),
        vocab_size=f("vocab_size"),
        max_positions=f("max_position_embeddings"),
        stored_dtype=str(config.get("torch_dtype") or config.get("dtype") or "bfloat16"),
        tied_embeddings=tied,
        num_params=fixed + sum(e.num_layers * e.num_experts * e.params for e in experts),
        num_active_params=fixed + sum(e.num_layers * e.per_token * e.params for e in experts),
        attention=attention,
        experts=experts,
        shared_params=shared[0],
        shared_rows=shared[1],
        small_params=small,
        widest=widest,
    )


def latent(config: Config, name: str) -> Outline:
    """DeepSeek V2, V3 and Kimi K2."""
    f = _Fields(config, name)
    layers, hidden, heads = f("num_hidden_layers"), f("hidden_size"), f("num_attention_heads")
    q_rank, kv_rank = f("q_lora_rank", 0), f("kv_lora_rank")
    nope, rope, v = f("qk_nope_head_dim"), f("qk_rope_head_dim"), f("v_head_dim")
    q_rows = heads * (nope + rope)
    query = hidden * q_rank + q_rank * q_rows if q_rank else hidden * q_rows
    key_value = hidden * (kv_rank + rope) + kv_rank * heads * (nope + v)
    attention = query + key_value + heads * v * hidden
    rows = q_rank + q_rows + kv_rank + rope + heads * (nope + v) + hidden
    num_dense, num_routed = f("first_k_dense_replace", 0), f("n_routed_experts")
    moe = layers - num_dense
    inner, expert_inner = f("intermediate_size"), f("moe_intermediate_size")
    always = 3 * hidden * expert_inner * f("n_shared_experts", 0) + hidden * num_routed
    width = 2 * expert_inner + hidden
    return _outline(
        config,
        name,
        (
            Attention(
                num_layers=layers,
                num_cached=layers,
                num_heads=heads,
                num_kv_heads=1,
                flops_per_pair=2 * heads * (nope + rope + v),
                decode_flops_per_pair=2 * heads * (2 * kv_rank + rope),
                kv_numbers=kv_rank + rope,
                kv_rows=1,
            ),
        ),
        shared=(
            layers * attention + num_dense * 3 * hidden * inner + moe * always,
            layers * rows
            + num_dense * (2 * inner + hidden)
            + moe * (width * f("n_shared_experts", 0) + num_routed),
        ),
        experts=(
            Experts(
                num_layers=moe,
                num_experts=num_routed,
                per_token=f("num_experts_per_tok"),
                params=3 * hidden * expert_inner,
                rows=width,
            ),
        ),
        small=layers * (2 * hidden + q_rank + kv_rank) + hidden,
        widest=max(inner, expert_inner * (f("num_experts_per_tok") + f("n_shared_experts", 0))),
    )


def _grouped(f: _Fields, num_layers: int, num_cached: int, window: int | None) -> Attention:
    heads, kv_heads = f("num_attention_heads"), f("num_key_value_heads", f("num_attention_heads"))
    head_dim = f("head_dim", f("hidden_size") // heads)
    return Attention(
        num_layers=num_layers,
        num_cached=num_cached,
        num_heads=heads,
        num_kv_heads=kv_heads,
        flops_per_pair=4 * heads * head_dim,
        decode_flops_per_pair=4 * heads * head_dim,
        kv_numbers=2 * kv_heads * head_dim,
        kv_rows=2 * kv_heads,
        window=window,
    )


def _grouped_params(f: _Fields, num_kv: int) -> tuple[int, int]:
    """Parameters and rows of q, o, and of k and v in `num_kv` of the layers; all layers."""
    heads, kv_heads = f("num_attention_heads"), f("num_key_value_heads", f("num_attention_heads"))
    hidden, layers = f("hidden_size"), f("num_hidden_layers")
    head_dim = f("head_dim", hidden // heads)
    params = layers * 2 * hidden * heads * head_dim + num_kv * 2 * hidden * kv_heads * head_dim
    return params, layers * (heads * head_dim + hidden) + num_kv * 2 * kv_heads * head_dim


def gpt_oss(config: Config, name: str) -> Outline:
    """Every other layer sees a window; attention and experts have biases."""
    f = _Fields(config, name)
    layers, hidden, inner = f("num_hidden_layers"), f("hidden_size"), f("intermediate_size")
    params, rows = _grouped_params(f, layers)
    num_experts, half = f("num_local_experts"), layers // 2
    sinks = f("num_attention_heads")
    biases = rows + layers * (num_experts * (2 * inner + hidden) + num_experts + sinks)
    return _outline(
        config,
        name,
        (
            _grouped(f, layers - half, layers - half, f("sliding_window")),
            _grouped(f, half, half, None),
        ),
        shared=(params + layers * hidden * num_experts, rows + layers * num_experts),
        experts=(
            Experts(
                num_layers=layers,
                num_experts=num_experts,
                per_token=f("num_experts_per_tok"),
                params=3 * hidden * inner,
                rows=2 * inner + hidden,
            ),
        ),
        small=biases + (2 * layers + 1) * hidden,
        widest=inner * f("num_experts_per_tok"),
    )


def hunyuan(config: Config, name: str) -> Outline:
    """Cross-layer attention: of `cla_share_factor` neighbours one computes and keeps the KV."""
    f = _Fields(config, name)
    layers, hidden, inner = f("num_hidden_layers"), f("hidden_size"), f("intermediate_size")
    num_kv = -(-layers // f("cla_share_factor", 1))
    params, rows = _grouped_params(f, num_kv)
    num_experts, num_shared = f("num_experts"), f("num_shared_expert", 0)
    width = 2 * inner + hidden
    return _outline(
        config,
        name,
        (_grouped(f, layers, num_kv, None),),
        shared=(
            params + layers * (3 * hidden * inner * num_shared + hidden * num_experts),
            rows + layers * (width * num_shared + num_experts),
        ),
        experts=(
            Experts(
                num_layers=layers,
                num_experts=num_experts,
                per_token=f("moe_topk"),
                params=3 * hidden * inner,
                rows=width,
            ),
        ),
        small=(2 * layers + 1) * hidden,
        widest=inner * (f("moe_topk") + num_shared),
    )


def opt(config: Config, name: str) -> Outline:
    """Two matrices per layer, biases everywhere, learned positions (two more than the limit)."""
    f = _Fields(config, name)
    layers, hidden, inner = f("num_hidden_layers"), f("hidden_size"), f("ffn_dim")
    params, rows = _grouped_params(f, layers)
    shared_rows = rows + layers * (inner + hidden)
    norms = (2 * layers + 1) * 2 * hidden
    positions = (f("max_position_embeddings") + 2) * hidden
    return _outline(
        config,
        name,
        (_grouped(f, layers, layers, None),),
        shared=(params + layers * 2 * hidden * inner, shared_rows),
        experts=(),
        small=shared_rows + norms + positions,
        widest=inner,
    )


READERS: Mapping[str, Callable[[Config, str], Outline]] = MappingProxyType(
    {
        "deepseek_v2": latent,
        "deepseek_v3": latent,
        "kimi_k2": latent,
        "gpt_oss": gpt_oss,
        "hunyuan": hunyuan,
        "opt": opt,
    }
)
"""model_type → reader."""
