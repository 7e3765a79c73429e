"""GGUF files as published: biases, rope factors and keys, splits, unknown tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import (
    ApertusConfig,
    ArceeConfig,
    Cohere2Config,
    CohereConfig,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteConfig,
    Llama4TextConfig,
    LlamaConfig,
    MiniMaxM2Config,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    SeedOssConfig,
    SmolLM3Config,
)
from transformers import AutoModelForCausalLM as Auto

from ridgeline.engine.checkpoints.load import load_decoder
from ridgeline.engine.execution.runner import TorchRunner
from ridgeline.errors import BadModel
from ridgeline.modelspec.checkpoints.gguf_architectures.config import gguf_config
from ridgeline.modelspec.checkpoints.gguf_header import read_gguf
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.cost import resident_weight_bytes
from ridgeline.modelspec.model import ModelSpec
from ridgeline.modelspec.rewrite import with_activations, with_dtype

pytestmark = pytest.mark.slow

IDS = [(37 * i) % 96 for i in range(40)]
SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 64, "pad_token_id": 0, "initializer_range": 0.2,
    "rms_norm_eps": 1e-6,
}  # fmt: skip
SHARED = {
    "embed_tokens_per_layer": "per_layer_token_embd",
    "per_layer_model_projection": "per_layer_model_proj",
    "per_layer_projection_norm": "per_layer_proj_norm",
    "embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
SANDWICHED = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
KEYS = {
    "block_count": 3, "context_length": 64, "embedding_length": 64, "feed_forward_length": 96,
    "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 16,
    "attention.value_length": 16, "attention.layer_norm_rms_epsilon": 1e-6, "vocab_size": 96,
}  # fmt: skip


NORMED_AFTER = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
LAYER_INPUTS = SANDWICHED | {
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "layer_scalar": "layer_output_scale",
    "laurel.linear_left": "laurel_l",
    "laurel.linear_right": "laurel_r",
    "laurel.post_laurel_norm": "laurel_post_norm",
    "altup.router_norm": "altup_router_norm",
    "altup.modality_router": "altup_router",
    "altup.prediction_coefs": "altup_predict_coef",
    "altup.correction_coefs": "altup_correct_coef",
    "altup.correct_output_scale": "altup_correct_scale",
}
EXPERT_NAMES = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{
        f"mlp.{shared}.{name}_proj": f"ffn_{name}_shexp"
        for shared in ("shared_expert", "shared_experts")
        for name in ("gate", "up", "down")
    },
}
LLAMA4_NAMES = {
    "feed_forward.router": "ffn_gate_inp",
    **{f"feed_forward.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
    **{
        f"feed_forward.shared_expert.{name}_proj": f"ffn_{name}_shexp"
        for name in ("gate", "up", "down")
    },
}
OWN_NAMES = {
    "apertus": {"attention_layernorm": "attn_norm", "feedforward_layernorm": "ffn_norm"},
    "llama4": LLAMA4_NAMES,
    "qwen2moe": EXPERT_NAMES, "minimax-m2": EXPERT_NAMES,
    "glm4moe": EXPERT_NAMES | {"post_attention_layernorm": "post_attention_norm"},
    "glm4": {
        "post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm",
    },
    "gemma3n": LAYER_INPUTS,
    "gemma4": LAYER_INPUTS | {
        "router.proj": "ffn_gate_inp", "router.scale": "ffn_gate_inp",
        "router.per_expert_scale": "ffn_down_exps", "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
        "post_feedforward_layernorm_1": "post_ffw_norm_1",
        "post_feedforward_layernorm_2": "post_ffw_norm_2",
    },
    "gemma2": SANDWICHED, "gemma3": SANDWICHED, "olmo2": NORMED_AFTER, "exaone4": NORMED_AFTER,
    "seed_oss": {"post_attention_layernorm": "post_attention_norm"},
    "gpt-oss": {
        "post_attention_layernorm": "post_attention_norm", "self_attn": "attn_sinks",
        "mlp.router": "ffn_gate_inp",
    },
}  # fmt: skip
PERMUTED = ("llama", "mistral3", "smollm3", "granite", "arcee")


def random_model(config: PretrainedConfig) -> Any:
    torch.manual_seed(0)
    model = Auto.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                value.add_(torch.randn_like(value) * 0.3)
    return model


def tensors_of(model: Any, architecture: str) -> dict[str, np.ndarray]:
    """The tensors as llama.cpp's converter writes them."""
    names = NAMES | OWN_NAMES.get(architecture, {})
    out: dict[str, np.ndarray] = {}
    stacks: dict[str, list[torch.Tensor]] = {}
    for name, value in model.state_dict().items():
        if not name.endswith(("weight", "bias", "sinks", "_proj")) and "act_fn" not in name:
            name += ".weight"
        stem, _, kind = name.rpartition(".")
        data = value.float()
        if stem.startswith(("model.altup_projections", "model.altup_unembed_projections")):
            stacks.setdefault(
                "altup_unembd_proj" if "unembed" in stem else "altup_proj", []
            ).append(data)
            continue
        if architecture in ("gemma", "gemma2", "gemma3") and "norm" in stem:
            data = data + 1
        if architecture in PERMUTED and stem.endswith(("q_proj", "k_proj")):
            halves = data.view(-1, 2, 8, *data.shape[1:])
            data = halves.transpose(1, 2).reshape(data.shape)
        if ".layers." in stem:
            _, _, layer, module = stem.split(".", 3)
            if module == "feed_forward.experts":  # [experts, inputs, outputs]
                out |= stacked_experts(f"blk.{layer}.", kind, data.transpose(1, 2))
                continue
            if module == "mlp.act_fn":
                continue
            if module == "experts":  # gate before up, [experts, outputs, inputs]
                inner = kind.removesuffix("_proj")
                out[f"blk.{layer}.ffn_{inner}_exps.weight"] = data.numpy()
                continue
            if module == "mlp.experts":
                split = gpt_oss_experts if architecture == "gpt-oss" else stacked_experts
                out |= split(f"blk.{layer}.", kind, data)
                continue
            if "e_score_correction" in kind or "e_score_correction" in module:
                out[f"blk.{layer}.exp_probs_b.bias"] = data.numpy()
                continue
            kind = "weight" if kind == "sinks" else kind
            kind = "scale" if module in ("router.scale", "router.per_expert_scale") else kind
            out[f"blk.{layer}.{names[module]}.{kind}"] = data.numpy()
        elif stem != "lm_head" or not model.config.tie_word_embeddings:
            out[f"{next(v for k, v in SHARED.items() if k in stem)}.{kind}"] = data.numpy()
    return out | {f"{key}.weight": torch.stack(all).numpy() for key, all in stacks.items()}


def gpt_oss_experts(start: str, kind: str, data: torch.Tensor) -> dict[str, np.ndarray]:
    """gpt-oss stores experts as [experts, inputs, outputs], gate and up alternating."""
    is_bias = kind.endswith("_bias")
    data = data if is_bias else data.transpose(1, 2)
    end = "bias" if is_bias else "weight"
    if kind.startswith("down_proj"):
        return {f"{start}ffn_down_exps.{end}": data.numpy()}
    return {
        f"{start}ffn_gate_exps.{end}": data[:, ::2].numpy(),
        f"{start}ffn_up_exps.{end}": data[:, 1::2].numpy(),
    }


def stacked_experts(start: str, kind: str, data: torch.Tensor) -> dict[str, np.ndarray]:
    """transformers stores gate before up, [experts, outputs, inputs]."""
    if kind.startswith("down_proj"):
        return {f"{start}ffn_down_exps.weight": data.numpy()}
    gate, up = data.chunk(2, dim=1)
    return {f"{start}ffn_gate_exps.weight": gate.numpy(), f"{start}ffn_up_exps.weight": up.numpy()}


def write(
    path: Path,
    architecture: str,
    tensors: Mapping[str, np.ndarray],
    keys: Mapping[str, Any],
    split: tuple[int, int, int] | None = None,
    arrays: Mapping[str, list[float]] | None = None,
) -> str:
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (KEYS | dict(keys)).items():
        name = f"{architecture}.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    if split is not None:
        for key, number in zip(("no", "count", "tensors.count"), split, strict=True):
            writer.add_uint16(f"split.{key}", number)
    for key, numbers in (arrays or {}).items():
        writer.add_array(key, numbers)
    for name, data in tensors.items():
        kind = gguf.GGMLQuantizationType.Q8_0 if data.dtype == np.uint8 else None
        writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def logits(name: str, activations: str | None = None) -> torch.Tensor:
    spec = with_dtype(load_spec(name), "float32")
    spec = spec if activations is None else with_activations(spec, activations)
    decoder = load_decoder(name, spec, device="cpu", compute_dtype=torch.float32)
    return TorchRunner(decoder, None, None).logits(IDS)


def architecture_of(case: str) -> str:
    return case if case in ("gpt-oss", "command-r", "minimax-m2") else case.partition("-")[0]


def truth_of(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([IDS])).logits[0]


def difference(name: str, model: Any) -> float:
    return float((logits(name) - truth_of(model)).abs().max())


FULL = ["full_attention"] * 3
GEMMA = {"attention.sliding_window": 8}
GEMMA_INPUTS: dict[str, Any] = {
    **{key: value for key, value in SIZES.items() if key != "intermediate_size"},
    "num_hidden_layers": 4,
    "sliding_window": 8,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 96,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
GEMMA_INPUT_KEYS: dict[str, Any] = {
    **GEMMA,
    "block_count": 4,
    "attention.shared_kv_layers": 2,
    "embedding_length_per_layer_input": 8,
    "rope.freq_base": 1e6,
    "rope.freq_base_swa": 1e4,
    "attention.sliding_window_pattern": [True, False] * 2,
}
GEMMA4_KEYS = {
    "final_logit_softcapping": 0.0,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.key_length_swa": 16,
    "attention.value_length_swa": 16,
    "rope.dimension_count": 32,
    "rope.dimension_count_swa": 16,
}
PLAIN_SIZES = {key: v for key, v in SIZES.items() if key not in ("head_dim", "rms_norm_eps")}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 5e5}
YARN = {
    "rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
CENTRED = {"attention.layer_norm_epsilon": 1e-5, "logit_scale": 0.3}
CASES = {
    "llama": (LlamaConfig(**SIZES), {}),
    "llama-bias": (LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True), {}),
    "llama-linear": (
        LlamaConfig(**SIZES, rope_scaling={"rope_type": "linear", "factor": 4.0}),
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    "llama-yarn": (
        LlamaConfig(
            **SIZES,
            rope_scaling={
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
            },
        ),
        {
            "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 16,
        },
    ),
    "mistral3": (MistralConfig(**SIZES, sliding_window=None), {}),
    "qwen2": (Qwen2Config(**SIZES), {}),
    "qwen2vl": (Qwen2Config(**SIZES), {"rope.dimension_sections": [2, 3, 3, 0]}),
    "qwen3": (Qwen3Config(**SIZES), {}),
    "qwen3vl": (
        Qwen3Config(**SIZES), {"rope.dimension_sections": [3, 3, 2, 0], "n_deepstack_layers": 3},
    ),
    "gemma": (GemmaConfig(**SIZES, hidden_act="gelu_pytorch_tanh"), {}),
    "gemma2": (
        Gemma2Config(**SIZES, sliding_window=8, query_pre_attn_scalar=16),
        {**GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3": (
        Gemma3TextConfig(
            **SIZES, sliding_window=8, query_pre_attn_scalar=16,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        {**GEMMA, "rope.freq_base": 1e6, "attention.sliding_window_pattern": [True, False, True]},
    ),
    "gemma3n": (
        Gemma3nTextConfig(
            **GEMMA_INPUTS, laurel_rank=4, altup_num_inputs=3,
            intermediate_size=[96, 64, 96, 96], activation_sparsity_pattern=[0.9, 0.0, 0.0, 0.0],
        ),
        {
            **GEMMA_INPUT_KEYS, "feed_forward_length": [96, 64, 96, 96],
            "altup.active_idx": 0, "altup.num_inputs": 3, "final_logit_softcapping": 30.0,
            "activation_sparsity_scale": [1.2815515, -math.inf, -math.inf, -math.inf],
        },
    ),
    "gemma4": (
        Gemma4TextConfig(
            **GEMMA_INPUTS, global_head_dim=32, use_double_wide_mlp=True, intermediate_size=96,
        ),
        {
            **GEMMA_INPUT_KEYS, **GEMMA4_KEYS, "feed_forward_length": [96, 96, 192, 192],
        },
    ),
    "gemma4-keys": (
        Gemma4TextConfig(
            **GEMMA_INPUTS | {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0},
            global_head_dim=32, attention_k_eq_v=True, num_global_key_value_heads=1,
            intermediate_size=96,
        ),
        {
            **GEMMA_INPUT_KEYS, **GEMMA4_KEYS, "attention.head_count_kv": [2, 1, 2, 1],
            "attention.shared_kv_layers": 0, "embedding_length_per_layer_input": 0,
        },
    ),
    "gemma4-experts": (
        Gemma4TextConfig(
            **GEMMA_INPUTS | {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0},
            global_head_dim=32, intermediate_size=96, enable_moe_block=True, num_experts=6,
            top_k_experts=3, moe_intermediate_size=32,
        ),
        {
            **GEMMA_INPUT_KEYS, **GEMMA4_KEYS, "attention.shared_kv_layers": 0,
            "embedding_length_per_layer_input": 0, "expert_count": 6, "expert_used_count": 3,
            "expert_feed_forward_length": 32,
        },
    ),
    "smollm3": (
        SmolLM3Config(**SIZES | {"num_hidden_layers": 4}),
        {"block_count": 4, "rope.freq_base": 2e6},
    ),
    "olmo2": (Olmo2Config(**SIZES), {}),
    "olmo2-windows": (
        Olmo3Config(**SIZES | {"num_hidden_layers": 4}, sliding_window=8),
        {
            "block_count": 4, "attention.sliding_window": 8, "rope.freq_base": 5e5,
            "rope.freq_base_swa": 5e5,
        },
    ),
    "olmo2-yarn": (
        Olmo3Config(
            **SIZES | {"num_hidden_layers": 4}, sliding_window=8,
            rope_parameters={"full_attention": YARN, "sliding_attention": PLAIN_ROPE},
        ),
        {
            "block_count": 4, "attention.sliding_window": 8, "rope.freq_base": 5e5,
            "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 16,
            "rope.scaling.yarn_attn_factor": 1.0 + 0.1 * math.log(4.0),
        },
    ),
    "granite": (
        GraniteConfig(
            **{k: v for k, v in SIZES.items() if k != "head_dim"}, attention_multiplier=0.3,
            embedding_multiplier=3.0, residual_multiplier=0.5, logits_scaling=4.0,
        ),
        {
            "attention.scale": 0.3, "embedding_scale": 3.0, "residual_scale": 0.5,
            "logit_scale": 4.0, "rope.scaling.finetuned": True,
        },
    ),
    "seed_oss": (SeedOssConfig(**SIZES), {}),
    "exaone4": (Exaone4Config(**SIZES, sliding_window=None, layer_types=FULL), {}),
    "ernie4_5": (Ernie4_5Config(**SIZES), {"rope.freq_base": 5e5}),
    "arcee": (ArceeConfig(**SIZES), {}),
    "apertus": (
        ApertusConfig(
            **PLAIN_SIZES, rope_parameters={"rope_type": "default", "rope_theta": 1.2e7}
        ),
        {"rope.freq_base": 1.2e7, "attention.layer_norm_rms_epsilon": 1e-5},
    ),
    "llama4": (
        Llama4TextConfig(
            **SIZES | {"num_hidden_layers": 4, "intermediate_size": 32}, intermediate_size_mlp=96,
            num_local_experts=4, num_experts_per_tok=1, interleave_moe_layer_step=2,
        ),
        {
            "block_count": 4, "expert_count": 4, "expert_used_count": 1,
            "expert_feed_forward_length": 32, "interleave_moe_layer_step": 2,
            "rope.freq_base": 5e5,
        },
    ),
    "gpt-oss": (
        GptOssConfig(
            **SIZES, sliding_window=8, num_local_experts=4, num_experts_per_tok=2,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        {
            "attention.sliding_window": 8, "expert_count": 4, "expert_used_count": 2,
            "expert_feed_forward_length": 96,
        },
    ),
    "command-r": (
        CohereConfig(**PLAIN_SIZES, logit_scale=0.3, use_qk_norm=True, layer_norm_eps=1e-5),
        {**CENTRED, "rope.freq_base": 5e5, "rope.scaling.type": "none"},
    ),
    "cohere2": (
        Cohere2Config(
            **PLAIN_SIZES | {"num_hidden_layers": 4}, logit_scale=0.3, sliding_window=8,
            layer_norm_eps=1e-5,
        ),
        {
            **CENTRED, "block_count": 4, "attention.sliding_window": 8,
            "rope.dimension_count": 16, "rope.scaling.type": "none",
        },
    ),
    "glm4": (
        Glm4Config(**SIZES, partial_rotary_factor=0.5, attention_bias=True),
        {"rope.dimension_count": 8},
    ),
    "qwen2moe": (
        Qwen2MoeConfig(
            **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
            shared_expert_intermediate_size=64, decoder_sparse_step=1,
        ),
        {
            "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32,
            "expert_shared_feed_forward_length": 64,
        },
    ),
    "glm4moe": (
        Glm4MoeConfig(
            **SIZES, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
            n_shared_experts=1, first_k_dense_replace=1, routed_scaling_factor=1.5,
            norm_topk_prob=True, use_qk_norm=True, partial_rotary_factor=0.5, n_group=1,
            topk_group=1,
        ),
        {
            "block_count": 4, "nextn_predict_layers": 1, "expert_count": 4,
            "expert_used_count": 2, "expert_feed_forward_length": 32, "expert_shared_count": 1,
            "leading_dense_block_count": 1, "expert_gating_func": 2, "expert_weights_scale": 1.5,
            "expert_weights_norm": True, "rope.dimension_count": 8,
        },
    ),
    "minimax-m2": (
        MiniMaxM2Config(
            **SIZES | {"intermediate_size": 32}, num_local_experts=4, num_experts_per_tok=2,
            rotary_dim=8,
        ),
        {
            "feed_forward_length": 32, "expert_count": 4, "expert_used_count": 2,
            "expert_feed_forward_length": 32, "expert_gating_func": 2,
            "rope.dimension_count": 8, "rope.freq_base": 5e6,
        },
    ),
    "phi3": (Phi3Config(**{k: v for k, v in SIZES.items() if k != "head_dim"}), {}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_file_gives_the_logits_of_its_source_model(case: str, tmp_path: Path) -> None:
    config, keys = CASES[case]
    model = random_model(config)
    architecture = architecture_of(case)
    tensors = tensors_of(model, architecture)
    if architecture == "gemma4":  # a quarter of a full layer's head turns
        tensors["rope_freqs.weight"] = np.array([1.0] * 4 + [1e30] * 12, np.float32)
    if "nextn_predict_layers" in keys:  # the layer that predicts further tokens
        tensors["blk.3.nextn.eh_proj.weight"] = np.zeros((64, 128), np.float32)
    arrays = xielu_numbers(model) if architecture == "apertus" else {}
    name = write(tmp_path / "m.gguf", architecture, tensors, keys, arrays=arrays)
    assert difference(name, model) < 2e-3


def xielu_numbers(model: Any) -> dict[str, list[float]]:
    """Numbers of the activations, as keys without the architecture's name, one per layer."""
    acts = [layer.mlp.act_fn for layer in model.model.layers]
    with torch.no_grad():
        for i, act in enumerate(acts):
            act.alpha_p.add_(0.1 * i)
            act.alpha_n.sub_(0.2 * i)
    names = ("alpha_p", "alpha_n", "beta", "eps")
    return {f"xielu.{name}": [getattr(act, name).item() for act in acts] for name in names}


def test_activations_of_apertus_need_a_number_per_layer(tmp_path: Path) -> None:
    config, keys = CASES["apertus"]
    model = random_model(config)
    numbers = xielu_numbers(model)
    short = numbers | {"xielu.beta": numbers["xielu.beta"][:2]}
    name = write(tmp_path / "m.gguf", "apertus", tensors_of(model, "apertus"), keys, arrays=short)
    with pytest.raises(BadModel, match=r"xielu\.beta"):
        logits(name)


@pytest.mark.parametrize(("keys", "chunk"), [({}, 8192), ({"attention.sliding_window": 0}, None)])
def test_llama_4_has_the_chunks_of_llama_cpp(
    keys: dict[str, Any], chunk: int | None, tmp_path: Path
) -> None:
    config, own = CASES["llama4"]
    tensors = tensors_of(random_model(config), "llama4")
    spec = load_spec(write(tmp_path / "m.gguf", "llama4", tensors, own | keys))
    ropes = [layer.attention.rope for layer in spec.layers]
    assert [layer.attention.chunk for layer in spec.layers] == [chunk] * 3 + [None]
    assert (ropes[3].dim, ropes[3].query_floor) == ((0, 8192) if chunk else (16, None))


def test_a_packed_table_of_layer_inputs_stays_packed(tmp_path: Path) -> None:
    config, keys = CASES["gemma3n"]
    model = random_model(config)
    table = model.model.embed_tokens_per_layer.weight
    blocks = gguf.quants.quantize(table.detach().numpy(), gguf.GGMLQuantizationType.Q8_0)
    rows = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)
    table.data = torch.from_numpy(rows.reshape(table.shape).copy())
    tensors = tensors_of(model, "gemma3n") | {"per_layer_token_embd.weight": blocks}
    name = write(tmp_path / "m.gguf", "gemma3n", tensors, keys)
    assert difference(name, model) < 2e-3
    spec, whole = load_spec(name), load_spec_of_plain(model, tmp_path, keys)
    saved = resident_weight_bytes(whole) - resident_weight_bytes(spec)
    assert saved == table.numel() * 4 - spec.layers[0].layer_input.table_format.nbytes(*table.shape)


def load_spec_of_plain(model: Any, folder: Path, keys: Mapping[str, Any]) -> ModelSpec:
    return load_spec(write(folder / "plain.gguf", "gemma3n", tensors_of(model, "gemma3n"), keys))


@pytest.fixture(scope="module")
def plain() -> tuple[Any, dict[str, np.ndarray]]:
    model = random_model(LlamaConfig(**SIZES))
    return model, tensors_of(model, "llama")


def test_only_some_projections_may_have_biases(tmp_path: Path) -> None:
    model = random_model(LlamaConfig(**SIZES, attention_bias=True))
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.bias)
    tensors = tensors_of(model, "llama")
    tensors = {name: v for name, v in tensors.items() if "attn_output.bias" not in name}
    assert difference(write(tmp_path / "m.gguf", "llama", tensors, {}), model) < 2e-3


def test_frequencies_divided_by_factors_of_the_file(tmp_path: Path) -> None:
    """As Llama 3.1 to 3.3 are converted."""
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    model = random_model(LlamaConfig(**SIZES, rope_scaling=scaling))
    base = 10_000.0 ** (-np.arange(0, 16, 2) / 16)
    factors = base / model.model.rotary_emb.inv_freq.numpy()
    assert factors.max() > 2
    tensors = tensors_of(model, "llama") | {"rope_freqs.weight": factors.astype(np.float32)}
    assert difference(write(tmp_path / "m.gguf", "llama", tensors, {}), model) < 2e-3


def test_factors_of_one_change_nothing(plain: Any, tmp_path: Path) -> None:
    model, tensors = plain
    ones = {"rope_freqs.weight": np.ones(8, np.float32)}
    name = write(tmp_path / "m.gguf", "llama", tensors | ones, {})
    assert load_spec(name).layers[0].attention.rope.kind == "default"
    assert difference(name, model) < 2e-3


def test_long_and_short_rope_factors_are_read(tmp_path: Path) -> None:
    """As Phi-3 with 128k positions: the long ones where the sequences may be long."""
    sizes = {k: v for k, v in SIZES.items() if k != "head_dim"}
    short, long = [1.0 + i / 8 for i in range(8)], [2.0 + i for i in range(8)]
    scaling = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    config = Phi3Config(**sizes, rope_scaling=scaling, original_max_position_embeddings=16)
    model = random_model(config)
    extra = {
        "rope_factors_short.weight": np.array(short, np.float32),
        "rope_factors_long.weight": np.array(long, np.float32),
    }
    keys = {
        "rope.scaling.original_context_length": 16,
        "rope.scaling.attn_factor": float(np.sqrt(1 + np.log(4) / np.log(16))),
    }
    tensors = tensors_of(model, "phi3") | extra
    assert difference(write(tmp_path / "m.gguf", "phi3", tensors, keys), model) < 2e-3


def split_files(folder: Path, tensors: Mapping[str, np.ndarray]) -> list[str]:
    names = list(tensors)
    thirds = [names[:10], names[10:20], names[20:]]
    return [
        write(
            folder / f"m-{i + 1:05}-of-00003.gguf",
            "llama",
            {name: tensors[name] for name in third},
            {},
            (i, 3, len(names)),
        )
        for i, third in enumerate(thirds)
    ]


def test_split_files_are_one_model(plain: Any, tmp_path: Path) -> None:
    model, tensors = plain
    files = split_files(tmp_path, tensors)
    for name in files:
        assert difference(name, model) < 2e-3
    Path(files[1]).unlink()
    with pytest.raises(BadModel, match="m-00002-of-00003"):
        load_spec(files[0])


def test_renamed_or_mixed_split_files_are_refused(plain: Any, tmp_path: Path) -> None:
    _, tensors = plain
    files = split_files(tmp_path, tensors)
    alone = tmp_path / "alone.gguf"
    alone.write_bytes(Path(files[0]).read_bytes())
    with pytest.raises(BadModel, match="one of several"):
        load_spec(str(alone))
    Path(files[1]).write_bytes(Path(files[2]).read_bytes())
    with pytest.raises(BadModel, match="another part"):
        load_spec(files[0])


@pytest.mark.parametrize(
    ("tensor", "refused"),
    [
        ("blk.1.attn_q.scale", True),
        ("blk.0.mystery.weight", True),
        ("v.patch_embd.weight", True),
        ("blk.0.attn_rot_embd", False),
        ("rope_freqs.weight", False),
    ],
)
def test_unknown_tensors_are_refused_by_name(
    tensor: str, refused: bool, plain: Any, tmp_path: Path
) -> None:
    _, tensors = plain
    extra = {tensor: np.ones(8, np.float32)}
    name = write(tmp_path / "m.gguf", "llama", tensors | extra, {})
    if not refused:
        logits(name)
        return
    with pytest.raises(BadModel, match=tensor):
        logits(name)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.clamp_kqv", 8.0),
        ("expert_shared_count", 1),
        ("logit_scale", 0.25),
        ("attention.value_length", 32),
        ("rope.scaling.type", "yarn-squared"),
        ("something.new", 3),
        ("attention.causal", False),
        ("rope.freq_base_swa", 5e5),
        ("rope.scaling.yarn_attn_factor", 1.5),
        ("rope.scaling.attn_factor", 1.2),  # llama.cpp multiplies q and k with it, scaled or not
    ],
)
def test_unknown_keys_are_refused_by_name(key: str, value: Any, plain: Any, tmp_path: Path) -> None:
    _, tensors = plain
    name = write(tmp_path / "m.gguf", "llama", tensors, {key: value})
    with pytest.raises(BadModel, match=key.rpartition(".")[2].split("_")[0]):
        load_spec(name)


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("general.type", "mmproj", "image encoder"),
        ("general.type", "adapter", "LoRA"),
        ("tokenizer.ggml.suppress_tokens", [3], "suppress_tokens"),
        ("tokenizer.ggml.new_rule", True, "new_rule"),
        ("llama.context_length", None, "llama.context_length"),
        ("llama.attention.layer_norm_rms_epsilon", None, "layer_norm_rms_epsilon"),
    ],
)
def test_keys_outside_the_architecture_and_missing_ones_are_named(
    key: str, value: Any, word: str, plain: Any, tmp_path: Path
) -> None:
    file = read_gguf(write(tmp_path / "m.gguf", "llama", plain[1], {}))
    metadata = {k: v for k, v in file.metadata.items() if k != key}
    metadata |= {} if value is None else {key: value}
    with pytest.raises(BadModel, match=word):
        gguf_config(replace(file, metadata=metadata))


def test_neutral_keys_are_accepted(plain: Any, tmp_path: Path) -> None:
    model, tensors = plain
    keys = {
        "attention.causal": True, "expert_count": 0, "logit_scale": 1.0, "rope.dimension_count": 16,
        "rope.scaling.finetuned": False, "rope.scaling.type": "none",
    }  # fmt: skip
    assert difference(write(tmp_path / "m.gguf", "llama", tensors, keys), model) < 2e-3


def test_defaults_are_those_of_llama_cpp(plain: Any, tmp_path: Path) -> None:
    """A converter leaves out what equals them: heads of the width over their number."""
    _, tensors = plain
    name = write(tmp_path / "m.gguf", "llama", tensors, {})
    spec: ModelSpec = load_spec(name)
    assert spec.layers[0].attention.rope.theta == 10_000.0
    assert spec.eos_token_ids == () and spec.bos_token_id is None
