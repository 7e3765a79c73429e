"""A tiny random model of every family, made and saved by transformers, loaded by Ridgeline.

transformers initialises norms to their neutral value and biases to zero, which would hide most
mistakes: every parameter is drawn afresh here.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ridgeline.engine.attention import build_attention
from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.checkpoints.load import load_decoder
from ridgeline.engine.execution.runner import TorchRunner
from ridgeline.engine.scheduler.plan import Run, SamplePoint, StepPlan
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.records import Sampling, TokenLogprobs

VOCAB = 67
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def _rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **fields}}


_LONG = {"short_factor": [1.0, 1.3, 1.1], "long_factor": [1.5, 2.0, 4.0]}
_GEMMA = {"head_dim": 8, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}
_GEMMA_WINDOWS = {**_GEMMA, "sliding_window": 9, "query_pre_attn_scalar": 10}
_GEMMA_INPUTS: dict[str, Any] = {
    **_GEMMA,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 9,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": VOCAB,
    "num_kv_shared_layers": 2,
    "activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.0, 0.0, 0.0],
}
_GEMMA4 = {
    **{key: v for key, v in _GEMMA_INPUTS.items() if key != "activation_sparsity_pattern"},
    "global_head_dim": 16,
}
GEMMA4_MOE = {
    **_GEMMA4,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 3,
    "moe_intermediate_size": 20,
}
_SCALED_QUERIES = {
    "head_dim": 8,
    **_rope(
        "yarn",
        factor=4.0,
        mscale=1.0,
        mscale_all_dim=1.0,
        original_max_position_embeddings=12,
        llama_4_scaling_beta=0.7,
    ),
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
}
SHARED = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
}
QWEN35 = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied-mha": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 10}),
    "llama-linear": ("llama", _rope("linear", factor=2.5)),
    "llama-dynamic": ("llama", {**_rope("dynamic", factor=3.0), "max_position_embeddings": 24}),
    "llama-llama3": (
        "llama",
        _rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "llama-yarn": ("llama", _rope("yarn", factor=4.0, original_max_position_embeddings=24)),
    "mistral": ("mistral", {"sliding_window": 7, "num_key_value_heads": 1}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "gemma": ("gemma", {**_GEMMA, "hidden_act": "gelu_pytorch_tanh"}),
    "gemma2": (
        "gemma2",
        {**_GEMMA_WINDOWS, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
    ),
    "gemma3": (
        "gemma3_text",
        {
            **_GEMMA_WINDOWS,
            "num_hidden_layers": 4,
            "sliding_window_pattern": 3,
            "intermediate_size": 88,  # no whole number of vectors
        },
    ),
    "gemma3n": ("gemma3n_text", {**_GEMMA_INPUTS, "laurel_rank": 4, "altup_num_inputs": 3}),
    "gemma3n-dense": (
        "gemma3n_text",
        {
            **_GEMMA_INPUTS,
            "activation_sparsity_pattern": [0.0] * 6,
            "num_kv_shared_layers": 0,
            "intermediate_size": [40, 24, 40, 24, 40, 24],
            "altup_correct_scale": False,
            "altup_active_idx": 1,
        },
    ),
    "gemma4": ("gemma4_text", {**_GEMMA4, "final_logit_softcapping": 4.0}),
    "gemma4-keys-for-values": (
        "gemma4_text",
        {
            **_GEMMA4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
        },
    ),
    "gemma4-wide": ("gemma4_text", {**_GEMMA4, "use_double_wide_mlp": True}),
    "gemma4-moe": ("gemma4_text", GEMMA4_MOE),
    "gemma4-moe-wide": (
        "gemma4_text",
        {
            **GEMMA4_MOE,
            "hidden_size_per_layer_input": 6,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "attention_k_eq_v": False,
        },
    ),
    "phi3": ("phi3", {"sliding_window": 11}),
    "phi3-longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 32,
            **_rope("longrope", **_LONG, original_max_position_embeddings=32),
        },
    ),
    "mixtral": (
        "mixtral",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "qwen3-moe": (
        "qwen3_moe",
        {
            "head_dim": 8,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "qwen2-moe": (
        "qwen2_moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 28,
            "mlp_only_layers": [1],
        },
    ),
    "glm4": ("glm4", {"head_dim": 12}),
    "glm4-moe": (
        "glm4_moe",
        {
            "head_dim": 12,
            "use_qk_norm": True,
            "attention_bias": True,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.7,
            "first_k_dense_replace": 1,
        },
    ),
    "glm4-moe-groups": (
        "glm4_moe",
        {
            "head_dim": 8,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "norm_topk_prob": False,
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "minimax-m2": (
        "minimax_m2",
        {
            "head_dim": 8,
            "rotary_dim": 4,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "intermediate_size": 20,
        },
    ),
    "deepseek-v2": (
        "deepseek_v2",
        {
            **_LATENT,
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
        },
    ),
    "deepseek-v2-greedy": ("deepseek_v2", {**_LATENT, "num_hidden_layers": 2}),
    "deepseek-v3": (
        "deepseek_v3",
        {
            **_LATENT,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            **_rope(
                "yarn",
                factor=4.0,
                mscale=0.8,
                mscale_all_dim=1.3,
                original_max_position_embeddings=24,
            ),
        },
    ),
    "glm4-moe-lite": ("glm4_moe_lite", {**_LATENT, "rms_norm_eps": 1e-3}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    "smollm3-window": (
        "smollm3",
        {"use_sliding_window": True, "sliding_window": 6, "no_rope_layers": [1, 0, 1]},
    ),
    "olmo2": ("olmo2", {}),
    "olmo3": (
        "olmo3",
        {
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 500.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 24,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "logits_scaling": 0.5,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.3,
        },
    ),
    "seed-oss": ("seed_oss", {"head_dim": 8, "attention_out_bias": True}),
    "exaone4": ("exaone4", {"sliding_window": 7, "sliding_window_pattern": 3}),
    "exaone4-full": (
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 3},
    ),
    "ernie4.5": ("ernie4_5", {"head_dim": 8, "use_bias": True, **_rope("default")}),
    "internlm3": ("internlm3", {"attention_bias": True, "mlp_bias": True}),
    "arcee": ("arcee", {"mlp_bias": True}),
    "glm": ("glm", {"head_dim": 12}),
    "ministral": (
        "ministral",
        {
            "head_dim": 8,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "ministral3": ("ministral3", _SCALED_QUERIES),
    "cwm": ("cwm", {"head_dim": 8, "num_hidden_layers": 5, "sliding_window": 7}),
    "vaultgemma": (
        "vaultgemma",
        {**_GEMMA_WINDOWS, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
    ),
    "hyperclovax": (
        "hyperclovax",
        {
            "embedding_multiplier": 3.0,
            "logits_scaling": 0.5,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.3,
        },
    ),
    "solar-open": (
        "solar_open",
        {
            "head_dim": 8,
            "attention_bias": True,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "routed_scaling_factor": 1.7,
        },
    ),
    "dots1": (
        "dots1",
        {
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.7,
            "sliding_window": 7,
            "max_window_layers": 2,
        },
    ),
    "exaone-moe": (
        "exaone_moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "sliding_window": 7,
            "num_hidden_layers": 4,
        },
    ),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 20}),
    "mellum": (
        "mellum",
        {
            "head_dim": 8,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    "mistral4": (
        "mistral4",
        {
            **_LATENT,
            "routed_scaling_factor": 1.7,
            "rope_parameters": _SCALED_QUERIES["rope_parameters"],
        },
    ),
    "youtu": (
        "youtu",
        {
            key: _LATENT[key]
            for key in (
                "num_key_value_heads",
                "q_lora_rank",
                "kv_lora_rank",
                "qk_nope_head_dim",
                "qk_rope_head_dim",
                "v_head_dim",
            )
        },
    ),
    "helium": ("helium", {"head_dim": 6, "num_key_value_heads": 2}),
    "cohere": ("cohere", {"logit_scale": 0.6, "use_qk_norm": True}),
    "cohere-tied": (
        "cohere",
        {"logit_scale": 1.5, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "cohere2": ("cohere2", {"logit_scale": 0.6, "sliding_window": 7, "num_hidden_layers": 4}),
    "qwen3.5": ("qwen3_5_text", QWEN35),
    "qwen3.5-wrapped": ("qwen3_5", {**QWEN35, "tie_word_embeddings": True}),
    "qwen3.5-moe": ("qwen3_5_moe_text", {**QWEN35, **SHARED}),
    "qwen3.5-moe-wrapped": ("qwen3_5_moe", {**QWEN35, **SHARED}),
    "qwen3-next": ("qwen3_next", {**QWEN35, **SHARED, "mlp_only_layers": [1]}),
    "llama4": (
        "llama4_text",
        {
            "head_dim": 6,
            "num_hidden_layers": 4,
            "no_rope_layer_interval": 2,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 7,
            "floor_scale": 8,
            "attn_scale": 0.5,
            "intermediate_size": 20,
            "intermediate_size_mlp": 40,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
        },
    ),
    "llama4-two": (
        "llama4_text",
        {
            "head_dim": 6,
            "attention_chunk_size": 64,
            "attn_temperature_tuning": False,
            "use_qk_norm": False,
            "intermediate_size": 20,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "apertus": ("apertus", {"hidden_act": "xielu"}),
    "gpt-oss": (
        "gpt_oss",
        {
            "head_dim": 8,
            "sliding_window": 7,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "max_position_embeddings": 96,
            **_rope(
                "yarn",
                factor=4.0,
                beta_fast=32.0,
                beta_slow=1.0,
                truncate=False,
                original_max_position_embeddings=24,
            ),
        },
    ),
    "qwen2-vl": ("qwen2_vl", _rope("default", mrope_section=[1, 1, 1])),
    "qwen2.5-vl": ("qwen2_5_vl", _rope("default", mrope_section=[1, 1, 1])),
    "qwen3-vl": (
        "qwen3_vl",
        {"head_dim": 8, **_rope("default", mrope_section=[2, 1, 1], mrope_interleaved=True)},
    ),
    "qwen3-vl-moe": (
        "qwen3_vl_moe",
        {
            "head_dim": 8,
            "moe_intermediate_size": 12,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            **_rope("default", mrope_section=[2, 1, 1], mrope_interleaved=True),
        },
    ),
    "mistral3": ("mistral3", {"model_type": "mistral", "head_dim": 8, "sliding_window": None}),
    "mistral3-latent": (
        "mistral3",
        {
            "model_type": "mistral4",
            **_LATENT,
            "rope_parameters": _SCALED_QUERIES["rope_parameters"],
        },
    ),
    "mistral3-scaled": ("mistral3", {"model_type": "ministral3", **_SCALED_QUERIES}),
}
VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"depth": 1, "embed_dim": 16, "hidden_size": 24, "num_heads": 2},
    "qwen2_5_vl": {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 24,
        "fullatt_block_indexes": [0],
    },
    "qwen3_vl": {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 24,
        "deepstack_visual_indexes": [0],
        "num_position_embeddings": 16,
    },
    "qwen3_vl_moe": {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 24,
        "deepstack_visual_indexes": [0],
        "num_position_embeddings": 16,
    },
    "qwen3_5_moe": {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 24,
        "num_position_embeddings": 16,
    },
    "qwen3_5": {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 24,
        "num_position_embeddings": 16,
    },
    "mistral3": {
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "head_dim": 8,
        "image_size": 28,
    },
}
"""Encoders of images around a text model: model_type -> vision_config."""


TORCH_ONLY: dict[str, str] = {
    **dict.fromkeys(
        (
            *("deepseek-v2", "deepseek-v2-greedy", "deepseek-v3", "glm4-moe-lite", "mistral4"),
            *("mistral3-latent", "youtu"),
        ),
        "attention is latent",
    ),
    **dict.fromkeys(
        ("gemma3n", "gemma3n-dense", "gemma4", "gemma4-keys-for-values", "gemma4-wide"), "layers"
    ),
    **dict.fromkeys(("gemma4-moe", "gemma4-moe-wide"), "experts have separate norms"),
    "glm4-moe-groups": "experts are chosen within groups",
    "ministral3": "queries are scaled from position 12 on",
    "mistral3-scaled": "queries are scaled",
    "cohere": "parallel",
    "cohere-tied": "parallel",
    "cohere2": "parallel",
    "apertus": "xIELU",
    "llama4": "weigh",
    "llama4-two": "weigh",
    "qwen3.5": "delta net",
    "qwen3.5-wrapped": "delta net",
    "qwen3.5-moe": "delta net",
    "qwen3.5-moe-wrapped": "delta net",
    "qwen3-next": "delta net",
}
"""Families without native layers: name -> a word of the reason."""


def make_model(name: str, directory: Path, **changes: Any) -> Any:
    """The transformers model of `FAMILIES[name]` with random parameters, saved in `directory`."""
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    model_type, fields = FAMILIES[name]
    fields = copy.deepcopy({**BASE, **fields, **changes})  # some configs add to what they are given
    auto: Any = AutoModelForCausalLM
    if model_type in VISION:
        tied = fields["tie_word_embeddings"]
        vision = VISION[model_type]
        fields = {"text_config": fields, "vision_config": vision, "tie_word_embeddings": tied}
        auto = AutoModelForImageTextToText
    config = AutoConfig.for_model(model_type, **fields)
    torch.manual_seed(1234)
    # transformers lists Mistral 4 as part of image models only
    direct = transformers.Mistral4ForCausalLM._from_config
    make = direct if model_type == "mistral4" else auto.from_config
    model = make(config, attn_implementation="eager").eval()
    randomise(model)
    model.save_pretrained(directory)
    return model


def randomise(model: Any) -> None:
    """Draw every parameter: gains around their neutral value, biases and matrices of useful
    size."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if name.endswith("norm.weight"):
                parameter.add_(0.3 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(noise * (1.5 / parameter.shape[-1] ** 0.5))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn_like(buffer))
            if name.endswith("layer_scalar"):
                buffer.add_(0.3 * torch.randn_like(buffer))


@dataclass
class Loaded:
    """Our side of a comparison: decoder, cache and runner over `num_blocks` scattered blocks."""

    runner: TorchRunner
    num_blocks: int
    block_size: int

    def paged_logits(
        self, tokens: Sequence[int], chunks: Sequence[int], blocks: Sequence[int]
    ) -> Tensor:
        """Logits of every position, fed through the paged cache in pieces of the given sizes."""
        runner, start, rows = self.runner, 0, []
        for size in chunks:
            piece = tuple(tokens[start : start + size])
            run = Run(0, start, piece, tuple(blocks), None)
            with torch.inference_mode():
                x_TC = runner.decoder.hidden(
                    torch.tensor(piece),
                    torch.arange(start, start + len(piece)),
                    start + len(piece),
                    runner.attention.prepare([run]),
                )
                rows.append(runner.decoder.logits(x_TC))
            start += size
        return torch.cat(rows)


def load_ours(
    directory: Path,
    *,
    attention: str = "torch",
    num_blocks: int = 64,
    block_size: int = 5,
    max_model_len: int | None = None,
) -> Loaded:
    """Load `directory` in float32 with a small paged cache."""
    spec = load_spec(str(directory))
    decoder = load_decoder(
        str(directory),
        spec,
        device="cpu",
        compute_dtype=torch.float32,
        max_model_len=max_model_len,
    )
    cache = KvCache.allocate(spec, num_blocks, block_size, torch.float32, "cpu", num_states=4)
    runner = TorchRunner(decoder, cache, build_attention(attention, spec, cache))
    return Loaded(runner, num_blocks, block_size)


GREEDY = Sampling(temperature=0.0, max_tokens=None, logprobs=0)


@dataclass
class Story:
    """A sequence that a test drives by hand: known tokens, how many are computed, its blocks."""

    seq_id: int
    tokens: list[int]
    blocks: tuple[int, ...]
    num_prompt: int
    computed: int = 0
    logprobs: list[TokenLogprobs] | None = None

    def run(self, limit: int) -> Run:
        """The next share: at most `limit` of the tokens that are known and not computed."""
        piece = tuple(self.tokens[self.computed : self.computed + limit])
        last = self.computed + len(piece) == len(self.tokens)
        index = len(self.tokens) - self.num_prompt
        at = SamplePoint(GREEDY, 0, index, self.num_prompt) if last else None
        slot = self.seq_id
        return Run(self.seq_id, self.computed, piece, self.blocks, at, state_slot=slot)


def advance(loaded: Loaded, stories: Sequence[Story], limits: Sequence[int]) -> None:
    """One step of all stories together, each with its own limit of tokens."""
    runs = [story.run(limit) for story, limit in zip(stories, limits, strict=True)]
    result = loaded.runner.run(StepPlan(0, tuple(runs)))
    for story, run, sampled in zip(stories, runs, result.outputs, strict=True):
        story.computed += len(run.tokens)
        story.tokens.extend(sampled.tokens)
        story.logprobs = [*(story.logprobs or []), *sampled.logprobs]
