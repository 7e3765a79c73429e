"""GGUF of gated delta nets: Qwen3-Next and Qwen3.5, as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import (
    PretrainedConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from ridgeline.engine.checkpoints.gguf.weights import GgufWeights
from ridgeline.engine.checkpoints.tensor_names import parts
from ridgeline.errors import BadModel
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.cost import resident_weight_bytes
from ridgeline.modelspec.rewrite import linears
from tests.engine.checkpoints.test_gguf_files import (
    EXPERT_NAMES,
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

KEY_HEADS, TIMES, KEY, VALUE = 2, 3, 16, 16
HYBRID: dict[str, Any] = {
    **SIZES, "num_hidden_layers": 4, "linear_num_key_heads": KEY_HEADS,
    "linear_num_value_heads": KEY_HEADS * TIMES, "linear_key_head_dim": KEY,
    "linear_value_head_dim": VALUE,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25,
    },
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}  # fmt: skip
KEYS: dict[str, Any] = {
    "block_count": 4, "ssm.conv_kernel": 4, "ssm.state_size": KEY, "ssm.group_count": KEY_HEADS,
    "ssm.time_step_rank": KEY_HEADS * TIMES, "ssm.inner_size": KEY_HEADS * TIMES * VALUE,
    "full_attention_interval": 4, "rope.dimension_count": 4,
    "rope.dimension_sections": [1, 1, 0, 0],
}  # fmt: skip
EXPERT_KEYS = {
    "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32,
    "expert_shared_feed_forward_length": 48,
}  # fmt: skip
CASES: dict[str, tuple[PretrainedConfig, dict[str, Any]]] = {
    "qwen35": (Qwen3_5TextConfig(**HYBRID), {}),
    "qwen35moe": (Qwen3_5MoeTextConfig(**HYBRID, **EXPERTS), EXPERT_KEYS),
    "qwen3next": (Qwen3NextConfig(**HYBRID, **EXPERTS, norm_topk_prob=True), EXPERT_KEYS),
}
DELTA_NAMES = {
    **NAMES, **EXPERT_NAMES, "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta", "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_ba": "ssm_ba", "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out",
}  # fmt: skip


def tiled(data: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Value heads, grouped by their key head, with the first of every group first."""
    shape = (*data.shape[:dim], KEY_HEADS, TIMES, size, *data.shape[dim + 1 :])
    return data.reshape(shape).transpose(dim, dim + 1).reshape(data.shape)


def reordered(module: str, data: torch.Tensor) -> torch.Tensor:
    """What the converter does to value heads of Qwen3.5."""
    keys = 2 * KEY_HEADS * KEY
    if module in ("in_proj_qkv", "conv1d"):
        return torch.cat((data[:keys], tiled(data[keys:], 0, VALUE)))
    if module == "in_proj_z":
        return tiled(data, 0, VALUE)
    if module in ("in_proj_b", "in_proj_a", "A_log", "dt_bias"):
        return tiled(data, 0, 1)
    return tiled(data, 1, VALUE) if module == "out_proj" else data


def tensors_of(model: Any, architecture: str) -> dict[str, np.ndarray]:
    out: dict[str, np.ndarray] = {}
    for name, data in model.state_dict().items():
        if "norm" in name and "linear_attn" not in name:
            data = data + 1
        if ".layers." not in name:
            out[next(v for k, v in SHARED.items() if k in name) + ".weight"] = data.numpy()
            continue
        _, _, layer, rest = name.split(".", 3)
        at, module = f"blk.{layer}.", rest.removesuffix(".weight")
        inner = module.removeprefix("linear_attn.")
        data = data.squeeze() if inner == "conv1d" else data
        if inner != module and architecture != "qwen3next":
            data = reordered(inner, data)
        if "mlp.experts." in module:
            out |= stacked_experts(at, module.rpartition(".")[2], data)
        elif inner == "A_log":
            out[f"{at}ssm_a"] = -data.exp().numpy()
        elif inner == "dt_bias":
            out[f"{at}ssm_dt.bias"] = data.numpy()
        elif inner == "in_proj_qkvz":
            sizes = (KEY, KEY, TIMES * VALUE, TIMES * VALUE)
            groups = data.view(KEY_HEADS, sum(sizes), -1).split(sizes, dim=1)
            q, k, v, z = (part.reshape(-1, data.shape[1]) for part in groups)
            out[f"{at}attn_qkv.weight"] = torch.cat((q, k, v)).numpy()
            out[f"{at}attn_gate.weight"] = z.numpy()
        else:
            out[f"{at}{DELTA_NAMES[module]}.weight"] = data.numpy()
    return out


@pytest.mark.parametrize("case", CASES)
def test_file_gives_the_logits_of_its_source_model(case: str, tmp_path: Path) -> None:
    config, keys = CASES[case]
    model = random_model(config)
    name = write(tmp_path / "m.gguf", case, tensors_of(model, case), KEYS | keys)
    assert difference(name, model) < 2e-3


def test_which_layers_are_delta_nets_is_read(tmp_path: Path) -> None:
    """From a flag per layer, as converters write it since the summer of 2026."""
    kinds = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    model = random_model(Qwen3_5TextConfig(**HYBRID, layer_types=kinds))
    flags = [kind == "linear_attention" for kind in kinds]
    tensors, key = tensors_of(model, "qwen35"), "attention.recurrent_layers"
    name = write(tmp_path / "m.gguf", "qwen35", tensors, KEYS | {key: [*flags, False]})
    assert difference(name, model) < 2e-3
    with pytest.raises(BadModel, match="one flag per layer"):
        load_spec(write(tmp_path / "n.gguf", "qwen35", tensors, KEYS | {key: flags[:3]}))


def test_layers_that_predict_further_tokens_are_left_unread(tmp_path: Path) -> None:
    model = random_model(CASES["qwen35"][0])
    tensors = tensors_of(model, "qwen35")
    tensors["blk.4.nextn.eh_proj.weight"] = np.zeros((64, 128), np.float32)
    keys = KEYS | {"block_count": 5, "nextn_predict_layers": 1}
    assert difference(write(tmp_path / "m.gguf", "qwen35", tensors, keys), model) < 2e-3


@pytest.mark.parametrize("case", ["qwen35", "qwen3next"])
def test_packed_delta_nets_stay_packed(case: str, tmp_path: Path) -> None:
    """The file's blocks, tensors of two types in one product; the small gates are decoded."""
    tensors = tensors_of(random_model(CASES[case][0]), case)
    packed, decoded = dict(tensors), dict(tensors)
    types = gguf.GGMLQuantizationType
    for name, data in tensors.items():
        if any(part in name for part in ("attn_qkv", "attn_gate", "ssm_out", "ssm_b")):
            packed[name] = gguf.quants.quantize(np.ascontiguousarray(data), types.Q8_0)
            decoded[name] = gguf.quants.dequantize(packed[name], types.Q8_0)
    keys = KEYS | CASES[case][1]
    one = write(tmp_path / "m.gguf", case, packed, keys)
    other = write(tmp_path / "plain.gguf", case, decoded, keys)
    spec, plain = load_spec(one), load_spec(other)
    found = {key: linear.format.kind for key, linear in linears(spec).items() if "s.0." in key}
    assert {found[f"layers.0.attention.{key}"] for key in "qkvzo"} == {"blocks"}
    assert found["layers.0.delta_b"] == found["layers.0.delta_a"] == "dense"
    assert resident_weight_bytes(spec) < resident_weight_bytes(plain)
    ours, theirs = GgufWeights(one, spec), GgufWeights(other, plain)
    for part in parts(plain):
        assert torch.equal(ours.get(part), theirs.get(part)), part
    truth = logits(other)
    assert float((logits(one, "float32") - truth).norm() / truth.norm()) < 1e-4


def test_sizes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    tensors = tensors_of(random_model(CASES["qwen35"][0]), "qwen35")
    keys = KEYS | {"ssm.inner_size": 97}
    with pytest.raises(BadModel, match="delta nets"):
        load_spec(write(tmp_path / "m.gguf", "qwen35", tensors, keys))
