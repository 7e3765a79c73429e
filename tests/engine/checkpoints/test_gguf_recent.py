"""GGUF of GLM-4-9B, OLMoE, Mellum 2, dots.llm1, K-EXAONE, Solar Open, Youtu, Ministral 3, Kimi K2.

Keys and tensors are those of llama.cpp's converter, run on these models; llama.cpp computes the
logits of transformers from its files within 1e-4.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import (
    DeepseekV3Config,
    Dots1Config,
    ExaoneMoeConfig,
    GlmConfig,
    MellumConfig,
    Ministral3Config,
    OlmoeConfig,
    PretrainedConfig,
    SolarOpenConfig,
    YoutuConfig,
)

from ridgeline.compress.quantize_model import TableFormats
from ridgeline.compress.recipe import QuantizeRecipe, check
from ridgeline.compress.writers.gguf import GGUF
from ridgeline.config.improve import QuantizeOptions
from ridgeline.engine.checkpoints.gguf.weights import GgufWeights
from ridgeline.engine.checkpoints.sources import CheckpointWeights
from ridgeline.engine.checkpoints.tensor_names import parts
from ridgeline.errors import BadModel, CannotRun
from ridgeline.modelspec.checkpoints.gguf_header import read_gguf
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.families.registry import spec_from_config
from ridgeline.modelspec.families.shapes import planning_config
from ridgeline.workflows.quantize.quantize import quantize
from tests.engine.checkpoints import test_gguf_latent as latent_cases
from tests.engine.checkpoints.test_gguf_files import (
    EXPERT_NAMES,
    OWN_NAMES,
    PLAIN_ROPE,
    PLAIN_SIZES,
    SIZES,
    YARN,
    difference,
    logits,
    random_model,
    tensors_of,
    truth_of,
    write,
)

pytestmark = pytest.mark.slow

ROUTED: dict[str, Any] = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
    "n_shared_experts": 1, "routed_scaling_factor": 1.7,
}  # fmt: skip
CHOSEN = {"expert_count": 8, "expert_used_count": 3}
SIGMOID: dict[str, Any] = {
    **CHOSEN, "expert_feed_forward_length": 32, "expert_shared_count": 1,
    "expert_gating_func": 2, "expert_weights_scale": 1.7, "expert_weights_norm": True,
    "expert_group_count": 1, "expert_group_used_count": 1,
}  # fmt: skip
SCALED = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
YARN_KEYS = {
    "rope.freq_base": 5e5, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 16,
}  # fmt: skip
LIMITS = {"rope.scaling.yarn_beta_fast": 2.0, "rope.scaling.yarn_beta_slow": 1.0}
DENSE_LATENT = {
    key: latent_cases.LATENT[key]
    for key in latent_cases.LATENT
    if key not in ROUTED and key not in ("first_k_dense_replace", "norm_topk_prob")
    and "group" not in key
}  # fmt: skip
CASES: dict[str, tuple[str, PretrainedConfig, dict[str, Any]]] = {
    "glm": (
        "chatglm",
        GlmConfig(**SIZES | {"rms_norm_eps": 1e-5}, rope_parameters={
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        {"rope.dimension_count": 8, "attention.layer_norm_rms_epsilon": 1e-5},
    ),
    "olmoe": (
        "olmoe",
        OlmoeConfig(**PLAIN_SIZES | {"num_key_value_heads": 4}, num_experts=8,
                    num_experts_per_tok=3),
        {**CHOSEN, "attention.head_count_kv": 4, "attention.layer_norm_rms_epsilon": 1e-5},
    ),
    "mellum": (
        "mellum",
        MellumConfig(
            **SIZES, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32,
            sliding_window=8, norm_topk_prob=True,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters={"full_attention": YARN, "sliding_attention": PLAIN_ROPE},
        ),
        {
            **CHOSEN, **YARN_KEYS, "expert_feed_forward_length": 32, "rope.freq_base_swa": 5e5,
            "attention.sliding_window": 8,
            "attention.sliding_window_pattern": [True, False, True],
        },
    ),
    "dots1": (
        "dots1",
        Dots1Config(**SIZES | {"num_key_value_heads": 4}, **ROUTED, first_k_dense_replace=1,
                    norm_topk_prob=True),
        {**SIGMOID, "leading_dense_block_count": 1, "attention.head_count_kv": 4},
    ),
    "exaone-moe": (
        "exaone-moe",
        ExaoneMoeConfig(
            **SIZES | {"num_hidden_layers": 4}, num_experts=8, num_experts_per_tok=3,
            moe_intermediate_size=32, sliding_window=8, routed_scaling_factor=1.7,
        ),
        {
            **SIGMOID, "block_count": 4, "attention.sliding_window": 8,
            "attention.sliding_window_pattern": [True, True, True, False],
            "expert_shared_feed_forward_length": 32, "leading_dense_block_count": 1,
            "nextn_predict_layers": 0, "rope.scaling.type": "none",
        },
    ),
    "solar": (
        "glm4moe",
        SolarOpenConfig(**SIZES, **ROUTED, rope_parameters={**PLAIN_ROPE,
                        "partial_rotary_factor": 1.0}),
        {**SIGMOID, "rope.dimension_count": 16, "rope.freq_base": 5e5},
    ),
    "ministral3": (
        "mistral3",
        Ministral3Config(**SIZES, rope_parameters={**SCALED, "llama_4_scaling_beta": 0.3}),
        {
            **YARN_KEYS, "rope.dimension_count": 16, "rope.scaling.yarn_log_multiplier": 1.0,
            "attention.temperature_scale": 0.3,
        },
    ),
    "ministral3-limits": (
        "mistral3",
        Ministral3Config(**SIZES, rope_parameters={
            **SCALED, "beta_fast": 2.0, "mscale_all_dim": 0.6, "llama_4_scaling_beta": 0.0}),
        {**YARN_KEYS, **LIMITS, "rope.scaling.yarn_log_multiplier": 0.6},
    ),
    "youtu": (
        "deepseek2",
        YoutuConfig(**DENSE_LATENT),
        {
            **{k: v for k, v in latent_cases.KEYS.items() if "expert" not in k},
            "leading_dense_block_count": 3, "expert_feed_forward_length": 96,
            "expert_shared_count": 0,
        },
    ),
    "kimi": (
        "deepseek2",
        DeepseekV3Config(**latent_cases.LATENT, rope_parameters={**SCALED, "beta_fast": 2.0}),
        {
            **latent_cases.KEYS, **YARN_KEYS, **LIMITS,
            "rope.scaling.yarn_log_multiplier": 0.1,
        },
    ),
}  # fmt: skip
UNNEEDED = ("rope.freq_base_swa", "nextn_predict_layers", "rope.scaling.type")
"""Keys that repeat others, or say what is so without them."""


def model_of(case: str) -> Any:
    model = random_model(CASES[case][1])
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if "e_score_correction" in name:
                value.add_(torch.rand_like(value) * 0.2)
    return model


def converted(case: str, model: Any) -> dict[str, np.ndarray]:
    """The tensors of the converter."""
    architecture = CASES[case][0]
    if architecture == "deepseek2":
        tensors = latent_cases.tensors_of(model, False)
        own_head = not model.config.tie_word_embeddings
        return {
            name: value for name, value in tensors.items() if own_head or name != "output.weight"
        }
    after = {"post_attention_layernorm": "post_attention_norm"} if case == "solar" else {}
    OWN_NAMES[architecture] = EXPERT_NAMES | after
    return tensors_of(model, architecture)


@pytest.mark.parametrize("case", CASES)
def test_file_gives_the_logits_of_its_source_model(case: str, tmp_path: Path) -> None:
    architecture, _, keys = CASES[case]
    model = model_of(case)
    name = write(tmp_path / "m.gguf", architecture, converted(case, model), keys)
    assert difference(name, model) < 1e-3


@pytest.mark.parametrize("case", CASES)
def test_written_file_holds_the_model_that_it_was_made_of(case: str, tmp_path: Path) -> None:
    """Under the converter's keys and names; every part within what 8 bits move it."""
    architecture, _, keys = CASES[case]
    model = model_of(case)
    model.save_pretrained(tmp_path / "source")
    asked = QuantizeOptions(method="rtn", format="gguf", bits=8)
    quantize(str(tmp_path / "source"), tmp_path / "out", asked)
    name = str(tmp_path / "out" / "model.gguf")
    file, spec = read_gguf(name), load_spec(name)
    assert file.metadata["general.architecture"] == architecture
    for key in keys.keys() - UNNEEDED:
        assert file.metadata[f"{architecture}.{key}"] == pytest.approx(keys[key], rel=1e-6), key
    shapes = {name: value.shape for name, value in converted(case, model).items()}
    assert {name: tensor.shape for name, tensor in file.tensors.items()} == shapes
    dense, theirs = load_spec(str(tmp_path / "source")), GgufWeights(name, spec)
    with CheckpointWeights(tmp_path / "source", dense) as ours:
        for part in parts(dense):
            one, limit = ours.get(part), 0.02 if len(part.shape) > 1 else 1e-6
            assert (theirs.get(part) - one).norm() <= limit * one.norm().clamp_min(1e-9), part
    truth = truth_of(model)
    assert (logits(name) - truth).norm() < 0.25 * truth.norm()


PUBLISHED = (
    "kimi-k2", "kimi-k2.5", "ministral-3-3b", "ministral-3-14b", "olmoe-1b-7b", "dots.llm1",
    "k-exaone-236b-a23b", "solar-open-100b", "youtu-llm-2b", "glm-4-9b-chat",
)  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_can_be_said_in_gguf(name: str, tmp_path: Path) -> None:
    """Kimi K2's header describes a file of a terabyte, which is not made."""
    config = planning_config(name)
    config.pop("quantization_config", None)
    spec = replace(spec_from_config(config, name=name), unsupported="")
    GGUF.refuse(spec, check(QuantizeRecipe(bits=8, group_size=None)), TableFormats())
    GGUF.check_source(tmp_path, spec)


REFUSED: dict[str, tuple[PretrainedConfig, str]] = {
    "key heads": (
        Dots1Config(**SIZES, **ROUTED, first_k_dense_replace=1), "as many heads of keys",
    ),
    "width": (GlmConfig(**SIZES | {"head_dim": 32}), "as wide as the hidden state"),
    "shared head": (
        OlmoeConfig(**PLAIN_SIZES | {"num_key_value_heads": 4}, num_experts=8,
                    num_experts_per_tok=3, tie_word_embeddings=True),
        "a separate LM head",
    ),
    "renormalised": (
        OlmoeConfig(**PLAIN_SIZES | {"num_key_value_heads": 4}, num_experts=8,
                    num_experts_per_tok=3, norm_topk_prob=True),
        "norm_topk",
    ),
    "two bases": (
        MellumConfig(
            **SIZES, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32,
            sliding_window=8, norm_topk_prob=True,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters={
                "full_attention": PLAIN_ROPE,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        ),
        "rope",
    ),
    "a window": (
        Ministral3Config(**SIZES, sliding_window=8, rope_parameters={
            **SCALED, "llama_4_scaling_beta": 0.3}),
        "sliding windows",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_llama_cpp_computes_otherwise_is_refused_first(case: str, tmp_path: Path) -> None:
    config, reason = REFUSED[case]
    random_model(config).save_pretrained(tmp_path / "source")
    asked = QuantizeOptions(bits=8, method="rtn", format="gguf")
    with pytest.raises(CannotRun, match=reason):
        quantize(str(tmp_path / "source"), tmp_path / "out", asked)


@pytest.mark.parametrize(
    ("case", "changed", "reason"),
    [
        ("ministral3", {"rope.scaling.type": "none"}, "YaRN"),
        ("exaone-moe", {"expert_shared_feed_forward_length": 40}, "shared expert"),
        ("exaone-moe", {"attention.sliding_window": 0}, "sliding_window"),
        ("dots1", {"expert_gating_func": 1}, "another function"),
        ("mellum", {"rope.freq_base_swa": 1e4}, "freq_base_swa"),
    ],
)
def test_files_that_say_something_else_are_refused(
    case: str, changed: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    architecture, _, keys = CASES[case]
    name = write(tmp_path / "m.gguf", architecture, converted(case, model_of(case)), keys | changed)
    with pytest.raises(BadModel, match=reason):
        load_spec(name)
