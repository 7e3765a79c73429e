"""Calibrations: the fit finds a made-up device again, counts work as the engine does, and is read
and refused as it should be."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from ridgeline.cli.main import main
from ridgeline.config.settings import Settings, settings_from
from ridgeline.engine.config import resolve
from ridgeline.errors import BadInput, CannotRun
from ridgeline.hardware import measure, system
from ridgeline.hardware.measure import GpuRates
from ridgeline.modelspec.checkpoints.planning import load_planning_spec
from ridgeline.modelspec.cost import cost_model, resident_weight_bytes
from ridgeline.plan.calibration import fit as calibrate
from ridgeline.plan.calibration.calibration import (
    Calibration,
    MachineMemory,
    ProductTimes,
    ReaderTimes,
    load_calibration,
    overlapped,
)
from ridgeline.plan.calibration.fit import (
    CalibrationInputs,
    FitSample,
    empty_calibration,
    fit_samples,
    fitted_seconds,
)
from ridgeline.plan.calibration.interference import InterferenceTrace
from ridgeline.plan.step_time.memory import MemoryLimits, memory_budget
from ridgeline.plan.step_time.operating_point import OperatingPoint
from ridgeline.plan.step_time.parallel_layout import Layout
from ridgeline.plan.step_time.predict import predict
from ridgeline.plan.step_time.replica import Replica, build_replica
from ridgeline.plan.step_time.simulated import ModelledStepTimes
from ridgeline.workflows.calibrate import calibrate_engine
from ridgeline.workflows.calibrate.calibrate_engine import request_overheads
from ridgeline.workflows.calibrate.machine_rates import MachineSpeed, rates_of
from ridgeline.workflows.calibrate.step_passes import (
    DECODES,
    CalibrationRun,
    StepMeasurement,
    calibration_runs,
    pass_slowness,
    run_settings,
    step_kinds,
)

MIB = 1 << 20
RATES = {1: 120e9, 16: 90e9, 32: 40e9, 64: 30e9, 512: 25e9}
FACTS = CalibrationInputs(
    device="this-machine",
    as_of="2026-11-21",
    source="a test",
    took_s=1.0,
    runs=("made up",),
    peak_flops={"float32": 2e11, "int8": 4e11},
    bandwidth_bytes_s={str(size * MIB): rate for size, rate in RATES.items()},
    memory=MachineMemory(total_bytes=16 << 30, available_bytes=12 << 30),
    dense_dtype="float32",
    first_s=1e-3,
)
FORMATS = ("float32", "bfloat16", "int8", "int4")


def curve(row_s: float, start_s: float, layer_s: float, output_s: float) -> ProductTimes:
    """Seconds per weight that rise with the square root of the rows at first, then with them."""
    rows = calibrate.KNOTS
    above = tuple(start_s * math.sqrt(row) + 0.3 * row_s * row for row in rows)
    return ProductTimes(
        rows=rows,
        weight_s=above,
        row_s=row_s,
        bandwidth=0.8,
        layer_s=layer_s,
        output_s=output_s,
    )


def made_up() -> Calibration:
    empty = empty_calibration(FACTS, FORMATS)
    linears = {
        "float32": curve(6e-12, 2e-11, 4e-4, 3e-10),
        "bfloat16": curve(6e-12, 3e-11, 2e-5, 3e-9),
        "int8": curve(3e-12, 1e-11, 2e-5, 3e-9),
        "int4": curve(3e-12, 1.5e-11, 2e-5, 3e-9),
    }
    overheads = msgspec.structs.replace(
        empty.overheads,
        step_s=3e-4,
        run_s=2e-5,
        run_layer_s=4e-7,
        logit_s=1e-10,
        first_s=1e-3,
        begun_s=4e-4,
    )
    attention = msgspec.structs.replace(
        empty.attention, decode_flop_s=2e-11, decode_byte_s=9e-11, prompt_flop_s=1e-11
    )
    return msgspec.structs.replace(
        empty, linears=linears, overheads=overheads, attention=attention, overlap=4.0
    )


def machine(calibration: Calibration, model: str, dtype: str | None) -> Replica:
    return build_replica(load_planning_spec(model), calibration.accelerator(), weight_dtype=dtype)


def sample_points(truth: Calibration, noise: float = 0.0) -> list[FitSample]:
    """What `ridgeline calibrate` runs: three formats of a large model, two of a small one."""
    rng = np.random.default_rng(0)
    runs = [("qwen2.5-0.5b", name) for name in (None, "int8", "int4")]
    found = []
    for model, dtype in (*runs, ("demo", None), ("demo", "int8")):
        here = machine(truth, model, dtype)
        decodes = [[(1, 32)] * b for b in (1, 2, 4, 8, 16, 32, 64)]
        decodes += [[(1, 1500)], [(1, 1000)] * 8, [(1, 500)] * 32]
        prompts = [[(2**n, 0)] for n in range(1, 10)] + [[(256, 1024)], [(64, 1024)]]
        for shapes in (*decodes, *prompts):
            work = here.calibrated_work(shapes, len(shapes))
            took_s = fitted_seconds(truth, work) * float(np.exp(noise * rng.standard_normal()))
            prompt = shapes[0][0] > 1
            found.append(FitSample(what=str(shapes[0]), work=work, seconds=took_s, prompt=prompt))
    return found


@pytest.fixture(scope="module")
def found() -> Calibration:
    return fit_samples(sample_points(made_up(), noise=0.03), FACTS)


@pytest.mark.slow
def test_fit_predicts_unseen_models(found: Calibration) -> None:
    truth, errors = made_up(), []
    for model in ("smollm2-360m", "qwen3-0.6b", "tinyllama-1.1b", "llama-3.2-1b"):
        for dtype in (None, "int8", "int4"):
            for batch, context in ((1, 100), (6, 700), (24, 64), (48, 300)):
                cases = [
                    machine(each, model, dtype).uniform(batch, 1, context, sampled=batch).seconds
                    for each in (truth, found)
                ]
                errors.append(abs(cases[1] / cases[0] - 1))
    assert np.median(errors) < 0.04 and max(errors) < 0.2


GPU = msgspec.structs.replace(
    FACTS,
    device_kind="gpu",
    work_speed=200.0,
    bandwidth_bytes_s={str(1 << 30): 4e12},
    peak_flops={"float32": 5e13, "bfloat16": 7e14, "int8": 1.4e15},
    memory=MachineMemory(total_bytes=140 << 30, available_bytes=139 << 30),
    dense_dtype="bfloat16",
)


def made_up_gpu() -> Calibration:
    """The made-up machine, two hundred times as fast at everything but what the host does."""
    truth, empty = made_up(), empty_calibration(GPU, FORMATS)
    linears = {
        name: msgspec.structs.replace(
            linear,
            weight_s=tuple(each / 200 for each in linear.weight_s),
            row_s=linear.row_s / 200,
            output_s=linear.output_s / 200,
            layer_s=1e-5,
        )
        for name, linear in truth.linears.items()
    }
    attention = msgspec.structs.replace(
        truth.attention, decode_flop_s=1e-13, decode_byte_s=4.5e-13, prompt_flop_s=5e-14
    )
    overheads = msgspec.structs.replace(
        truth.overheads, run_s=1e-6, run_layer_s=1e-9, logit_s=5e-13
    )
    return msgspec.structs.replace(
        empty, linears=linears, overheads=overheads, attention=attention, overlap=4.0
    )


@pytest.mark.slow
def test_fit_predicts_unseen_models_on_a_gpu() -> None:
    truth = made_up_gpu()
    found, errors = fit_samples(sample_points(truth, noise=0.03), GPU), []
    for model in ("smollm2-360m", "tinyllama-1.1b", "llama-3.2-1b"):
        for dtype in (None, "int8", "int4"):
            for batch, context in ((1, 100), (6, 700), (48, 300)):
                cases = [
                    machine(each, model, dtype).uniform(batch, 1, context, sampled=batch).seconds
                    for each in (truth, found)
                ]
                errors.append(abs(cases[1] / cases[0] - 1))
    assert np.median(errors) < 0.05 and max(errors) < 0.25
    assert found.attention.decode_byte_s == pytest.approx(4.5e-13, rel=0.5)
    device = found.accelerator()
    assert (device.kind, device.vendor) == ("gpu", "NVIDIA")


def test_calibrated_gpu_has_the_cache_that_the_engine_would_choose_there() -> None:
    on_gpu, on_cpu = (
        memory_budget(machine(each, "llama-3.2-1b", None))
        for each in (
            made_up_gpu(),
            msgspec.structs.replace(made_up_gpu(), device_kind="cpu"),
        )
    )
    assert on_gpu.kv_bytes > 100 << 30 > on_cpu.kv_bytes > 0


def test_rates_of_a_gpu_are_those_of_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A calibration on a card compared its steps with the bandwidth and memory of the CPU."""
    measured = []

    def measure_card(device: str) -> GpuRates:
        measured.append(device)
        return GpuRates(1 << 30, 4e12, {"float32": 5e13, "bfloat16": 7e14, "int8": 1.4e15})

    monkeypatch.setattr(measure, "gpu_rates", measure_card)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (139 << 30, 140 << 30))
    rates = rates_of("cuda:1")
    assert (rates.name, rates.kind, rates.work_speed) == ("NVIDIA H200", "gpu", 200.0)
    assert rates.memory() == MachineMemory(total_bytes=140 << 30, available_bytes=139 << 30)
    assert rates.speed() == MachineSpeed(4e12, 5e13) and rates.read_rates() == {"1073741824": 4e12}
    assert rates.kernel_ops_s(1.0) == {
        "float32": 5e13,
        "bfloat16": 7e14,
        "int8": 1.4e15,
        "int4": 7e14,
    }
    assert measured == ["cuda:1"]
    assert rates_of("cpu").kind == "cpu"


class Card:
    """The rates of a made-up card of 16 GiB, which runs on the CPU."""

    name, kind, work_speed = "a card", "gpu", 200.0

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def memory(self) -> MachineMemory:
        return MachineMemory(total_bytes=16 << 30, available_bytes=16 << 30)

    def prepare(self) -> None:
        self._events.append("measured")


def test_calibration_of_a_card_plans_with_its_memory_and_measures_it_while_it_is_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cache was sized from the host's memory and then refused on the card, and the rates were
    measured within what the engine had left.
    """
    events: list[str] = []
    sizes: list[int | None] = []

    def check_size(settings: Settings) -> SimpleNamespace:
        sizes.append(settings.kv_cache_memory_bytes)
        return SimpleNamespace(device="cuda", dtype="bfloat16")

    def open_bench(settings: Settings) -> None:
        events.append("opened")
        raise CannotRun("seen enough")

    host = system.SystemMemory(total_bytes=1 << 40, available_bytes=1 << 40)
    monkeypatch.setattr(system, "memory", lambda: host)
    monkeypatch.setattr(calibrate_engine, "choose_device", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(calibrate_engine, "rates_of", lambda _: Card(events))
    monkeypatch.setattr(calibrate_engine, "resolve", check_size)
    monkeypatch.setattr(calibrate_engine, "open_step_bench", open_bench)
    runs = [CalibrationRun(model="dummy:llama-3.1-8b", quantization=None)]
    with pytest.raises(CannotRun, match="seen enough"):
        calibrate_engine.calibrate_engine(runs, 60.0, device="cuda")
    assert sizes == [4 << 30]  # a quarter of the card
    assert events == ["measured", "opened"]


def test_rates_of_a_gpu_are_measured_within_half_of_its_free_memory() -> None:
    assert measure.gpu_probe_sizes(139 << 30) == (1 << 30, 8192)
    for free in (512 << 20, 700 << 20, 1 << 30, 3 << 30, 5 << 30):
        copy_bytes, size = measure.gpu_probe_sizes(free)
        assert 2 * copy_bytes <= free // 2 and 4 * 4 * size**2 <= free // 2
        assert copy_bytes >= 128 * MIB and size >= 4096
    with pytest.raises(CannotRun, match=r"too little memory.*'500 MiB'; limit: at least 512 MiB"):
        measure.gpu_probe_sizes(500 << 20)


def test_gpu_that_fills_up_while_it_is_measured_is_an_error_of_the_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2 << 30, 16 << 30))
    monkeypatch.setattr(measure, "_gpu_copy", full)
    with pytest.raises(CannotRun, match="too little memory is free on the GPU"):
        measure.gpu_rates("cuda")
    assert len(emptied) == 2  # before and after


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--engine", "demo", "--device", "mps"], "Metal"),
        (["--engine", "demo", "--device", "h100-sxm"], "--accelerator"),
        (["--url", "http://127.0.0.1:9", "--device", "cpu"], "--device"),
    ],
)
def test_device_of_a_calibration_is_checked_first(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", *words]) == 2
    assert message in capsys.readouterr().err


def test_admission_cost_does_not_affect_later_steps(found: Calibration) -> None:
    assert found.overheads.begun_s == pytest.approx(4e-4, rel=0.3)
    begins, goes_on = (machine(found, "demo", "int8").calibrated_work([(8, n)], 1) for n in (0, 64))
    assert (begins.num_begun, goes_on.num_begun) == (1, 0)
    decodes = machine(found, "demo", "int8").calibrated_work([(1, 7), (16, 0), (1, 9), (16, 0)], 4)
    assert decodes.num_begun == 2
    free = msgspec.structs.replace(
        found, overheads=msgspec.structs.replace(found.overheads, begun_s=0.0)
    )
    predicted_s = [machine(each, "demo", "int8").uniform(3, 16, 0, sampled=3).seconds for each in
              (found, free)]  # fmt: skip
    assert predicted_s[0] - predicted_s[1] == pytest.approx(3 * found.overheads.begun_s)


def test_runs_are_named_and_those_of_the_model_come_last() -> None:
    def run(model: str, quantization: str | None) -> CalibrationRun:
        return CalibrationRun(model=model, quantization=quantization)

    small = (run("demo", None), run("demo", "int8"))
    assert calibration_runs("m", None) == (
        *small,
        *(run("m", name) for name in (None, "int8", "int4")),
    )
    assert calibration_runs("m", "int8, dense", ["n=int4", "demo=bf16"]) == (
        run("demo", "int8"), run("n", "int4"), run("demo", "bf16"), run("m", "int8"), run("m", None)
    )  # fmt: skip
    assert calibration_runs("demo", None) == (*small, run("demo", "int4"))
    for also, words in ((["n"], "MODEL=FORMAT"), (["n=int3"], "unknown weight format")):
        with pytest.raises(BadInput, match=words):
            calibration_runs("m", None, also)


@pytest.mark.parametrize("budget", ["0", "-1", "nan", "inf"])
def test_budget_too_small_is_rejected(budget: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--engine", "demo", "--budget", budget]) == 2
    assert "--budget" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["demo", "dummy:qwen2.5-0.5b", "dummy:tinyllama-1.1b"])
def test_every_measured_decode_fits_the_cache(model: str) -> None:
    """Half a GB would not do for the last."""
    settings = run_settings(CalibrationRun(model=model, quantization="int8"))
    resolved = resolve(settings)
    for batch, context in DECODES:
        if context + 64 <= resolved.max_model_len:
            assert batch * (context + 64) <= resolved.num_blocks * resolved.block_size


def test_decodes_beyond_the_cache_are_left_out() -> None:
    run = CalibrationRun(model="m", quantization=None)

    def asked(num_blocks: int) -> list[tuple[int, int]]:
        info = SimpleNamespace(kv_tokens=num_blocks * 16)
        bench = SimpleNamespace(
            engine=SimpleNamespace(info=info), decode=None, prefill=lambda *shape: None
        )
        bench.decode = bench.prefill
        return [shape for kind, shape, _ in step_kinds(bench, run) if kind == "decode"]

    assert asked(10_000) == list(DECODES)
    few = asked(600)
    assert few and (32, 512) not in few and (64, 32) not in few
    assert all(batch * context < 600 * 16 for batch, context in few)


@pytest.mark.slow
def test_fitted_products_are_not_faster_than_the_instruction_peak() -> None:
    """Where a step could as well be products or outputs, the arithmetic's peak decides."""
    truth, peak = made_up(), 5e11
    inputs = msgspec.structs.replace(FACTS, kernel_ops_s={"int4": peak})
    samples = sample_points(truth, noise=0.3)
    free, held = (
        fit_samples(samples, FACTS).linears["int4"],
        fit_samples(samples, inputs).linears["int4"],
    )
    assert free.row_s == 0.0 and held.row_s == pytest.approx(0.95 * 2 / peak)
    assert all(held.seconds_per_weight(rows) >= 0.95 * 2 / peak * rows for rows in (1, 64, 512))


def test_fit_reproduces_its_samples_and_reports_errors(found: Calibration) -> None:
    errors = [abs(r.fitted_s / r.measured_s - 1) for r in found.residuals]
    assert np.median(errors) < 0.05
    assert (found.tpot_error, found.ttft_error) == (0.08, 0.12)  # no less than at unseen points


def test_fit_and_prediction_compute_equal_times() -> None:
    samples = sample_points(made_up())[:40]
    searched = calibrate._Fit(samples, FACTS, 2.0)
    total_s = searched._times(searched.x)[0]
    priced = [fitted_seconds(searched.calibration(), sample.work) for sample in samples]
    assert total_s == pytest.approx(priced, rel=1e-9)


def test_jacobian_matches_numeric_derivatives() -> None:
    searched = calibrate._Fit(sample_points(made_up())[:40], FACTS, 3.0)
    x = searched.x + 0.1 * np.random.default_rng(1).standard_normal(len(searched.x))
    exact = searched._jacobian(x)
    for i in range(len(x)):
        step = np.zeros(len(x))
        step[i] = 1e-6
        numeric = (searched._residuals(x + step) - searched._residuals(x - step)) / 2e-6
        assert numeric == pytest.approx(exact[:, i], abs=1e-5)


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("model", ["demo", "dummy:qwen2.5-0.5b", "dummy:tinyllama-1.1b"])
def test_weight_bytes_equal_those_of_the_engine(model: str, quantization: str | None) -> None:
    resolved = resolve(settings_from({"model": model, "quantization": quantization}))
    here = machine(made_up(), model, quantization)
    # the demo's rows are no multiple of a group: sizing counts a part of a group as a part
    rel = 0.02 if (model, quantization) == ("demo", "int4") else 1e-9
    assert here.resident_bytes == pytest.approx(resident_weight_bytes(resolved.spec), rel=rel)
    decode = here.price([(1, 99)] * 3, 3)
    work = cost_model(resolved.spec).step([(1, 99)] * 3, 3)
    assert decode.bytes == pytest.approx(work.bytes, rel=rel)
    assert decode.flops == pytest.approx(work.flops, rel=1e-9)


def test_kv_budget_equals_that_of_the_engine() -> None:
    resolved = resolve(settings_from({"model": "demo", "kv_cache_memory_bytes": 1 << 26}))
    asked = MemoryLimits(max_num_seqs=64, kv_bytes=1 << 26)
    fits = memory_budget(machine(made_up(), "demo", None), asked)
    assert fits.kv_tokens == resolved.num_blocks * resolved.block_size
    none = memory_budget(machine(made_up(), "demo", None), MemoryLimits(kv_bytes=1 << 10))
    assert none.kv_tokens == 0


def test_quiet_steps_follow_the_linear_model() -> None:
    here = machine(made_up(), "qwen2.5-0.5b", "int8")
    computed = [100, 900, 40]
    glide = ModelledStepTimes(here).linear_steps(computed, 5)
    assert glide is not None
    for j in range(5):
        step_s = here.price([(1, done + j) for done in computed], 3).seconds
        assert glide.first_s + j * glide.more_s == pytest.approx(step_s, rel=1e-6)


def test_overlap_of_two_times() -> None:
    assert overlapped(3.0, 4.0, 2.0) == pytest.approx(5.0) and overlapped(0.0, 0.0, 2.0) == 0.0
    assert overlapped(1.0, 100.0, 10.0) == pytest.approx(100.0)


def test_uncalibrated_formats_and_layouts_are_rejected(found: Calibration) -> None:
    with pytest.raises(CannotRun, match=r"mxfp4"):
        machine(found, "demo", "mxfp4")
    device = msgspec.structs.replace(found.accelerator(), link_bytes_s=1e9)
    with pytest.raises(CannotRun, match="covers one device"):
        build_replica(load_planning_spec("demo"), device, Layout(tp=2))
    with pytest.raises(BadInput, match="too few steps"):
        fit_samples(sample_points(made_up())[:5], FACTS)


def test_calibration_file_round_trip_and_damage(
    found: Calibration, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "calibration.json"
    path.write_bytes(msgspec.json.encode(found))
    assert load_calibration(path) == found
    words = [
        "predict",
        "demo",
        "--calibration",
        str(path),
        "--input-len",
        "100",
        "--output-len",
        "50",
    ]
    assert main([*words, "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    point = OperatingPoint(model="demo", device="this-machine", isl=100, osl=50)
    expected = predict(point, {"this-machine": found.accelerator()})
    assert output["tpot_ms"] == pytest.approx(expected.tpot_ms)
    good = json.loads(path.read_text())
    curves = {name: {**each, "rows": each["rows"][::-1]} for name, each in good["linears"].items()}
    path.write_text("{}")
    assert main(words) == 2
    assert "calibration" in capsys.readouterr().err
    for damage in (
        {"version": 0},
        {"bandwidth_bytes_s": {"all": 1e9}},
        {"bandwidth_bytes_s": {}},
        {"overlap": 0},
        {"linears": curves},
        {"interference": {"bin_s": 0.1, "decode": [1.0], "prompt": [1.0], "pass_ratios": [-0.5]}},
        {"interference": {"bin_s": 0.1, "decode": [], "prompt": [1.0]}},
        {"overheads": None},
    ):
        path.write_text(json.dumps(good | damage))
        assert main(words) == 2
        assert "calibration" in capsys.readouterr().err


@pytest.mark.slow
def test_single_simulation_uses_the_median_level_and_seeds_vary_it(
    found: Calibration, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def tpot_s(trace: InterferenceTrace | None, *words: str) -> dict[str, dict[str, float]]:
        path = tmp_path / "calibration.json"
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(found, interference=trace)))
        load = [
            "--request-rate",
            "2",
            "--num-prompts",
            "30",
            "--input-len",
            "50",
            "--output-len",
            "20",
        ]
        asked = ["simulate", "demo", "--calibration", str(path), "--json", *load, *words]
        assert main(asked) == 0
        return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]

    calm = InterferenceTrace(
        bin_s=0.05, decode=(1.0,) * 40, prompt=(1.0,) * 40, pass_ratios=(0.25, 4.0)
    )
    plain = tpot_s(None)["tpot"]["p50"]
    assert tpot_s(calm)["tpot"]["p50"] == pytest.approx(plain)
    drawn = tpot_s(calm, "--num-seeds", "12")["figures"]["tpot_p50_s"]
    assert drawn["low"] < 0.5 * plain and drawn["high"] > 2 * plain  # type: ignore[index]


def test_streaming_cost_comes_from_the_engine_with_the_shortest_steps() -> None:
    """Streamed against blocking decodes, per token; the long steps of a large model hide it."""
    speed = MachineSpeed(1e10, 1e11)

    def ran(kind: str, model: str, batch: int, seconds: float) -> StepMeasurement:
        shapes = ((1, 40),) * batch
        return StepMeasurement(
            model=model, quantization=None, kind=kind, requested=(batch, 40), shapes=shapes,
            num_sampled=batch, seconds=seconds, speed=speed,
        )  # fmt: skip

    first_s, found = request_overheads(
        [
            *(ran("decode", "small", n, 1e-3 + 1e-4 * n) for n in (1, 8)),
            *(ran("streamed", "small", n, 1e-3 + 1.6e-4 * n) for n in (1, 8)),
            ran("decode", "large", 8, 0.100),
            ran("streamed", "large", 8, 0.150),
            ran("ttft", "large", 0, 2e-2),
            ran("streamed_ttft", "large", 0, 3e-2),
            ran("ttft", "huge", 0, 4e-2),
            ran("streamed_ttft", "huge", 0, 5e-2),
            ran("ttft", "small", 0, 1e-3),
            ran("streamed_ttft", "small", 0, 3e-3),
        ]
    )
    assert found.token_s == pytest.approx(6e-5) and found.first_s == 3e-3
    assert first_s == 1e-3
    alone = request_overheads([ran("decode", "small", 1, 1e-3), ran("ttft", "small", 0, 2e-3)])
    assert alone == (2e-3, ReaderTimes(token_s=0.0, first_s=0.0))


def test_slowness_compares_passes_over_the_same_steps() -> None:
    """Passes over the middle one; kinds measured once, and passes of few kinds, do not count."""
    speed = MachineSpeed(1e10, 1e11)

    def ran(kind: str, batch: int, seconds: float) -> StepMeasurement:
        return StepMeasurement(
            model="m", quantization=None, kind=kind, requested=(batch, 40),
            shapes=((1, 40),) * batch,
            num_sampled=batch, seconds=seconds, speed=speed,
        )  # fmt: skip

    costs = {1: 1e-3, 2: 3e-3, 4: 4e-3, 8: 9e-3, 16: 1e-2}
    slow = (1.0, 1.25, 0.8)
    decodes = [ran("decode", n, cost * each) for each in slow for n, cost in costs.items()]
    assert sorted(pass_slowness(decodes)) == pytest.approx(sorted(slow), rel=1e-3)
    burst = [*decodes, ran("decode", 1, 5e-3)]  # a fourth visit of one kind is no pass
    assert pass_slowness(burst) == pass_slowness(decodes)
    prompts = [ran("prefill", n, cost * each) for each in (2.0, 2.0) for n, cost in costs.items()]
    assert len(pass_slowness([*decodes, *prompts])) == 5
    assert pass_slowness([ran("ttft", n, 1.0) for n in costs] * 2) == ()
    assert pass_slowness(decodes[:5]) == ()


def test_reader_cost_is_added_in_simulations_only() -> None:
    plain = made_up()
    over = msgspec.structs.replace(plain.overheads, reader_s=5e-5, reader_first_s=2e-3)
    read = msgspec.structs.replace(plain, overheads=over)
    one, other = (machine(each, "dummy:qwen2.5-0.5b", "int8") for each in (plain, read))
    shapes = ((1, 100),) * 8
    assert one.price(shapes, 8) == other.price(shapes, 8)
    predicted_s = [ModelledStepTimes(each).step_s(shapes, 8) for each in (one, other)]
    assert predicted_s[1] - predicted_s[0] == pytest.approx(8 * 5e-5)
    glides = [ModelledStepTimes(each).linear_steps([100] * 8, 4) for each in (one, other)]
    assert glides[0] is not None and glides[1] is not None
    assert glides[1].first_s - glides[0].first_s == pytest.approx(8 * 5e-5)
