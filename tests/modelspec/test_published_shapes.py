"""Counts of published shapes against published figures, and figures that are often got wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from ridgeline.errors import BadModel
from ridgeline.hardware.catalogue import find_accelerator
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.checkpoints.planning import load_planning_spec
from ridgeline.modelspec.cost import (
    cost_model,
    kv_bytes_per_token,
    num_params,
    resident_weight_bytes,
)
from ridgeline.modelspec.cost.serving_formats import checkpoint_bytes, quantised_as
from ridgeline.modelspec.families.registry import FAMILIES, spec_from_config
from ridgeline.modelspec.families.shapes import known_shapes, planning_config, planning_table
from ridgeline.plan.step_time.parallel_layout import Layout
from ridgeline.plan.step_time.replica import build_replica


def kv_per_token(model: str, dtype: str | None = None) -> float:
    return build_replica(
        load_planning_spec(model), find_accelerator("h200-sxm"), kv_dtype=dtype
    ).cost.kv_bytes_per_token


@pytest.mark.parametrize("name", list(planning_table()))
def test_parameters_are_those_that_were_published(name: str) -> None:
    published = planning_table()[name]
    assert published["source"]
    counted = num_params(load_planning_spec(name)) / 1e9
    assert counted == pytest.approx(published["params_b"], rel=0.01)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("olmoe-1b-7b", 6.92),
        ("dots.llm1", 142),
        ("mellum2-12b-a2.5b", 12.1),
        ("k-exaone-236b-a23b", 236),
        ("solar-open-100b", 102),
        ("youtu-llm-2b", 1.961560064),
        ("vaultgemma-1b", 1.03874112),
        ("hyperclovax-seed-think-14b", 14.748),
        ("ministral-8b", 8.02),
        ("mistral-nemo-12b", 12.2),
        ("smollm2-1.7b", 1.71),
        ("internlm3-8b", 8.8),
        ("glm-4-9b-chat", 9.4),
        ("cwm", 32.6),
        ("ministral-3-3b", 3.4),
        ("ministral-3-8b", 8.5),
        ("ministral-3-14b", 13.5),
        ("mistral-small-4-119b", 119),
    ],
)
def test_parameters_of_recent_shapes(name: str, billions: float) -> None:
    assert num_params(load_planning_spec(name)) / 1e9 == pytest.approx(billions, rel=0.01)


def test_names_are_in_lower_case_so_that_any_spelling_finds_them() -> None:
    assert [name for name in known_shapes() if name != name.lower()] == []
    shape, repository = (load_planning_spec(n) for n in ("gemma-4-31b", "google/Gemma-4-31B-it"))
    assert repository.layers == shape.layers


def test_many_shapes_are_known_and_all_of_them_can_be_read() -> None:
    assert len(known_shapes()) >= 30
    for name in known_shapes():
        assert num_params(load_planning_spec(name)) > 1e8


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
    step = build_replica(load_planning_spec("llama-2-7b"), find_accelerator("h100-sxm")).uniform(
        1, 1, 0, sampled=1
    )
    assert 1.3e12 < 100 * step.weight_bytes < 1.4e12  # and not 0.7e12


def test_the_dense_peak_of_an_h100() -> None:
    found = build_replica(load_planning_spec("llama-3.1-8b"), find_accelerator("h100-sxm"))
    assert found.peaks.flops_s == 989e12
    eight = build_replica(
        load_planning_spec("llama-3.1-8b"), find_accelerator("h100-sxm"), weight_dtype="float8_e4m3"
    )
    assert eight.peaks.flops_s == 1979e12
    four = build_replica(
        load_planning_spec("llama-3.1-8b"), find_accelerator("h100-sxm"), weight_dtype="int4"
    )
    assert four.peaks.flops_s == 989e12  # four-bit weights are unpacked: bfloat16 products


@pytest.mark.parametrize("model", ["llama-3.2-1b", "qwen3-30b-a3b", "gemma-3-4b"])
def test_planning_and_engine_costs_agree(model: str) -> None:
    spec = load_spec(f"dummy:{model}")
    assert load_planning_spec(model) == replace(spec, name=model)
    machine = build_replica(spec, find_accelerator("h200-sxm"))
    assert machine.cost.kv_bytes_per_token == kv_bytes_per_token(spec)
    assert machine.resident_bytes == pytest.approx(resident_weight_bytes(spec), rel=1e-3)
    shapes = [(300, 0), (1, 2000), (1, 5)]
    work, step = cost_model(spec).step(shapes, 3), machine.price(shapes, 3)
    assert step.flops == pytest.approx(work.flops, rel=1e-9)
    assert step.bytes == pytest.approx(work.bytes, rel=1e-3)


def test_a_config_file_and_a_quantised_checkpoint(tmp_path: Path) -> None:
    fields = {
        k: v for k, v in planning_table()["deepseek-v3"].items() if k not in ("source", "params_b")
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**fields, "quantization_config": {"quant_method": "fp8"}}))
    spec = load_planning_spec(str(path))
    assert quantised_as(spec) == "float8_e4m3"
    assert num_params(spec) == num_params(load_planning_spec("deepseek-v3"))
    assert quantised_as(load_planning_spec(str(tmp_path))) == "float8_e4m3"
    path.write_text(json.dumps({**fields, "quantization_config": {"quant_method": "other"}}))
    with pytest.raises(BadModel, match="quantization_config"):
        load_planning_spec(str(path))
    path.write_text(json.dumps({**fields, "kv_lora_rank": "big"}))
    with pytest.raises(BadModel, match="kv_lora_rank"):
        load_planning_spec(str(path))


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
    spec = load_planning_spec(model)
    assert checkpoint_bytes(spec) / 1e9 == pytest.approx(gb, rel=0.005)
    if spec.stored_dtype == "bfloat16":
        machine = build_replica(spec, find_accelerator("h200-sxm"))
        assert machine.resident_bytes == pytest.approx(checkpoint_bytes(spec), rel=1e-3)


def test_mxfp4_is_of_experts_alone() -> None:
    spec, device = load_planning_spec("gpt-oss-120b"), find_accelerator("b200")
    packed, wide = (
        build_replica(spec, device, weight_dtype=name) for name in ("mxfp4", "bfloat16")
    )
    assert packed.shared_bytes == wide.shared_bytes and packed.head_bytes == wide.head_bytes
    experts = packed.cost.experts[0]
    nbytes = experts.num_layers * experts.params * 17 / 32  # 4 bits, and a byte per 32
    assert packed.expert_bytes == (pytest.approx(nbytes),)
    assert packed.compute_dtype == "bfloat16"  # attention is, and so are activations
    dense = build_replica(load_planning_spec("llama-3.1-8b"), device, weight_dtype="mxfp4")
    assert (
        dense.shared_bytes
        < 0.3 * build_replica(load_planning_spec("llama-3.1-8b"), device).shared_bytes
    )


def test_float32_checkpoints_are_served_in_sixteen_bits() -> None:
    """No accelerator of the catalogue has a rate for float32."""
    spec, device = load_planning_spec("gemma-2-9b"), find_accelerator("h100-sxm")
    assert spec.stored_dtype == "float32"
    served, asked = (
        build_replica(spec, device),
        build_replica(spec, device, weight_dtype="bfloat16"),
    )
    for machine in (served, asked):
        assert (machine.weight_dtype, machine.kv_dtype) == ("bfloat16", "bfloat16")
        assert machine.cost.kv_bytes_per_token == 42 * 2 * 8 * 256 * 2
        assert machine.head_bytes == 2 * spec.vocab_size * spec.hidden_size
    assert served.resident_bytes == pytest.approx(2 * num_params(spec))
    eight = build_replica(spec, device, weight_dtype="float8_e4m3")
    assert eight.kv_dtype == "bfloat16" and eight.head_bytes == served.head_bytes


def test_an_unknown_model_names_its_neighbours() -> None:
    with pytest.raises(BadModel, match=r"llama-3\.1-8b"):
        load_planning_spec("llama-3.1-8")


def test_unsupported_families_say_why_the_engine_cannot_run_them() -> None:
    for name in planning_table():
        spec = load_planning_spec(name)
        assert bool(spec.unsupported) == (spec.family not in FAMILIES)
    assert not load_planning_spec("llama-3.1-8b").unsupported
    assert load_planning_spec("deepseek-v3").layers[-1].attention.latent is not None
    with pytest.raises(BadModel, match="share a KV cache"):
        spec_from_config(planning_config("hunyuan-large"), name="hunyuan")


def test_cache_of_models_with_unusual_attention() -> None:
    # MiMo-V2-Flash: 9 full layers of 4 heads, 39 with a window of 8; keys of 192, values of 128.
    mimo = load_planning_spec("XiaomiMiMo/MiMo-V2-Flash")
    full = [layer.attention for layer in mimo.layers if layer.attention.window is None]
    assert len(full) == 9 and {a.num_kv_heads for a in full} == {4}
    assert kv_per_token("mimo-v2-flash") == (9 * 4 + 39 * 8) * (192 + 128) * 2
    machine = build_replica(mimo, find_accelerator("h200-sxm"), Layout(tp=8))
    assert machine.layout.tp == 8  # its blocks of scales lie across heads: engines divide them
    # Kimi K3: 24 latent layers keep 576 numbers per token, the 69 others a state.
    assert kv_per_token("kimi-k3") == 24 * 576 * 2
    assert checkpoint_bytes(load_planning_spec("kimi-k3")) == pytest.approx(1.56e12, rel=0.01)
    # Llama 3.3 Nemotron Super: 49 of 80 layers have attention.
    assert kv_per_token("llama-3.3-nemotron-super-49b") == 49 * 8 * 128 * 2 * 2
