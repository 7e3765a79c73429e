"""Counts of published shapes against published figures, and figures that are often got wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ridgeline.errors import BadModel
from ridgeline.hardware.catalogue import find_accelerator
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.cost import (
    cost_model,
    kv_bytes_per_token,
    num_params,
    resident_weight_bytes,
)
from ridgeline.plan.model.outline import known_shapes, load_outline, more_shapes
from ridgeline.plan.model.weight_bytes import checkpoint_bytes
from ridgeline.plan.step_time.replica import replica


def kv_per_token(model: str, dtype: str | None = None) -> float:
    return replica(
        load_outline(model), find_accelerator("h200-sxm"), kv_dtype=dtype
    ).kv_bytes_per_token


@pytest.mark.parametrize("name", list(more_shapes()))
def test_parameters_are_those_that_were_published(name: str) -> None:
    published = more_shapes()[name]
    assert published["source"]
    found = load_outline(name).num_params / 1e9
    assert found == pytest.approx(published["params_b"], rel=0.01)


def test_many_shapes_are_known_and_all_of_them_can_be_read() -> None:
    assert len(known_shapes()) >= 30
    for name in known_shapes():
        assert load_outline(name).num_params > 1e8


@pytest.mark.parametrize(
    ("model", "nbytes"),
    [
        ("llama-3.1-8b", 131_072),
        ("llama-3.1-70b", 327_680),  # not 2.6 MB: that is 64 heads instead of 8
        ("llama-2-70b", 327_680),
        ("opt-13b", 819_200),
        ("qwen3-32b", 262_144),
        ("deepseek-v3", 70_272),  # latent attention: 61 layers x 576 numbers
        ("hunyuan-large", 131_072),  # half of 64 layers keep a cache
    ],
)
def test_kv_per_token(model: str, nbytes: int) -> None:
    assert kv_per_token(model) == nbytes


def test_seven_billion_at_a_hundred_tokens_a_second_is_one_and_a_third_terabytes_a_second() -> None:
    step = replica(load_outline("llama-2-7b"), find_accelerator("h100-sxm")).uniform(
        1, 1, 0, sampled=1
    )
    assert 1.3e12 < 100 * step.weight_bytes < 1.4e12  # and not 0.7e12


def test_the_dense_peak_of_an_h100() -> None:
    found = replica(load_outline("llama-3.1-8b"), find_accelerator("h100-sxm"))
    assert found.peaks.flops_s == 989e12
    eight = replica(
        load_outline("llama-3.1-8b"), find_accelerator("h100-sxm"), weight_dtype="float8_e4m3"
    )
    assert eight.peaks.flops_s == 1979e12
    four = replica(load_outline("llama-3.1-8b"), find_accelerator("h100-sxm"), weight_dtype="int4")
    assert four.peaks.flops_s == 989e12  # four-bit weights are unpacked: bfloat16 products


@pytest.mark.parametrize("model", ["llama-3.2-1b", "qwen3-30b-a3b", "gemma-3-4b"])
def test_outline_and_spec_count_alike(model: str) -> None:
    spec, outline = load_spec(f"dummy:{model}"), load_outline(model)
    machine = replica(outline, find_accelerator("h200-sxm"))
    assert outline.num_params == num_params(spec)
    assert machine.kv_bytes_per_token == kv_bytes_per_token(spec)
    assert machine.resident_bytes == pytest.approx(resident_weight_bytes(spec), rel=1e-3)
    shapes = [(300, 0), (1, 2000), (1, 5)]
    work, step = cost_model(spec).step(shapes, 3), machine.price(shapes, 3)
    assert step.flops == pytest.approx(work.flops, rel=1e-9)
    assert step.bytes == pytest.approx(work.bytes, rel=1e-3)


def test_a_config_file_and_a_quantised_checkpoint(tmp_path: Path) -> None:
    fields = {
        k: v for k, v in more_shapes()["deepseek-v3"].items() if k not in ("source", "params_b")
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**fields, "quantization_config": {"quant_method": "fp8"}}))
    found = load_outline(str(path))
    assert (
        found.packed == "float8_e4m3" and found.num_params == load_outline("deepseek-v3").num_params
    )
    assert load_outline(str(tmp_path)).packed == "float8_e4m3"
    path.write_text(json.dumps({**fields, "quantization_config": {"quant_method": "other"}}))
    with pytest.raises(BadModel, match="quantisation"):
        load_outline(str(path))
    path.write_text(json.dumps({**fields, "kv_lora_rank": "big"}))
    with pytest.raises(BadModel, match="kv_lora_rank"):
        load_outline(str(path))


@pytest.mark.parametrize(
    ("model", "gb"),
    [
        ("gpt-oss-120b", 65.25),  # 60.8 GiB: mxfp4 experts, all else in bfloat16
        ("gpt-oss-20b", 13.76),  # 12.8 GiB
        ("deepseek-v3", 673.5),  # of 688.6; the rest is the MTP module, which is not served
        ("kimi-k2", 1029),
        ("llama-3.1-8b", 16.06),
        ("gemma-2-9b", 36.96),  # the base model's files are in float32
    ],
)
def test_checkpoints_are_as_large_as_published(model: str, gb: float) -> None:
    outline = load_outline(model)
    assert checkpoint_bytes(outline) / 1e9 == pytest.approx(gb, rel=0.005)
    if outline.stored_dtype == "bfloat16":
        machine = replica(outline, find_accelerator("h200-sxm"))
        assert machine.resident_bytes == pytest.approx(checkpoint_bytes(outline), rel=1e-3)


def test_mxfp4_is_of_experts_alone() -> None:
    outline, device = load_outline("gpt-oss-120b"), find_accelerator("b200")
    packed, wide = (replica(outline, device, weight_dtype=name) for name in ("mxfp4", "bfloat16"))
    assert packed.shared_bytes == wide.shared_bytes and packed.head_bytes == wide.head_bytes
    experts = outline.experts[0]
    nbytes = experts.num_layers * experts.params * 17 / 32  # 4 bits, and a byte per 32
    assert packed.expert_bytes == (pytest.approx(nbytes),)
    assert packed.compute_dtype == "bfloat16"  # attention is, and so are activations
    dense = replica(load_outline("llama-3.1-8b"), device, weight_dtype="mxfp4")
    assert dense.shared_bytes < 0.3 * replica(load_outline("llama-3.1-8b"), device).shared_bytes


def test_float32_checkpoints_are_served_in_sixteen_bits() -> None:
    """No accelerator of the catalogue has a rate for float32."""
    outline, device = load_outline("gemma-2-9b"), find_accelerator("h100-sxm")
    assert outline.stored_dtype == "float32"
    served, asked = replica(outline, device), replica(outline, device, weight_dtype="bfloat16")
    for machine in (served, asked):
        assert (machine.weight_dtype, machine.kv_dtype) == ("bfloat16", "bfloat16")
        assert machine.kv_bytes_per_token == 42 * 2 * 8 * 256 * 2
        assert machine.head_bytes == 2 * outline.head_params
    assert served.resident_bytes == pytest.approx(2 * outline.num_params)
    eight = replica(outline, device, weight_dtype="float8_e4m3")
    assert eight.kv_dtype == "bfloat16" and eight.head_bytes == served.head_bytes


def test_an_unknown_model_names_its_neighbours() -> None:
    with pytest.raises(BadModel, match=r"llama-3\.1-8b"):
        load_outline("llama-3.1-8")
