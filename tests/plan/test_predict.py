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
from ridgeline.plan.calibration.published_efficiency import Efficiency, interval
from ridgeline.plan.step_time.memory import MemoryLimits, memory_budget
from ridgeline.plan.step_time.parallel_layout import Layout
from ridgeline.plan.step_time.predict import (
    OperatingPoint,
    predict,
    predict_lines,
    predict_on,
    time_point,
)
from ridgeline.plan.step_time.replica import build_replica
from ridgeline.plan.step_time.speculation import SpeculationModel

IDEAL = Efficiency(
    bandwidth=1.0,
    compute=1.0,
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
    flops = 2 * linears * 1000 + 4 * 32 * 4096 * 1000 * 1001 / 2 + 2 * 128_256 * 4096
    assert found.ttft_ms == pytest.approx(1000 * flops / 989e12, rel=1e-6)
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
        predict(point(device="l4", tp=2))
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
    assert main(["predict", "llama-3.1-8b", "--device", "h100-sxm", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bound"] == "bandwidth"
    assert main(["predict", "llama-3.1-8b", "--device", "h100-sxm"]) == 0
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
    asked = ["predict", "llama-3.1-8b", "--device", "mine", "--catalogue", str(own), "--json"]
    assert main(asked) == 0
    own.write_text(row + "sparse = true\n")
    assert main(asked) == 2
    assert "sparsity" in capsys.readouterr().err
