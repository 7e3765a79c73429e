"""Published models are planned under the names that their repositories and other tools use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from ridgeline.errors import BadInput
from ridgeline.hardware.catalogue import Accelerator, find_accelerator
from ridgeline.modelspec.checkpoints.planning import load_planning_spec, planning_spec
from ridgeline.modelspec.cost import kv_bytes_per_token, num_params
from ridgeline.modelspec.cost.serving_formats import quantised_as
from ridgeline.modelspec.families.shapes import planning_config
from ridgeline.plan.step_time.operating_point import OperatingPoint, Pool
from ridgeline.plan.step_time.predict import predict
from ridgeline.workflows.inspect_model import inspect_model


@pytest.mark.parametrize(
    ("name", "billions", "weights"),
    [
        ("deepseek-ai/DeepSeek-R1-0528", 671.0, "float8_block"),
        ("nvidia/DeepSeek-R1-0528-FP4-v2", 671.0, "nvfp4"),
        ("DeepSeek-V3", 671.0, "float8_block"),
        ("Qwen/Qwen3-235B-A22B-Instruct-2507-FP8", 235.1, "float8_block"),
        ("nvidia/Qwen3-32B-NVFP4", 32.8, "nvfp4"),
        ("Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8", 480.2, "float8_block"),
        ("Qwen/Qwen3.5-397B-A17B", 396.3, None),
        ("moonshotai/Kimi-K2.5", 1026.4, "int4-g32-experts"),
        ("nvidia/Kimi-K2.5-NVFP4", 1026.4, "nvfp4"),
        ("MiniMaxAI/MiniMax-M2.1", 228.7, "float8_block"),
        ("zai-org/GLM-4.6-FP8", 352.8, "float8_block"),
        ("zai-org/GLM-5-FP8", 743.9, "float8_block"),
        ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4", 120.7, "nvfp4"),
        ("nvidia/Llama-3.1-405B-Instruct-FP8", 405.9, "float8_e4m3"),
        ("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", 70.6, "float8_e4m3"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", 46.7, None),
    ],
)
def test_a_repository_has_the_layers_of_its_model_and_the_format_of_its_name(
    name: str, billions: float, weights: str | None
) -> None:
    spec = load_planning_spec(name)
    assert num_params(spec) / 1e9 == pytest.approx(billions, rel=0.002)
    assert quantised_as(spec) == weights


@pytest.mark.parametrize(
    ("name", "row"),
    [("h100_sxm", "h100-sxm"), ("b200_sxm", "b200"), ("a100_sxm", "a100-80-sxm"),
     ("gb200", "gb200"), ("rtx_pro_6000_server", "rtx-6000-pro"), ("L40S", "l40s")],
)  # fmt: skip
def test_devices_are_found_by_the_names_of_other_tools(name: str, row: str) -> None:
    assert find_accelerator(name).name == row


def test_a_name_of_no_device_is_still_refused() -> None:
    with pytest.raises(BadInput, match="unknown accelerator"):
        find_accelerator("h100_sxmm_3")


POOLS = {"prefill": Pool(workers=2, tp=4), "decode": Pool(tp=1, attention_dp=8, moe_ep=8)}


@pytest.mark.parametrize("backend", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize("weights", ["bf16", "fp8", "fp8_block", "nvfp4", "int8_wo", "int4_wo"])
@pytest.mark.parametrize(
    "layout",
    [{"tp": 8}, {"tp": 16, "ep": 16}, {"attention_dp": 8, "ep": 8}, {"tp": 4, "pp": 4}, POOLS],
)
def test_points_of_a_latent_model_are_answered_on_every_engine(
    backend: str, weights: str, layout: dict[str, object]
) -> None:
    point = OperatingPoint(
        model="zai-org/GLM-5",
        device="gb300",
        isl=1000,
        osl=200,
        batch=16,
        weight_dtype=weights,
        backend=backend,
        **layout,  # type: ignore[arg-type]
    )
    found = predict(point, _roomy())
    low, high = found.interval["tpot_ms"]
    assert 0 < low < found.tpot_ms < high


def _roomy() -> dict[str, Accelerator]:
    """The device with enough memory for every layout: what fits is not in question here."""
    row = find_accelerator("gb300")
    return {row.name: replace(row, memory_bytes=100 * row.memory_bytes)}


def test_mamba_layers_keep_a_state_and_no_keys() -> None:
    spec = load_planning_spec("nemotron-3-nano-30b-a3b")
    kinds = [layer.attention.delta is None for layer in spec.layers]
    assert (len(kinds), sum(kinds)) == (29, 6)
    assert kv_bytes_per_token(spec) == 6 * 2 * 2 * 128 * 2
    states = 64 * 64 * 128 + (64 * 64 + 2 * 8 * 128) * 3
    assert spec.layers[0].attention.delta.state_size == states  # type: ignore[union-attr]


def test_a_sparse_attention_adds_the_weights_of_its_indexer() -> None:
    config = planning_config("glm-5")
    without = {k: v for k, v in config.items() if not k.startswith("index_")}
    added = num_params(planning_spec(config, "a")) - num_params(planning_spec(without, "a"))
    exact = 6144 * (128 + 32) + 2048 * 32 * 128
    assert added / 78 == pytest.approx(exact, rel=0.001)


def test_the_link_of_nvl72_reaches_beyond_eight_devices() -> None:
    times = {}
    for device in ("b200", "gb200"):
        point = OperatingPoint(model="deepseek-r1", device=device, isl=1000, osl=100, batch=512,
                               tp=1, attention_dp=32, ep=32, backend="trtllm")  # fmt: skip
        times[device] = predict(point).decode_ms
    assert times["gb200"] < 0.8 * times["b200"]


@pytest.mark.parametrize("name", ["opt-13b", "deepseek-v3.2", "kimi-k3"])
@pytest.mark.parametrize("file", ["", "config.json"])
def test_inspect_sizes_a_family_that_does_not_run(tmp_path: Path, name: str, file: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dict(planning_config(name))))
    found, published = inspect_model(str(folder / file)), inspect_model(name)
    assert found.rows == published.rows
    assert "the engine does not run this family" in (found.note or "")


@pytest.mark.parametrize("text_type", ["kimi_k2", "deepseek_v3"])
def test_kimi_k25_is_planned_from_its_text(tmp_path: Path, text_type: str) -> None:
    """The quantization_config of the published file stands in text_config."""
    text = dict(planning_config("kimi-k2.5"))
    config = {
        "model_type": "kimi_k25",
        "architectures": ["KimiK25ForConditionalGeneration"],
        "text_config": {**text, "model_type": text_type},
        "vision_config": {},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = load_planning_spec(str(tmp_path))
    assert quantised_as(found) == quantised_as(load_planning_spec("kimi-k2.5")) != "bfloat16"
    assert not found.unsupported
    assert inspect_model(str(tmp_path)).note == "only config.json was read"
