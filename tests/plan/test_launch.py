"""What a plan says to run: every part of the plan is in the command, or there is no command."""

from __future__ import annotations

from itertools import product

import msgspec
import pytest

from ridgeline.hardware.catalogue import load_catalogue
from ridgeline.modelspec.checkpoints.planning import hub_name, load_planning_spec
from ridgeline.modelspec.cost.serving_formats import KV_DTYPES, SERVING_FORMATS
from ridgeline.plan.deploy.launch import LaunchPlan, launch_commands
from ridgeline.plan.fleet.demand import Demand
from ridgeline.plan.fleet.search import SearchSpace, enumerate_layouts, search
from ridgeline.plan.step_time.parallel_layout import Layout
from ridgeline.records import Slo

CATALOGUE = load_catalogue()
ENGINES = ("ridgeline", "vllm", "tensorrt-llm", "sglang")
BEST = search(
    load_planning_spec("llama-3.1-8b"),
    Demand(rate=20, isl=1024, osl=256, isl_p95=1500, longest=2048),
    Slo.parse("ttft:1000 tpot:50"),
    SearchSpace(devices=("h100-sxm",), token_budgets=(2048,), max_devices_per_replica=1),
    CATALOGUE,
).fleets[0]


def start(device: str = "h100-sxm", stored: str = "bfloat16", **changes: object) -> LaunchPlan:
    fields = {"layout": Layout(), "weight_dtype": "bfloat16", "kv_dtype": "bfloat16"}
    return LaunchPlan(
        candidate=msgspec.structs.replace(BEST, **(fields | changes)),
        device=CATALOGUE[device],
        model="org/model",
        stored=stored,
        max_model_len=4096,
        on_hub=True,
    )


def test_commands_use_the_planned_sizes() -> None:
    commands = launch_commands(start())
    assert tuple(commands) == ENGINES
    for text in commands.values():
        words = text.splitlines()[-1].split()
        for size in (4096, BEST.max_num_seqs, BEST.max_num_batched_tokens):
            assert str(size) in words, text


FORMATS = {
    ("ridgeline", "float16"): "--dtype float16",
    ("ridgeline", "int8"): "--quantization int8",
    ("ridgeline", "int4"): "--quantization int4",
    ("ridgeline", "float8_e4m3"): "--quantization fp8",
    ("ridgeline", "nvfp4"): "--quantization nvfp4",
    ("vllm", "float16"): "--dtype float16",
    ("vllm", "float8_e4m3"): "--quantization fp8",
    ("vllm", "int4"): "serve model-int4 ",
    ("vllm", "int8"): "serve model-int8 ",
    ("tensorrt-llm", "float8_e4m3"): "trtllm-serve model-fp8 ",
    ("sglang", "float8_e4m3"): "--quantization fp8",
    ("sglang", "int8"): "--model-path model-int8 ",
    ("sglang", "int4"): "--model-path model-int4 ",
}


@pytest.mark.parametrize(("engine", "weights"), list(product(ENGINES, SERVING_FORMATS)))
def test_commands_request_the_planned_weight_format(engine: str, weights: str) -> None:
    text = launch_commands(start(weight_dtype=weights))[engine]
    expected = FORMATS.get((engine, weights))
    if expected is not None:
        assert expected in text
    elif weights not in ("bfloat16", "float16", "float32"):
        assert text.startswith("# ") and "\n" not in text
    stored = launch_commands(start(weight_dtype=weights, stored=weights))[engine]
    if engine != "ridgeline":
        assert "quantiz" not in stored and not stored.startswith("#")


CACHES = {
    ("ridgeline", "int8"): "--kv-cache-dtype int8",
    ("ridgeline", "float8_e4m3"): "--kv-cache-dtype fp8",
    ("vllm", "float8_e4m3"): "--kv-cache-dtype fp8",
    ("tensorrt-llm", "float8_e4m3"): "--kv_cache_dtype fp8",
    ("sglang", "float8_e4m3"): "--kv-cache-dtype fp8_e4m3",
}


@pytest.mark.parametrize(("engine", "kv"), list(product(ENGINES, ("float8_e4m3", "int8"))))
def test_commands_request_the_planned_kv_format(engine: str, kv: str) -> None:
    assert kv in KV_DTYPES
    text = launch_commands(start(kv_dtype=kv))[engine]
    expected = CACHES.get((engine, kv))
    assert expected in text if expected else text.startswith("# ")


def test_planned_kv_format_of_quantised_weights_is_named() -> None:
    for kv, flag in (("int8", "int8"), ("bfloat16", "bfloat16")):
        text = launch_commands(start(weight_dtype="int8", kv_dtype=kv))["ridgeline"]
        assert f"--quantization int8 --kv-cache-dtype {flag}" in text


def test_quantisation_commands_precede_the_server() -> None:
    download, make, serve = launch_commands(start(weight_dtype="int4"))["vllm"].splitlines()
    assert download == "hf download org/model --local-dir model"
    assert make.startswith("ridgeline quantize model ") and make.endswith(" -o model-int4")
    assert "--bits 4 " in make and serve.startswith("vllm serve model-int4 ")
    assert "--quantization" not in serve  # the checkpoint says it


def test_layouts() -> None:
    commands = launch_commands(start(layout=Layout(tp=2, pp=2)))
    assert commands["ridgeline"].startswith("# ")
    assert "--tensor-parallel-size 2 --pipeline-parallel-size 2" in commands["vllm"]
    assert "--tp_size 2 --pp_size 2" in commands["tensorrt-llm"]
    assert "--tp-size 2 --pp-size 2" in commands["sglang"]
    context = launch_commands(start(layout=Layout(tp=8, dcp=2)))
    assert "--tensor-parallel-size 8 --decode-context-parallel-size 2" in context.pop("vllm")
    assert all(text.startswith("# ") for text in context.values())
    coded = launch_commands(start(layout=Layout(tp=8, dcp=2), kv_dtype="float8_e4m3"))
    assert coded["vllm"].startswith("# vLLM is not known to divide")
    experts = start(layout=Layout(tp=2, ep=8))
    assert "--data-parallel-size 4" in launch_commands(experts)["vllm"]
    assert "--enable-dp-attention --dp-size 4" in launch_commands(experts)["sglang"]
    assert launch_commands(experts)["tensorrt-llm"].startswith("# ")


@pytest.mark.parametrize(
    ("device", "starts"),
    [
        ("h100-sxm", set(ENGINES)),
        ("mi300x", {"vllm", "sglang"}),
        ("apple-m1-max", set()),
    ],
)
def test_devices(device: str, starts: set[str]) -> None:
    commands = launch_commands(start(device))
    assert {name for name, text in commands.items() if not text.startswith("#")} == starts


def test_published_shapes_have_hub_names() -> None:
    assert hub_name("llama-3.1-70b") == "meta-llama/Llama-3.1-70B"
    assert hub_name("dummy:llama-1b-32k") is None  # not published
    assert hub_name("demo") is None


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3"])
def test_every_layout_that_a_plan_prices_can_be_started(model: str) -> None:
    layouts = list(enumerate_layouts(load_planning_spec(model), 16, longest=100_000))
    assert any(layout.dcp > 1 for layout in layouts) == (model != "llama-3.1-8b")
    for layout in layouts:
        commands = launch_commands(start(layout=layout))
        assert any(not text.startswith("#") for text in commands.values()), layout
