"""GGUF of every family that is written: part by part and as a whole, there and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    ArceeConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Llama4TextConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from ridgeline.compress.quantize_model import TableFormats
from ridgeline.compress.recipe import QuantizeRecipe, check
from ridgeline.compress.writers.gguf import GGUF
from ridgeline.config.improve import QuantizeOptions
from ridgeline.engine.checkpoints.gguf.weights import GgufWeights
from ridgeline.engine.checkpoints.sources import CheckpointWeights
from ridgeline.engine.checkpoints.tensor_names import parts
from ridgeline.errors import CannotRun
from ridgeline.modelspec.checkpoints.gguf_architectures.rows import ARCHITECTURES
from ridgeline.modelspec.checkpoints.gguf_header import read_gguf
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.families.registry import spec_from_config
from ridgeline.modelspec.families.shapes import planning_config
from ridgeline.modelspec.format import blocks
from ridgeline.workflows.quantize.quantize import quantize
from tests.engine.checkpoints import test_gguf_latent as latent_cases
from tests.engine.checkpoints.test_gguf_files import (
    CASES,
    SIZES,
    architecture_of,
    logits,
    random_model,
    truth_of,
    xielu_numbers,
)

DELTA: dict[str, Any] = {
    **SIZES, "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}  # fmt: skip
LAYERED = {
    "qwen35": Qwen3_5TextConfig(**DELTA),
    "qwen35moe": Qwen3_5MoeTextConfig(**DELTA, **EXPERTS),
    "qwen3next": Qwen3NextConfig(**DELTA, **EXPERTS, norm_topk_prob=True),
    "gemma4": CASES["gemma4"][0],
    "gemma4-keys": CASES["gemma4-keys"][0],
    "gemma4-experts": CASES["gemma4-experts"][0],
}
"""Models whose layers only round-to-nearest knows."""

LATENT = {f"deepseek-{case}": latent_cases.CASES[case] for case in ("v3", "flash")}
WRITTEN = (
    "llama-bias", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "cohere2", "apertus",
    "smollm3", "olmo2", "olmo2-windows", "olmo2-yarn", "granite", "seed_oss", "exaone4",
    "ernie4_5", "glm4", "arcee", "llama4", "qwen2moe", "glm4moe", "minimax-m2", "gpt-oss", *LATENT,
)  # fmt: skip
UNNEEDED = {
    "rope.scaling.finetuned": "says nothing about how the model runs",
    "rope.freq_base_swa": "repeats the only base, but for Gemma 3",
    "rope.scaling.yarn_attn_factor": "is what llama.cpp takes anyway",
    "nextn_predict_layers": "layers that predict further tokens are not written",
    "interleave_moe_layer_step": "", "rope.scaling.type": "none",
}  # fmt: skip


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm().clamp_min(1e-9))


def made(case: str, folder: Path, **options: Any) -> tuple[Any, str]:
    """The transformers model of a case, and the GGUF file that is made of it."""
    if case in LATENT:
        source: Any = latent_cases.model_of(case.partition("-")[2])
    else:
        source = random_model(LAYERED[case] if case in LAYERED else CASES[case][0])
    if case == "apertus":
        xielu_numbers(source)
    source.save_pretrained(folder / "source")
    asked = QuantizeOptions(method="rtn", format="gguf", **options)
    quantize(str(folder / "source"), folder / "out", asked)
    return source, str(folder / "out" / "model.gguf")


@pytest.mark.parametrize("case", WRITTEN)
def test_written_file_holds_the_model_that_it_was_made_of(case: str, tmp_path: Path) -> None:
    """Every part within what 8 bits move it; norms, biases and sinks exactly."""
    keys = latent_cases.KEYS | LATENT[case][1] if case in LATENT else CASES[case][1]
    source, name = made(case, tmp_path, bits=8)
    dense, spec = load_spec(str(tmp_path / "source")), load_spec(name)
    file, architecture = read_gguf(name), "deepseek2" if case in LATENT else architecture_of(case)
    assert file.metadata["general.architecture"] == architecture and architecture in ARCHITECTURES
    for key, value in keys.items():
        if key not in UNNEEDED and "nextn_predict_layers" not in keys:
            assert file.metadata[f"{architecture}.{key}"] == pytest.approx(value, rel=1e-6), key
    theirs = GgufWeights(name, spec)
    with CheckpointWeights(tmp_path / "source", dense) as ours:
        for part in parts(dense):
            one, limit = ours.get(part), 0.02 if len(part.shape) > 1 else 1e-6
            if dense.norm_plus_one and part.key.endswith("norm"):
                one = one + 1
            assert distance(theirs.get(part), one) < limit, part
    assert distance(logits(name), truth_of(source)) < 0.15


@pytest.mark.parametrize("case", LAYERED)
def test_delta_nets_and_layers_with_inputs_are_written(case: str, tmp_path: Path) -> None:
    """Every part, with the value heads of Qwen3.5 in llama.cpp's order."""
    _, name = made(case, tmp_path, bits=8)
    dense, spec = load_spec(str(tmp_path / "source")), load_spec(name)
    theirs = GgufWeights(name, spec)
    with CheckpointWeights(tmp_path / "source", dense) as ours:
        for part in parts(dense):
            one, limit = ours.get(part), 0.02 if len(part.shape) > 1 else 1e-6
            one = one + 1 if dense.norm_plus_one and part.key.endswith("norm") else one
            one = in_tiles(one, part.key) if case.startswith("qwen35") else one
            assert distance(theirs.get(part), one) < limit, part
    assert logits(name).isfinite().all()


def in_tiles(value: torch.Tensor, key: str) -> torch.Tensor:
    """2 key heads with 3 value heads each: the first ones of both, then the second ones."""
    if not key.startswith("delta_") or key in ("delta_q", "delta_k", "delta_gain"):
        return value
    if key == "delta_o":
        return in_tiles(value.T, "delta_v").T
    before = 2 * 2 * 32 if key == "delta_conv" else 0
    heads = value[before:].unflatten(0, (2, 3, -1)).transpose(0, 1).flatten(0, 2)
    return torch.cat((value[:before], heads))


@pytest.mark.parametrize("case", ["phi3", "glm4"])
def test_parts_that_share_a_tensor_run_packed(case: str, tmp_path: Path) -> None:
    """In 4 bits, as in Ridgeline's own format."""
    _, name = made(case, tmp_path, group_size=32)
    options = QuantizeOptions(method="rtn", group_size=32)
    quantize(str(tmp_path / "source"), tmp_path / "own", options)
    assert load_spec(name).layers[1].attention.q.format == blocks(4, 32)
    assert distance(logits(name), logits(str(tmp_path / "own"))) < 1e-5


def test_names_are_those_of_the_converter(tmp_path: Path) -> None:
    """Of tensors that hold several parts, or half of one."""
    expected = {
        "phi3": {"attn_qkv": (128, 64), "ffn_up": (192, 64)},
        "glm4": {"ffn_up": (192, 64), "post_ffw_norm": (64,)},
        "deepseek-v3": {"attn_q_b": (160, 32), "attn_k_b": (4, 32, 32), "attn_v_b": (4, 24, 32)},
    }
    for case, shapes in expected.items():
        tensors = read_gguf(made(case, tmp_path / case, bits=8)[1]).tensors
        assert {name: tensors[f"blk.0.{name}.weight"].shape for name in shapes} == shapes


SCALED = {"rope_type": "longrope", "short_factor": [1.0, 1.2] * 4, "long_factor": [2.0, 4.0] * 4}


def test_rotary_factors_of_long_texts_are_written(tmp_path: Path) -> None:
    """Phi-3 with 128k positions: two lists, and the attention factor."""
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim"}
    config = Phi3Config(**sizes, rope_scaling=SCALED, original_max_position_embeddings=16)
    source: Any = random_model(config)
    source.save_pretrained(tmp_path / "source")
    options = QuantizeOptions(bits=8, method="rtn", format="gguf")
    quantize(str(tmp_path / "source"), tmp_path / "out", options)
    name = str(tmp_path / "out" / "model.gguf")
    rope = load_spec(name).layers[0].attention.rope
    assert rope.long_factor == tuple(SCALED["long_factor"])
    assert distance(logits(name), truth_of(source)) < 0.15


PUBLISHED = (
    "llama-3.1-8b", "gemma-2-27b", "gemma-3-27b", "gemma-4-e4b", "gemma-4-26b-a4b", "phi-4-mini",
    "command-r-plus", "command-a", "apertus-8b", "olmo-3-7b", "glm-4-9b", "llama-4-scout",
    "qwen2-57b-a14b", "glm-4.5", "minimax-m2", "gpt-oss-20b", "deepseek-v2-lite", "deepseek-v3",
    "glm-4.7-flash", "qwen3-next-80b-a3b", "qwen3.5-27b", "qwen3.5-35b-a3b",
)  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_can_be_said_in_gguf(name: str, tmp_path: Path) -> None:
    """Their headers, read back, describe the same models; no weights are needed."""
    config = planning_config(name)
    config.pop("quantization_config", None)
    spec = spec_from_config(config, name=name)
    GGUF.refuse(spec, check(QuantizeRecipe(bits=8, group_size=None)), TableFormats())
    GGUF.check_source(tmp_path, spec)


def test_heads_of_delta_nets_are_never_split_by_a_block() -> None:
    recipe = check(QuantizeRecipe(numbers="q4_k"))
    assert recipe.at("delta_v", 0, 512).numbers == "q4_k"
    assert (recipe.at("delta_o", 0, 512).bits, recipe.at("delta_o", 0, 512).group_size) == (5, 32)


REFUSED: dict[str, tuple[PretrainedConfig, str]] = {
    "norms of small Command R": (CASES["command-r"][0], "norms of q and k"),
    "plain queries": (latent_cases.CASES["v2"][0], "not compressed"),
    "chunks": (
        Llama4TextConfig(
            **SIZES | {"num_hidden_layers": 4, "intermediate_size": 32}, intermediate_size_mlp=96,
            num_local_experts=4, num_experts_per_tok=1, interleave_moe_layer_step=2,
            attention_chunk_size=16,
        ),
        r"attention\.chunk",
    ),
    "renormalised": (
        Qwen2MoeConfig(
            **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
            shared_expert_intermediate_size=64, norm_topk_prob=True,
        ),
        "norm_topk",
    ),
    "scores": (
        Gemma3TextConfig(**SIZES, sliding_window=8, query_pre_attn_scalar=32),
        r"attention\.scale",
    ),
    "biases": (ArceeConfig(**SIZES, mlp_bias=True), "no bias of feed-forward"),
    "no softcap": (
        Gemma2Config(**SIZES, sliding_window=8, query_pre_attn_scalar=16,
                     final_logit_softcapping=None),
        "final_softcap",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_llama_cpp_computes_otherwise_is_refused_first(case: str, tmp_path: Path) -> None:
    """Before anything is computed: no half-made model is left."""
    config, reason = REFUSED[case]
    random_model(config).save_pretrained(tmp_path / "source")
    with pytest.raises(CannotRun, match=reason):
        quantize(
            str(tmp_path / "source"), tmp_path / "out",
            QuantizeOptions(bits=8, method="rtn", format="gguf"),
        )  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
