"""`predict` against sums by hand, its monotonicity, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.cli.main import main
from ridgeline.errors import BadInput, CannotRun, DoesNotFit
from ridgeline.hardware.catalogue import find_accelerator
from ridgeline.modelspec.checkpoints.planning import load_planning_spec
from ridgeline.modelspec.cost.parameters import num_kv_heads
from ridgeline.modelspec.cost.serving_formats import parse_weight_dtype
from ridgeline.plan.calibration.published_efficiency import (
    Efficiency,
    backends,
    efficiency_of,
    interval,
)
from ridgeline.plan.step_time.memory import MemoryLimits, memory_budget
from ridgeline.plan.step_time.operating_point import OperatingPoint, Pool
from ridgeline.plan.step_time.parallel_layout import Layout
from ridgeline.plan.step_time.predict import predict, predict_lines, predict_on, time_point
from ridgeline.plan.step_time.replica import build_replica
from ridgeline.plan.step_time.speculation import SpeculationModel

IDEAL = Efficiency(
    bandwidth=1.0,
    compute=1.0,
    expert_bandwidth=1.0,
    expert_compute=1.0,
    kv_bandwidth=1.0,
    latent_compute=1.0,
    prompt_compute=1.0,
    link=1.0,
    step_s=0.0,
    layer_s=0.0,
    run_s=0.0,
    collective_s=0.0,
    tpot_error=0.1,
    ttft_error=0.1,
    source="a test",
    as_of="2026-11",
)


def point(**fields: object) -> OperatingPoint:
    base = {"model": "llama-3.1-8b", "device": "h100-sxm", "isl": 1000, "osl": 100}
    return OperatingPoint(**{**base, **fields})  # type: ignore[arg-type]


def test_prediction_by_hand_without_losses() -> None:
    machine = build_replica(
        load_planning_spec("llama-3.1-8b"), find_accelerator("h100-sxm"), efficiency=IDEAL
    )
    found = predict_on(machine, point())
    weights = 2 * (8_030_261_248 - 128_256 * 4096)  # the embedding table is not read
    decode_s = (weights + 131_072 * (1050 + 2)) / 3.35e12
    assert found.decode_ms == pytest.approx(1000 * decode_s, rel=1e-6)
    assert found.tpot_ms == found.decode_ms and found.mbu == pytest.approx(1.0)
    linears = 8_030_261_248 - 2 * 128_256 * 4096 - 266_240
    flops = 2 * linears * 1000 + 4 * 32 * 4096 * 1000 * 1001 / 2
    head_s = 2 * 128_256 * 4096 / 3.35e12  # one sampled position reads the whole LM head
    assert found.ttft_ms == pytest.approx(1000 * (flops / 989e12 + head_s), rel=1e-6)
    assert found.bound == "bandwidth" and found.prefill_bound == "compute"
    total_s = (found.ttft_ms + 99 * found.tpot_ms) / 1000
    assert found.output_tok_s == pytest.approx(100 / total_s)


def test_kv_is_replicated_with_more_devices_than_kv_heads() -> None:
    spec, device = load_planning_spec("qwen2.5-7b"), find_accelerator("h100-sxm")
    assert num_kv_heads(spec) == 4
    four, seven = (build_replica(spec, device, Layout(tp=tp)) for tp in (4, 7))
    assert memory_budget(four).kv_copies == 1 and memory_budget(seven).kv_copies == 7 / 4
    assert memory_budget(seven).kv_bytes_per_token == memory_budget(four).kv_bytes_per_token
    latent = load_planning_spec("deepseek-v3")
    eight = memory_budget(
        build_replica(
            latent, find_accelerator("h200-sxm"), Layout(tp=8), weight_dtype="float8_e4m3"
        )
    )
    assert eight.kv_copies == 8 and eight.kv_bytes_per_token == 70_272
    wide = Layout(tp=1, ep=8)  # each device attends for its own sequences: no copies
    spread = memory_budget(
        build_replica(latent, find_accelerator("h200-sxm"), wide, weight_dtype="float8_e4m3")
    )
    assert spread.kv_copies == 1 and spread.kv_tokens > 4 * eight.kv_tokens


def test_windows_bound_kv_reads_and_storage() -> None:
    machine = build_replica(load_planning_spec("gemma-3-27b"), find_accelerator("h100-sxm"))
    grown = machine.cost.kv_bytes(65_536) - machine.cost.kv_bytes(32_768)
    full = sum(g.kv_bytes_per_token for g in machine.cost.windows if g.window is None)
    assert grown == full * 32_768


@pytest.mark.slow
@given(
    batch=st.integers(1, 64),
    isl=st.integers(1, 4000),
    osl=st.integers(1, 1000),
    tp=st.sampled_from([1, 2, 4, 8]),
)
def test_latency_is_monotonic_in_load_and_bits(batch: int, isl: int, osl: int, tp: int) -> None:
    here = predict(point(batch=batch, isl=isl, osl=osl, tp=tp))
    assert here.tpot_ms <= predict(point(batch=batch + 1, isl=isl, osl=osl, tp=tp)).tpot_ms
    assert here.ttft_ms <= predict(point(batch=batch, isl=isl + 50, osl=osl, tp=tp)).ttft_ms
    eight = predict(point(batch=batch, isl=isl, osl=osl, tp=tp, weight_dtype="fp8", kv_dtype="fp8"))
    assert eight.tpot_ms <= here.tpot_ms and eight.kv_tokens_max > here.kv_tokens_max
    assert 0 < here.mbu <= 1 and 0 < here.mfu <= 1
    low, high = here.interval["tpot_ms"]
    assert low < here.tpot_ms < high


@pytest.mark.slow
@given(
    model=st.sampled_from(["llama-3.2-1b", "llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v2-lite"]),
    layout=st.sampled_from([Layout(), Layout(tp=2), Layout(pp=2), Layout(tp=2, pp=4)]),
    batch=st.integers(1, 256),
    isl=st.integers(1, 8000),
    osl=st.integers(1, 400) | st.integers(1, 8),
    tokens=st.sampled_from([256, 1024, 8192]),
)
def test_no_prediction_beats_the_roofline(
    model: str, layout: Layout, batch: int, isl: int, osl: int, tokens: int
) -> None:
    """What is predicted, summed up as work per second of one device, stays below its peaks."""
    device = find_accelerator("h100-sxm")
    machine = build_replica(load_planning_spec(model), device, layout, efficiency=IDEAL)
    asked = point(isl=isl, osl=osl, batch=batch, max_num_batched_tokens=tokens)
    found = time_point(machine, asked)
    requests = found.output_tok_s / osl / layout.pp  # per second, as passes of one stage's share
    prompt = machine.uniform(1, isl, 0, sampled=1)
    token = machine.uniform(1, 1, isl + osl // 2, sampled=1)
    flops = requests * (prompt.flops + (osl - 1) * token.flops)
    rounds = min(layout.pp, batch)  # micro-batches, each of which reads the weights for itself
    moved = found.output_tok_s / batch * rounds / layout.pp * machine.shared_bytes
    moved += requests * (osl - 1) * token.kv_bytes
    assert flops <= 1.01 * machine.peaks.flops_s
    assert moved <= 1.01 * device.bandwidth_bytes_s


def test_interval_covers_80_percent() -> None:
    """Half of log-normal errors lie within the median error; the interval is 1.9 times as wide."""
    low, high = interval(1.0, 0.22)
    assert high == pytest.approx(1.22 ** (1.2816 / 0.6745)) and low == pytest.approx(1 / high)


def test_uniform_runs_cost_the_same_as_their_list() -> None:
    for model in ("deepseek-v3", "gpt-oss-20b", "mixtral-8x7b"):
        machine = build_replica(load_planning_spec(model), find_accelerator("b200"), Layout(tp=8))
        for new, done in ((1, 500), (64, 130)):
            listed = machine.price([(new, done)] * 7, 7)
            assert machine.uniform(7, new, done, sampled=7).seconds == pytest.approx(listed.seconds)


def test_ring_communication_by_hand() -> None:
    machine = build_replica(
        load_planning_spec("llama-3.1-70b"),
        find_accelerator("h100-sxm"),
        Layout(tp=4),
        efficiency=IDEAL,
    )
    moved = 80 * 2 * 2 * 3 / 4 * (32 * 8192 * 2)  # layers, all-reduces, ring, activations
    assert machine.uniform(32, 1, 0, sampled=32).communication_s == pytest.approx(moved / 450e9)


def test_impossible_points_are_rejected_with_the_limit() -> None:
    with pytest.raises(DoesNotFit, match="141"):
        predict(point(model="llama-3.1-70b"))
    with pytest.raises(CannotRun, match="heads"):
        predict(point(tp=3))
    with pytest.raises(CannotRun, match="no experts"):
        predict(point(ep=2))
    with pytest.raises(CannotRun, match="link"):
        predict(point(device="a10g", tp=2))
    with pytest.raises(BadInput, match="context"):
        predict(point(isl=131_072))
    with pytest.raises(BadInput, match="h100-sxm"):
        predict(point(device="h100-sxn"))
    with pytest.raises(BadInput, match="weight dtype"):
        predict(point(weight_dtype="int3"))
    with pytest.raises(BadInput, match="cached"):
        predict(point(cached=1000))
    with pytest.raises(BadInput, match="draft tokens per step"):
        SpeculationModel(num_tokens=10**9, acceptance=0.5)
    with pytest.raises(BadInput, match="source"):
        Efficiency(**{**{f: getattr(IDEAL, f) for f in IDEAL.__struct_fields__}, "source": ""})


def test_activations_and_runtime_reduce_the_kv_cache() -> None:
    machine = build_replica(load_planning_spec("llama-3.1-8b"), find_accelerator("h100-sxm"))
    little, much = (
        memory_budget(machine, MemoryLimits(max_num_batched_tokens=tokens))
        for tokens in (512, 8192)
    )
    assert little.kv_tokens > much.kv_tokens
    rows = dict(much.rows())
    assert rows["KV cache"] == pytest.approx(
        rows["usable"] - rows["weights"] - rows["activations"] - rows["runtime"]
    )


def test_json_lines_in_and_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = tmp_path / "in.jsonl"
    good = {"id": "a", "model": "llama-3.1-8b", "device": "h100-sxm", "tp": 1, "pp": 1, "batch": 8}
    good |= {"isl": 512, "osl": 64, "weight_dtype": "fp8", "kv_dtype": "fp8"}
    asked.write_text(json.dumps(good) + "\n\n" + '{"model": "x"}\n')
    assert main(["predict", "--input", str(asked)]) == 2
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    wanted = {
        "ttft_ms",
        "tpot_ms",
        "output_tok_s",
        "kv_tokens_max",
        "bound",
        "mbu",
        "mfu",
        "interval",
    }
    assert wanted <= set(first) and first["id"] == "a"
    assert "error" in second
    assert json.loads(json.dumps(next(iter(predict_lines([json.dumps(good)]))))) == first


def test_command_prints_one_point(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "llama-3.1-8b", "--accelerator", "h100-sxm", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bound"] == "bandwidth"
    assert main(["predict", "llama-3.1-8b", "--accelerator", "h100-sxm"]) == 0
    assert "bound by bandwidth" in capsys.readouterr().out
    assert main(["predict", "--list-models"]) == 0
    assert "deepseek-v3" in capsys.readouterr().out
    assert main(["predict", "llama-3.1-8b"]) == 2


def test_custom_catalogue_with_sparse_rates_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.toml"
    row = (
        '[[accelerator]]\nname = "mine"\nvendor = "us"\nkind = "gpu"\nmemory_gb = 80\n'
        "bandwidth_tb_s = 2.0\ndense_tflops = { bfloat16 = 500 }\n"
        'source = "bench"\nas_of = "2026-11"\n'
    )
    own.write_text(row)
    asked = ["predict", "llama-3.1-8b", "--accelerator", "mine", "--catalogue", str(own), "--json"]
    assert main(asked) == 0
    own.write_text(row + "sparse = true\n")
    assert main(asked) == 2
    assert "sparsity" in capsys.readouterr().err


# Measured TPOT in ms, from the silicon data of ai-dynamo/aiconfigurator (Apache-2.0).
MEASURED = [
    (
        {
            "model": "llama-3.1-8b",
            "isl": 1024,
            "osl": 512,
            "batch": 8,
            "tp": 4,
            "backend": "trtllm",
        },
        3.29,
    ),
    (
        {
            "model": "qwen3-32b",
            "isl": 1024,
            "osl": 256,
            "batch": 32,
            "tp": 4,
            "backend": "trtllm",
            "weight_dtype": "fp8",
        },
        12.47,
    ),
    (
        {
            "model": "gpt-oss-120b",
            "device": "b200",
            "isl": 1024,
            "osl": 8192,
            "batch": 8,
            "tp": 2,
            "moe_tp": 2,
            "backend": "vllm",
            "weight_dtype": "mxfp4",
        },
        3.67,
    ),
    (
        {
            "model": "llama-3.1-70b",
            "device": "b200",
            "isl": 1024,
            "osl": 8192,
            "batch": 16,
            "tp": 2,
            "backend": "trtllm",
            "weight_dtype": "nvfp4",
        },
        10.04,
    ),
]


@pytest.mark.parametrize(("fields", "tpot_ms"), MEASURED)
def test_published_tpot_lies_in_the_interval(fields: dict[str, object], tpot_ms: float) -> None:
    low, high = predict(point(**fields)).interval["tpot_ms"]
    assert low <= tpot_ms <= high


def test_backends_differ_in_overhead_and_none_is_their_mean() -> None:
    by_name = {name: predict(point(backend=name)).tpot_ms for name in backends()}
    assert len(set(by_name.values())) == 3
    assert min(by_name.values()) < predict(point()).tpot_ms < max(by_name.values())
    with pytest.raises(BadInput, match="unknown backend"):
        predict(point(backend="tgi"))


def test_attention_groups_divide_sequences_and_share_experts() -> None:
    base = {"model": "qwen3-235b-a22b", "batch": 256, "weight_dtype": "fp8"}
    alone = predict(point(**base, tp=8, ep=8))
    grouped = predict(point(**base, tp=2, attention_dp=4, ep=8))
    split = predict(point(**base, tp=2, moe_tp=4, ep=2))
    assert grouped.kv_tokens_max > 0 and split.kv_tokens_max > 0
    assert grouped.decode_ms != alone.decode_ms
    spec, device = load_planning_spec("qwen3-235b-a22b"), find_accelerator("h100-sxm")
    whole, wide = (
        build_replica(spec, device, layout)
        for layout in (Layout(tp=8, ep=8), Layout(tp=2, dp=4, ep=8))
    )
    assert whole.expert_bytes == wide.expert_bytes
    assert wide.shared_bytes == 4 * whole.shared_bytes


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"moe_tp": 3, "ep": 2, "tp": 4}, "different numbers of devices"),
        ({"moe_tp": 2, "ep": 1, "tp": 4, "attention_dp": 2}, "different numbers of devices"),
        ({"attention_dp": 0}, "must be positive"),
    ],
)
def test_layouts_of_unlike_device_counts_are_refused(fields: dict[str, int], match: str) -> None:
    with pytest.raises(BadInput, match=match):
        predict(point(model="qwen3-30b-a3b", **fields))


def test_dense_model_has_no_attention_groups() -> None:
    with pytest.raises(CannotRun, match="no experts to share"):
        predict(point(attention_dp=2))
    assert predict(point(tp=4, moe_tp=1)).tpot_ms == predict(point(tp=4)).tpot_ms


def test_disaggregated_answers_see_no_prompts() -> None:
    base = {"isl": 4000, "osl": 500, "batch": 64, "backend": "sglang"}
    mixed = predict(point(**base, tp=4))
    pools = predict(point(**base, prefill=Pool(tp=4, workers=2), decode=Pool(tp=4)))
    assert pools.tpot_ms < mixed.tpot_ms
    fewer = predict(point(**base, prefill=Pool(tp=4, workers=2), decode=Pool(tp=4, workers=4)))
    assert fewer.tpot_ms < pools.tpot_ms and fewer.ttft_ms == pools.ttft_ms
    with pytest.raises(BadInput, match="both pools"):
        predict(point(**base, decode=Pool(tp=4)))


def test_ttft_of_a_closed_loop_grows_with_its_clients() -> None:
    one, many = predict(point(batch=1)), predict(point(batch=64))
    assert many.ttft_ms - many.prompt_ms > one.ttft_ms - one.prompt_ms > 0


@given(
    model=st.sampled_from(["llama-3.1-8b", "deepseek-v3", "gpt-oss-120b", "gemma-3-27b"]),
    weights=st.sampled_from([None, "fp8", "fp8-block", "nvfp4", "mxfp4"]),
    device=st.sampled_from(["h100-sxm", "b200"]),
    batch=st.integers(1, 512),
    backend=st.sampled_from([None, "vllm", "sglang", "trtllm"]),
)
def test_no_decode_step_beats_the_roofline(
    model: str, weights: str | None, device: str, batch: int, backend: str | None
) -> None:
    machine = build_replica(
        load_planning_spec(model),
        find_accelerator(device),
        Layout(tp=8),
        weight_dtype=None if weights is None else parse_weight_dtype(weights),
        backend=backend,
    )
    step = machine.uniform(batch, 1, 2000, sampled=batch)
    assert step.bytes / step.seconds <= machine.device.bandwidth_bytes_s
    assert step.flops / step.seconds <= max(machine.device.peak_flops.values())


@pytest.mark.parametrize("device", ["gb200", "b300", "gb300"])
def test_devices_of_one_generation_have_one_host(device: str) -> None:
    for backend in backends():
        efficiency = efficiency_of(find_accelerator(device), backend)
        assert efficiency.step_s == efficiency_of(find_accelerator("b200"), backend).step_s


def test_a_sequence_with_windows_takes_fewer_tokens_of_kv_than_it_has() -> None:
    """So that a prompt longer than the whole cache of all layers is served."""
    asked = {"model": "gemma-3-27b", "device": "h100-sxm", "batch": 1, "isl": 60_000, "osl": 256}
    short = asked | {"model": "qwen3-4b", "isl": 30_000}
    windows, full = predict_lines([json.dumps(asked), json.dumps(short)])
    assert windows["kv_tokens_each"] < windows["kv_tokens_max"] < 60_256
    assert full["kv_tokens_each"] == 30_256
