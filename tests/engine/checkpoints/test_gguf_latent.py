"""GGUF of latent attention (architecture deepseek2): DeepSeek V2 and V3, GLM-4.7-Flash."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4MoeLiteConfig,
    PretrainedConfig,
)

from ridgeline.engine.checkpoints.gguf.weights import GgufWeights
from ridgeline.engine.checkpoints.tensor_names import parts
from ridgeline.errors import BadModel
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.rewrite import linears
from tests.engine.checkpoints.test_gguf_files import (
    NAMES,
    SHARED,
    SIZES,
    difference,
    logits,
    random_model,
    stacked_experts,
    write,
)

pytestmark = pytest.mark.slow

HEADS, PLAIN, TURNED, VALUE, RANK = 4, 32, 8, 24, 32
LATENT: dict[str, Any] = {
    **{key: value for key, value in SIZES.items() if key != "head_dim"},
    "num_key_value_heads": HEADS, "q_lora_rank": 32, "kv_lora_rank": RANK,
    "qk_nope_head_dim": PLAIN, "qk_rope_head_dim": TURNED, "v_head_dim": VALUE,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7,
    "norm_topk_prob": True, "n_group": 1, "topk_group": 1,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.7,
    "mscale_all_dim": 0.7, "rope_theta": 10_000.0,
}  # fmt: skip
KEYS: dict[str, Any] = {
    "attention.head_count_kv": 1, "attention.key_length": RANK + TURNED,
    "attention.value_length": RANK, "attention.key_length_mla": PLAIN + TURNED,
    "attention.value_length_mla": VALUE, "attention.kv_lora_rank": RANK,
    "attention.q_lora_rank": 32, "rope.dimension_count": TURNED, "expert_count": 8,
    "expert_used_count": 3, "expert_feed_forward_length": 32, "expert_shared_count": 1,
    "leading_dense_block_count": 1, "expert_weights_scale": 1.7, "expert_weights_norm": True,
    "expert_gating_func": 2,
}  # fmt: skip
LATENT_NAMES = {
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b", "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm", "self_attn.kv_b_proj": "attn_kv_b",
    "mlp.gate": "ffn_gate_inp",
    **{f"mlp.shared_experts.{name}_proj": f"ffn_{name}_shexp" for name in ("gate", "up", "down")},
}  # fmt: skip
CASES: dict[str, tuple[PretrainedConfig, dict[str, Any]]] = {
    "v3": (
        DeepseekV3Config(**LATENT | {"n_group": 4, "topk_group": 2}, rope_parameters=YARN),
        {
            "expert_group_count": 4, "expert_group_used_count": 2, "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16,
            "rope.scaling.yarn_log_multiplier": 0.07,
        },
    ),
    "v2": (
        DeepseekV2Config(
            **LATENT | {"q_lora_rank": None, "norm_topk_prob": False}, topk_method="greedy"
        ),
        {"expert_gating_func": 1, "attention.q_lora_rank": 0, "expert_weights_norm": False},
    ),
    "flash": (Glm4MoeLiteConfig(**LATENT), {}),
    "old": (
        DeepseekV3Config(**LATENT),
        {
            "attention.head_count_kv": 4, "attention.key_length": PLAIN + TURNED,
            "attention.value_length": VALUE, "attention.key_length_mla": None,
            "attention.value_length_mla": None,
        },
    ),
}  # fmt: skip


def tensors_of(model: Any, is_old: bool) -> dict[str, np.ndarray]:
    """The tensors as llama.cpp's converter writes them, or wrote them before April 2025."""
    names = NAMES | LATENT_NAMES
    out: dict[str, np.ndarray] = {}
    for name, data in model.state_dict().items():
        if ".layers." not in name:
            out[next(v for k, v in SHARED.items() if k in name) + ".weight"] = data.numpy()
            continue
        _, _, layer, rest = name.split(".", 3)
        at, module = f"blk.{layer}.", rest.removesuffix(".weight")
        if module.startswith("mlp.experts."):
            out |= stacked_experts(at, module.rpartition(".")[2], data)
        elif module.endswith("e_score_correction_bias"):
            out[f"{at}exp_probs_b.bias"] = data.numpy()
        elif module.endswith("kv_b_proj") and not is_old:
            k, v = data.view(HEADS, PLAIN + VALUE, RANK).split((PLAIN, VALUE), dim=1)
            out[f"{at}attn_k_b.weight"] = k.transpose(1, 2).numpy()
            out[f"{at}attn_v_b.weight"] = v.numpy()
        else:
            out[f"{at}{names[module]}.weight"] = data.numpy()
    return out


def written(path: Path, model: Any, case: str) -> str:
    keys = {key: value for key, value in (KEYS | CASES[case][1]).items() if value is not None}
    return write(path, "deepseek2", tensors_of(model, case == "old"), keys)


def model_of(case: str) -> Any:
    model = random_model(CASES[case][0])
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if "e_score_correction" in name:
                value.add_(torch.rand_like(value) * 0.2)
    return model


@pytest.mark.parametrize("case", CASES)
def test_file_gives_the_logits_of_its_source_model(case: str, tmp_path: Path) -> None:
    model = model_of(case)
    assert difference(written(tmp_path / "m.gguf", model, case), model) < 2e-3


def test_a_lost_half_of_the_up_projection_is_named(tmp_path: Path) -> None:
    tensors = tensors_of(model_of("flash"), False)
    del tensors["blk.1.attn_v_b.weight"]
    name = write(tmp_path / "m.gguf", "deepseek2", tensors, KEYS)
    with pytest.raises(BadModel, match=r"blk\.1\.attn_v_b"):
        difference(name, None)


def test_packed_projections_stay_packed(tmp_path: Path) -> None:
    """The down-projections and q run as integers; the up-projection is decoded exactly."""
    tensors = tensors_of(model_of("flash"), False)
    packed, decoded = dict(tensors), dict(tensors)
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, data in tensors.items():
        if "attn_" in name and data.ndim > 1 and data.shape[-1] % 32 == 0:
            packed[name] = gguf.quants.quantize(np.ascontiguousarray(data), kind)
            decoded[name] = gguf.quants.dequantize(packed[name], kind)
    name = write(tmp_path / "m.gguf", "deepseek2", packed, KEYS)
    plain = write(tmp_path / "plain.gguf", "deepseek2", decoded, KEYS)
    by_path = linears(load_spec(name))
    kinds = {key: by_path[f"layers.0.attention.{key}"].format.kind for key in ("q", "kv_down")}
    assert kinds == {"q": "blocks", "kv_down": "blocks"}
    assert by_path["layers.0.kv_up.k"].format.kind == "dense"
    theirs, ours = GgufWeights(plain, load_spec(plain)), GgufWeights(name, load_spec(name))
    for part in parts(load_spec(name)):
        assert torch.equal(ours.get(part), theirs.get(part)), part
    truth = logits(plain)
    assert float((logits(name) - truth).norm() / truth.norm()) < 0.15


def test_an_unknown_choice_of_experts_is_refused(tmp_path: Path) -> None:
    tensors = tensors_of(model_of("flash"), False)
    name = write(tmp_path / "m.gguf", "deepseek2", tensors, KEYS | {"expert_gating_func": 3})
    with pytest.raises(BadModel, match="unknown function"):
        load_spec(name)
