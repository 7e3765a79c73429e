"""The tensor names of every family, as data: where a checkpoint stores each part of the decoder.

A family may have several layouts (its original one, the one transformers 5 writes).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ridgeline.modelspec.layer_inputs import MAX_STREAMS

Shape = tuple[int, ...]


class TensorLocation(NamedTuple):
    """`template` is formatted with layer and expert; `fused` lists the keys stacked along the rows,
    in order.

    `stacked`: the tensor holds all experts along a leading axis. `transposed`: inputs are its rows.
    `interleaved`: rows of the fused keys alternate. `grouped`: they alternate by group of heads.
    """

    template: str
    fused: tuple[str, ...] = ()
    stacked: bool = False
    transposed: bool = False
    interleaved: bool = False
    grouped: bool = False


Layout = Mapping[str, TensorLocation]
XIELU_PARTS: Mapping[str, Shape] = {
    "xielu_alpha_p": (1,),
    "xielu_alpha_n": (1,),
    "xielu_beta": (),
    "xielu_eps": (),
}
"""Numbers of an xIELU activation, in the order of its class; checkpoints store all four."""


def _singles(prefix: str, **names: str) -> dict[str, TensorLocation]:
    return {
        key + bias: TensorLocation(f"{prefix}{name}.{bias.removeprefix('.') or 'weight'}")
        for key, name in names.items()
        for bias in ("", ".bias")
    }


def _llama() -> dict[str, TensorLocation]:
    layer = "model.layers.{layer}."
    return {
        "embed": TensorLocation("model.embed_tokens.weight"),
        "norm": TensorLocation("model.norm.weight"),
        "lm_head": TensorLocation("lm_head.weight"),
        "attention_norm": TensorLocation(f"{layer}input_layernorm.weight"),
        "mlp_norm": TensorLocation(f"{layer}post_attention_layernorm.weight"),
        "q_norm": TensorLocation(f"{layer}self_attn.q_norm.weight"),
        "k_norm": TensorLocation(f"{layer}self_attn.k_norm.weight"),
        "sinks": TensorLocation(f"{layer}self_attn.sinks"),
        **_singles(f"{layer}self_attn.", q="q_proj", k="k_proj", v="v_proj", o="o_proj"),
        **_singles(f"{layer}mlp.", gate="gate_proj", up="up_proj", down="down_proj"),
    }


def _sandwiched() -> dict[str, TensorLocation]:
    layer = "model.layers.{layer}."
    return {
        **_llama(),
        "after_attention_norm": TensorLocation(f"{layer}post_attention_layernorm.weight"),
        "mlp_norm": TensorLocation(f"{layer}pre_feedforward_layernorm.weight"),
        "after_mlp_norm": TensorLocation(f"{layer}post_feedforward_layernorm.weight"),
    }


def _layer_inputs() -> dict[str, TensorLocation]:
    """Gemma 3n and 4: layer inputs, several hidden states, and a scale of each layer's output."""
    layer = "model.layers.{layer}."
    altup = f"{layer}altup."
    around = {
        "input_table": TensorLocation("model.embed_tokens_per_layer.weight"),
        "input_projection": TensorLocation("model.per_layer_model_projection.weight"),
        "input_projection_norm": TensorLocation("model.per_layer_projection_norm.weight"),
    }
    for i in range(MAX_STREAMS - 1):
        around[f"stream{i}"] = TensorLocation(f"model.altup_projections.{i}.weight")
        around[f"unstream{i}"] = TensorLocation(f"model.altup_unembed_projections.{i}.weight")
    return {
        **_sandwiched(),
        **around,
        **_singles(layer, input_gate="per_layer_input_gate", input_up="per_layer_projection"),
        "input_norm": TensorLocation(f"{layer}post_per_layer_input_norm.weight"),
        "output_scale": TensorLocation(f"{layer}layer_scalar"),
        **_singles(f"{layer}laurel.", laurel_down="linear_left", laurel_up="linear_right"),
        "laurel_norm": TensorLocation(f"{layer}laurel.post_laurel_norm.weight"),
        "altup_router_norm": TensorLocation(f"{altup}router_norm.weight"),
        "altup_router": TensorLocation(f"{altup}modality_router.weight"),
        "altup_prediction": TensorLocation(f"{altup}prediction_coefs.weight"),
        "altup_correction": TensorLocation(f"{altup}correction_coefs.weight"),
        "altup_gain": TensorLocation(f"{altup}correct_output_scale"),
    }


def _gemma4() -> tuple[Layout, ...]:
    """A dense MLP, named as the shared expert where there are experts next to it."""
    layer = "model.layers.{layer}."
    gate_up = TensorLocation(
        f"{layer}experts.gate_up_proj", ("expert_gate", "expert_up"), stacked=True
    )
    names = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    around = {
        **_layer_inputs(),
        **_singles(f"{layer}mlp.", **{f"shared_{key}": name for key, name in names.items()}),
        **_singles(layer, router="router.proj"),
        "router_norm": TensorLocation(f"{layer}router.scale"),
        "expert_scales": TensorLocation(f"{layer}router.per_expert_scale"),
        "expert_norm": TensorLocation(f"{layer}pre_feedforward_layernorm_2.weight"),
        "after_shared_norm": TensorLocation(f"{layer}post_feedforward_layernorm_1.weight"),
        "after_expert_norm": TensorLocation(f"{layer}post_feedforward_layernorm_2.weight"),
    }
    stacked = {
        "expert_gate": gate_up,
        "expert_up": gate_up,
        "expert_down": TensorLocation(f"{layer}experts.down_proj", stacked=True),
    }
    each = _singles(
        f"{layer}experts." + "{expert}.", **{f"expert_{key}": names[key] for key in names}
    )
    return {**around, **stacked}, {**around, **each}


def _hyperclovax() -> dict[str, TensorLocation]:
    layer = "model.layers.{layer}."
    return {
        **_llama(),
        "after_attention_norm": TensorLocation(f"{layer}post_norm1.weight"),
        "after_mlp_norm": TensorLocation(f"{layer}post_norm2.weight"),
    }


def _vaultgemma() -> dict[str, TensorLocation]:
    layer = "model.layers.{layer}."
    return {
        **_llama(),
        "mlp_norm": TensorLocation(f"{layer}pre_feedforward_layernorm.weight"),
    }


def _normed_after() -> dict[str, TensorLocation]:
    layer = "model.layers.{layer}."
    return {
        **_llama(),
        "after_attention_norm": TensorLocation(f"{layer}post_attention_layernorm.weight"),
        "after_mlp_norm": TensorLocation(f"{layer}post_feedforward_layernorm.weight"),
    }


def _apertus() -> dict[str, TensorLocation]:
    layer = "model.layers.{layer}."
    act = f"{layer}mlp.act_fn."
    return {
        **_llama(),
        "attention_norm": TensorLocation(f"{layer}attention_layernorm.weight"),
        "mlp_norm": TensorLocation(f"{layer}feedforward_layernorm.weight"),
        **{key: TensorLocation(act + key.removeprefix("xielu_")) for key in XIELU_PARTS},
    }


def _glm() -> dict[str, TensorLocation]:
    layer = "model.layers.{layer}."
    gate_up = TensorLocation(f"{layer}mlp.gate_up_proj.weight", fused=("gate", "up"))
    return {**_llama(), "gate": gate_up, "up": gate_up}


def _glm4() -> dict[str, TensorLocation]:
    layer = "model.layers.{layer}."
    return {
        **_glm(),
        "after_attention_norm": TensorLocation(f"{layer}post_self_attn_layernorm.weight"),
        "after_mlp_norm": TensorLocation(f"{layer}post_mlp_layernorm.weight"),
    }


def _delta_net(is_grouped: bool = False) -> dict[str, TensorLocation]:
    """Qwen3.5: q, k and v of a delta net in one tensor, its other inputs in one each.

    Qwen3-Next (`is_grouped`): q, k, v and z in one, b and a in another, by group of heads.
    """
    at = "model.layers.{layer}.linear_attn."
    keys: tuple[str, ...] = ("delta_q", "delta_k", "delta_v")
    inputs = dict.fromkeys(keys, TensorLocation(f"{at}in_proj_qkv.weight", keys))
    inputs |= _singles(at, delta_z="in_proj_z", delta_b="in_proj_b", delta_a="in_proj_a")
    if is_grouped:
        keys, small = (*keys, "delta_z"), ("delta_b", "delta_a")
        qkvz = TensorLocation(f"{at}in_proj_qkvz.weight", keys, grouped=True)
        gates = TensorLocation(f"{at}in_proj_ba.weight", small, grouped=True)
        inputs = dict.fromkeys(keys, qkvz) | dict.fromkeys(small, gates)
    return {
        **_llama(),
        **inputs,
        **_singles(at, delta_o="out_proj"),
        "delta_conv": TensorLocation(f"{at}conv1d.weight"),
        "delta_a_log": TensorLocation(f"{at}A_log"),
        "delta_dt_bias": TensorLocation(f"{at}dt_bias"),
        "delta_gain": TensorLocation(f"{at}norm.weight"),
    }


def _phi3() -> dict[str, TensorLocation]:
    layer = "model.layers.{layer}."
    qkv = TensorLocation(f"{layer}self_attn.qkv_proj.weight", fused=("q", "k", "v"))
    gate_up = TensorLocation(f"{layer}mlp.gate_up_proj.weight", fused=("gate", "up"))
    return {**_llama(), "q": qkv, "k": qkv, "v": qkv, "gate": gate_up, "up": gate_up}


def _experts(router: str, experts: str, gate: str, up: str, down: str) -> dict[str, TensorLocation]:
    layer = "model.layers.{layer}."
    at = f"{layer}{experts}." + "{expert}."
    return {
        **_llama(),
        **_singles(layer, router=router),
        **_singles(at, expert_gate=gate, expert_up=up, expert_down=down),
    }


def _stacked_experts(module: str, *, transposed: bool = False) -> dict[str, TensorLocation]:
    """As transformers 5 stores them: [experts, 2·inner, hidden] and [experts, hidden, inner];
    `transposed`: [experts, hidden, 2·inner] and [experts, inner, hidden]."""
    layer = "model.layers.{layer}."
    gate_up = TensorLocation(
        f"{layer}{module}.experts.gate_up_proj", ("expert_gate", "expert_up"), True, transposed
    )
    down = TensorLocation(f"{layer}{module}.experts.down_proj", (), True, transposed)
    return {
        **_llama(),
        **_singles(layer, router=f"{module}.gate"),
        "expert_gate": gate_up,
        "expert_up": gate_up,
        "expert_down": down,
    }


def _shared_expert(layout: dict[str, TensorLocation], module: str) -> dict[str, TensorLocation]:
    """`layout` with an expert that every token passes through in `mlp.{module}`."""
    layer = "model.layers.{layer}."
    return {
        **layout,
        "router_correction": TensorLocation(f"{layer}mlp.gate.e_score_correction_bias"),
        **_singles(layer, shared_router="mlp.shared_expert_gate"),
        **_singles(
            f"{layer}mlp.{module}.",
            shared_gate="gate_proj",
            shared_up="up_proj",
            shared_down="down_proj",
        ),
    }


def _mlp_experts(shared_module: str) -> tuple[Layout, ...]:
    """Experts in `mlp`, one by one or stacked, together with a shared one."""
    each = _experts("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj")
    return tuple(_shared_expert(own, shared_module) for own in (each, _stacked_experts("mlp")))


def _exaone_moe() -> tuple[Layout, ...]:
    bias = TensorLocation("model.layers.{layer}.mlp.e_score_correction_bias")
    return tuple({**own, "router_correction": bias} for own in _mlp_experts("shared_experts"))


def _minimax_m2() -> tuple[Layout, ...]:
    each = _experts("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2")
    at = "model.layers.{layer}."
    return tuple(
        {**layout, "router_correction": TensorLocation(f"{at}{module}.e_score_correction_bias")}
        for module, layout in (("block_sparse_moe", each), ("mlp", _stacked_experts("mlp")))
    )


def _latent() -> tuple[Layout, ...]:
    """DeepSeek: latent attention and a shared expert; q is made of a compressed query or not."""
    names = {
        "kv_down": "kv_a_proj_with_mqa",
        "kv_down_norm": "kv_a_layernorm",
        "kv_up": "kv_b_proj",
        "q_down": "q_a_proj",
        "q_down_norm": "q_a_layernorm",
    }
    return tuple(
        {**own, **_singles("model.layers.{layer}.self_attn.", **names, q=q)}
        for q in ("q_b_proj", "q_proj")
        for own in _mlp_experts("shared_experts")
    )


def _llama4() -> dict[str, TensorLocation]:
    """Experts as [experts, inputs, outputs], gate before up, and a shared one."""
    at = "model.layers.{layer}.feed_forward."
    names = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    gate_up = TensorLocation(
        f"{at}experts.gate_up_proj", ("expert_gate", "expert_up"), stacked=True, transposed=True
    )
    down = TensorLocation(f"{at}experts.down_proj", stacked=True, transposed=True)
    return {
        **_llama(),
        **_singles(at, **names, router="router"),
        **_singles(f"{at}shared_expert.", **{f"shared_{key}": names[key] for key in names}),
        "expert_gate": gate_up,
        "expert_up": gate_up,
        "expert_down": down,
    }


def _gpt_oss() -> dict[str, TensorLocation]:
    """Experts as [experts, inputs, outputs], gate and up alternating, with biases."""
    at = "model.layers.{layer}.mlp.experts."
    out = {**_llama(), **_singles("model.layers.{layer}.", router="mlp.router")}
    for key in ("gate", "up", "down"):
        fused = () if key == "down" else ("expert_gate", "expert_up")
        name = f"{at}{'down_proj' if key == 'down' else 'gate_up_proj'}"
        weight = TensorLocation(name, fused, True, True, bool(fused))
        out[f"expert_{key}"] = weight
        out[f"expert_{key}.bias"] = weight._replace(template=f"{name}_bias")
    return out


LAYOUTS: Mapping[str, tuple[Layout, ...]] = {
    "llama": (_llama(),),
    "mistral": (_llama(),),
    "qwen2": (_llama(),),
    "qwen3": (_llama(),),
    **dict.fromkeys(
        ("arcee", "ernie4_5", "granite", "helium", "internlm3", "seed_oss", "smollm3"), (_llama(),)
    ),
    **dict.fromkeys(("cwm", "ministral", "ministral3"), (_llama(),)),
    **dict.fromkeys(("exaone4", "olmo2", "olmo3"), (_normed_after(),)),
    "exaone_moe": _exaone_moe(),
    "glm": (_glm(),),
    "hyperclovax": (_hyperclovax(),),
    "vaultgemma": (_vaultgemma(),),
    "apertus": (_apertus(),),
    "cohere": (_llama(),),
    "qwen3_5_text": (_delta_net(),),
    "qwen3_5_moe_text": tuple({**_delta_net(), **own} for own in _mlp_experts("shared_expert")),
    "qwen3_next": tuple({**_delta_net(True), **own} for own in _mlp_experts("shared_expert")),
    "cohere2": (_llama(),),
    "llama4_text": (_llama4(),),
    "gemma": (_llama(),),
    "gemma2": (_sandwiched(),),
    "gemma3_text": (_sandwiched(),),
    "gemma3n_text": (_layer_inputs(),),
    "gemma4_text": _gemma4(),
    "gpt_oss": (_gpt_oss(),),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2", "youtu"), _latent()),
    "mistral4": _latent(),
    "glm4": (_glm4(),),
    **dict.fromkeys(("dots1", "glm4_moe", "solar_open"), _mlp_experts("shared_experts")),
    "minimax_m2": _minimax_m2(),
    "phi3": (_phi3(),),
    "qwen2_moe": _mlp_experts("shared_expert"),
    "mixtral": (
        _experts("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2"),
        _stacked_experts("mlp"),
        _stacked_experts("block_sparse_moe"),
    ),
    **dict.fromkeys(
        ("mellum", "olmoe", "qwen3_moe"),
        (
            _experts("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj"),
            _stacked_experts("mlp"),
            _stacked_experts("mlp", transposed=True),  # Qwen3-VL
        ),
    ),
}
