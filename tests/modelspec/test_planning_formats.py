"""Planning reads every weight format that the checkpoint reader reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from transformers import LlamaConfig

from ridgeline.errors import BadInput, CannotRun
from ridgeline.hardware.catalogue import find_accelerator
from ridgeline.modelspec.checkpoints.planning import load_planning_spec, planning_spec
from ridgeline.modelspec.checkpoints.quantization_config import _READERS
from ridgeline.modelspec.cost.serving_formats import (
    checkpoint_bytes,
    parse_weight_dtype,
    quantised_as,
    serving_format,
)
from ridgeline.plan.step_time.parallel_layout import Layout
from ridgeline.plan.step_time.replica import build_replica
from tests.engine.checkpoints.test_gguf_files import KEYS, SIZES, random_model, tensors_of

DENSE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def weights(bits: int, kind: str = "int", **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "symmetric": True, **more}


def compressed(layout: str, what: dict[str, Any]) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": what}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}


GROUP = {"strategy": "group", "group_size": 32}
CONFIGS: list[tuple[dict[str, Any], str, float]] = [
    ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "int4", 4.125),
    ({"quant_method": "gptq", "bits": 8, "group_size": 32}, "int8-g32", 8.5),
    ({"quant_method": "gptq", "bits": 3, "group_size": -1}, "int3-row", 3),
    ({"quant_method": "awq", "bits": 4, "group_size": 64}, "int4-g64", 4.25),
    (
        {
            "quant_method": "auto-round",
            "bits": 2,
            "group_size": 64,
            "sym": True,
            "packing_format": "auto_round:auto_gptq",
        },
        "int2-g64",
        2.25,
    ),
    (compressed("pack-quantized", weights(4, **GROUP)), "int4-g32", 4.5),
    (compressed("int-quantized", weights(8, strategy="channel")), "int8", 8),
    (compressed("float-quantized", weights(8, "float", strategy="channel")), "float8_e4m3", 8),
    (
        compressed(
            "nvfp4-pack-quantized", weights(4, "float", strategy="tensor_group", group_size=16)
        ),
        "nvfp4",
        4.5,
    ),
    (
        compressed("mxfp4-pack-quantized", weights(4, "float", strategy="group", group_size=32)),
        "mxfp4",
        4.25,
    ),
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "float8_block", 8),
    ({"quant_method": "fp8"}, "float8_e4m3", 8),
    ({"quant_method": "fbgemm_fp8"}, "float8_e4m3", 8),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4", 4.5),
    ({"quant_method": "modelopt", "quant_algo": "FP8"}, "float8_e4m3", 8),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8", 8),
    (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        "nf4",
        4.5,
    ),
    ({"quant_method": "mxfp4"}, "mxfp4", 4.25),
]


@pytest.mark.parametrize(("quantization", "name", "bits"), CONFIGS)
def test_planning_knows_the_format_and_its_bytes(
    quantization: dict[str, Any], name: str, bits: float
) -> None:
    spec = planning_spec({**DENSE, "quantization_config": quantization}, "m")
    assert quantised_as(spec) == name
    plain = planning_spec(DENSE, "m")
    linear = sum(
        part.num_in * part.num_out
        for layer in plain.layers
        for part in (
            *(getattr(layer.attention, key) for key in "qkvo"),
            layer.mlp.gate,
            layer.mlp.up,
            layer.mlp.down,
        )
    )
    saved = checkpoint_bytes(plain) - checkpoint_bytes(spec)
    assert saved == pytest.approx(linear * (16 - bits) / 8, rel=0.01)


def test_every_method_of_the_reader_is_covered() -> None:
    methods = {quantization["quant_method"] for quantization, _, _ in CONFIGS}
    assert set(_READERS) - {"torchao"} <= methods  # which is refused with the reason


def test_formats_made_of_their_parts_have_names() -> None:
    assert parse_weight_dtype("INT4-g64") == "int4-g64"
    assert serving_format("gguf-4.83").nbytes(1000, 10) == pytest.approx(603.75)
    for name in ("int9-g64", "int4-g0", "gguf-4", "float8_e4m3-b"):
        with pytest.raises(BadInput, match="unknown weight dtype"):
            parse_weight_dtype(name)


def test_old_files_next_to_config_json_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    assert quantised_as(load_planning_spec(str(tmp_path))) == "nvfp4"


def test_shards_do_not_cut_blocks_or_groups() -> None:
    """Qwen3-235B-FP8 at tp 8 has experts of 1536 / 8 = 192 rows; the blocks are of 128."""
    moe = {
        **DENSE,
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 1536,
        "head_dim": 128,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    spec = planning_spec({**moe, "quantization_config": blocks}, "m")
    device = find_accelerator("h100-sxm")
    with pytest.raises(CannotRun, match=r"1536 / 8 = 192.*multiple of 128.*whole experts with ep"):
        build_replica(spec, device, Layout(tp=8))
    build_replica(spec, device, Layout(tp=4))
    build_replica(spec, device, Layout(tp=8, ep=8))
    build_replica(spec, device, Layout(tp=8), weight_dtype="bfloat16")
    build_replica(planning_spec(moe, "m"), device, Layout(tp=8))
    groups = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    grouped = planning_spec({**moe, "quantization_config": groups}, "m")
    with pytest.raises(CannotRun, match="tp would cut a quantisation group"):
        build_replica(grouped, device, Layout(tp=8))


def test_gguf_files_are_planned_with_their_own_bits(tmp_path: Path) -> None:
    """Q8_0 in the first two layers and F16 in the third: (8.5 + 8.5 + 16) / 3."""
    model = random_model(LlamaConfig(**SIZES))
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in KEYS.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"llama.{key}", value)
    for name, data in tensors_of(model, "llama").items():
        if data.ndim == 1:
            writer.add_tensor(name, data)
        elif name.startswith(("blk.0", "blk.1")):
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, data.astype("float16"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    spec = load_planning_spec(str(path))
    assert quantised_as(spec) == "gguf-11.00"
    assert build_replica(spec, find_accelerator("h100-sxm")).weight_dtype == "gguf-11.00"
