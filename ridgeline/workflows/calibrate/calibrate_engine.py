"""Calibrate the planning arithmetic to Ridgeline's own engine on this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import date
from functools import lru_cache, partial
from statistics import median

import msgspec

import ridgeline
from ridgeline.engine.config import resolve
from ridgeline.engine.device import choose_device
from ridgeline.errors import BadInput
from ridgeline.measure.monitors.process_usage import CpuContention
from ridgeline.modelspec.checkpoints.planning import load_planning_spec
from ridgeline.modelspec.cost import Shape
from ridgeline.plan.calibration.calibration import Calibration, MachineMemory, ReaderTimes
from ridgeline.plan.calibration.fit import (
    CalibrationInputs,
    FitSample,
    empty_calibration,
    fit_samples,
)
from ridgeline.plan.calibration.interference import InterferenceTrace, record_interference
from ridgeline.plan.step_time.replica import Replica, build_replica
from ridgeline.plan.step_time.simulated import reader_s
from ridgeline.records.progress import Caution, Message, Observer, silent
from ridgeline.workflows.calibrate.calibration_result import CalibrationResult
from ridgeline.workflows.calibrate.load_windows import (
    WINDOW_S,
    LoadWindow,
    measure_windows,
    median_wait_s,
)
from ridgeline.workflows.calibrate.machine_rates import MachineRates, MachineSpeed, rates_of
from ridgeline.workflows.calibrate.step_bench import open_step_bench
from ridgeline.workflows.calibrate.step_passes import (
    FORMATS,
    CalibrationRun,
    StepMeasurement,
    fastest_passes,
    measure_passes,
    pass_slowness,
    run_settings,
    step_kinds,
)

MAX_RUNS = 5
MIN_BUDGET_PER_WINDOW = 30
"""Seconds of the budget per second of one window under load: three of them add a tenth to it."""
MAX_TAKEN_SHARE = 0.15  # of the CPU time demanded: beyond it the steps are not this machine's


def calibrate_engine(
    runs: Sequence[CalibrationRun],
    budget_s: float,
    observer: Observer = silent,
    device: str = "cpu",
) -> CalibrationResult:
    """Measure steps of every run within the budget and fit the arithmetic to them.

    Raises UserError if there are too many runs, a model or a device is not here, a model does not
    fit, or the budget is too small.
    """
    if len(runs) > MAX_RUNS:
        raise BadInput(
            "too many runs", value=len(runs), limit=MAX_RUNS, fix="name fewer with --quantization"
        )
    rates = rates_of(str(choose_device(device, {})))
    memory = rates.memory()
    settings = [
        run_settings(run, device=device, available_bytes=memory.available_bytes) for run in runs
    ]
    resolved = [resolve(one) for one in settings]  # an error in the last must not cost the others
    started_s = time.perf_counter()
    rates.prepare()
    run_budget_s = (budget_s - (time.perf_counter() - started_s)) / len(runs)
    measurements: list[StepMeasurement] = []
    windows: list[LoadWindow] = []
    for number, run in enumerate(runs, 1):
        contention = CpuContention()
        with open_step_bench(settings[number - 1]) as bench:
            of_run = list(measure_passes(bench, run, run_budget_s, rates))
            num_kinds = sum(1 for _ in step_kinds(bench, run))
            if number == len(runs):
                window_s = min(WINDOW_S, budget_s / MIN_BUDGET_PER_WINDOW)
                windows = list(measure_windows(bench, run.model, run.quantization, window_s))
        measurements += of_run
        passes = len(of_run) / num_kinds
        elapsed_s = time.perf_counter() - started_s
        progress = f"{passes:.1f} passes over {num_kinds} kinds of steps, {elapsed_s:.0f} s so far"
        observer(Message(text=f"run {number}/{len(runs)}: {run}: {progress}"))
        _warn(observer, contention.taken_share(), passes)
    if not measurements:
        raise BadInput("nothing was measured within --budget", value=budget_s, fix="allow more")
    took_s, dense_dtype = time.perf_counter() - started_s, resolved[-1].dtype
    facts = calibration_facts(measurements, memory, took_s, dense_dtype, rates)
    return CalibrationResult(machine=fit_calibration(measurements, facts, windows))


def _warn(observer: Observer, taken_share: float | None, passes: float) -> None:
    if taken_share is not None and taken_share > MAX_TAKEN_SHARE:
        observer(
            Caution(
                text=f"other processes had {taken_share:.0%} of the CPU time that it demanded: "
                "calibrate again on an idle machine"
            )
        )
    if passes < 1:
        observer(Caution(text="the rest did not fit --budget: expect larger errors"))


def undisturbed_speed(measurements: Sequence[StepMeasurement]) -> MachineSpeed:
    """The machine without other processes: the best of the passes."""
    return MachineSpeed(
        max(measurement.speed.read_bytes_s for measurement in measurements),
        max(measurement.speed.ops_s for measurement in measurements),
    )


def calibration_facts(
    measurements: Sequence[StepMeasurement],
    memory: MachineMemory,
    took_s: float,
    dense_dtype: str,
    rates: MachineRates,
) -> CalibrationInputs:
    """What a calibration holds besides the fit. Measures the machine's rates now."""
    speed = undisturbed_speed(measurements)
    read_rates = rates.read_rates()
    read_rates[max(read_rates, key=int)] = speed.read_bytes_s
    runs = dict.fromkeys(
        str(CalibrationRun(model=measurement.model, quantization=measurement.quantization))
        for measurement in measurements
    )
    first_s, reading = request_overheads(fastest_passes(measurements))
    return CalibrationInputs(
        device="this-machine",
        as_of=date.today().isoformat(),
        source=f"ridgeline {ridgeline.__version__} calibrate on {rates.name}",
        took_s=took_s,
        runs=tuple(runs),
        device_kind=rates.kind,
        work_speed=rates.work_speed,
        peak_flops=rates.peak_flops(),
        kernel_ops_s=rates.kernel_ops_s(speed.ops_s),
        bandwidth_bytes_s=read_rates,
        memory=memory,
        dense_dtype=dense_dtype,
        first_s=first_s,
        reading=reading,
    )


def request_overheads(measurements: Sequence[StepMeasurement]) -> tuple[float, ReaderTimes]:
    """Seconds of a request besides its step, and what an event loop that reads its tokens costs.

    From the engine with the shortest steps: a millisecond shows there, while a long step varies by
    more than that. Zero if nothing was measured with streaming.
    """
    fastest = fastest_engine(measurements)
    own = [
        measurement
        for measurement in measurements
        if (measurement.model, measurement.quantization) == fastest
    ]
    seconds = {
        kind: [measurement.seconds for measurement in own if measurement.kind == kind]
        for kind in ("ttft", "streamed_ttft")
    }
    per_token_s = [
        (measurement.seconds - _plain_decode_s(measurement, own)) / measurement.num_sampled
        for measurement in own
        if measurement.kind == "streamed"
    ]
    first_s = median(seconds["ttft"]) if seconds["ttft"] else 0.0
    if not per_token_s or not seconds["streamed_ttft"]:
        return first_s, ReaderTimes(token_s=0.0, first_s=0.0)
    reading = ReaderTimes(
        token_s=max(0.0, median(per_token_s)), first_s=median(seconds["streamed_ttft"])
    )
    return first_s, reading


def fastest_engine(measurements: Sequence[StepMeasurement]) -> tuple[str, str | None]:
    """The (model, quantization) with the shortest decode step."""
    decodes = [measurement for measurement in measurements if measurement.kind == "decode"]
    fastest = min(decodes or measurements, key=lambda measurement: measurement.seconds)
    return fastest.model, fastest.quantization


def _plain_decode_s(streamed: StepMeasurement, own: Sequence[StepMeasurement]) -> float:
    """Seconds of the decode that differs from `streamed` only in how its tokens are read."""
    context = streamed.shapes[0][1]
    decodes = [
        (abs(measurement.shapes[0][1] - context), measurement.seconds)
        for measurement in own
        if measurement.kind == "decode" and measurement.num_sampled == streamed.num_sampled
    ]
    nearest = min(distance for distance, _ in decodes)
    return median(seconds for distance, seconds in decodes if distance == nearest)


def fit_calibration(
    measurements: Sequence[StepMeasurement],
    facts: CalibrationInputs,
    windows: Sequence[LoadWindow] = (),
) -> Calibration:
    """Fit to all measurements; with the interference recorded in the load windows."""
    unfitted = empty_calibration(facts, ("float32", "bfloat16", "float16", "int8", "int4"))
    replicas = lru_cache(maxsize=None)(partial(calibrated_replica, unfitted))
    samples = [
        FitSample(
            what=f"{measurement.model} {measurement.quantization or 'dense'}: "
            f"{_shapes_text(measurement.shapes)}",
            work=replicas(measurement.model, measurement.quantization).calibrated_work(
                measurement.shapes, measurement.num_sampled
            ),
            seconds=measurement.seconds,
            prompt=measurement.kind == "prefill",
        )
        for measurement in fastest_passes(measurements)
        if measurement.kind in ("prefill", "decode")
    ]
    calibration = fit_samples(samples, facts)
    overheads, wait_s = calibration.overheads, median_wait_s(windows)
    if wait_s is not None:
        overheads = msgspec.structs.replace(overheads, reader_first_s=wait_s)
    calibration = msgspec.structs.replace(calibration, overheads=overheads)
    interference = _interference(calibration, windows)
    if interference is not None:
        interference = msgspec.structs.replace(
            interference,
            pass_ratios=pass_slowness(measurements),
            decode_errors=_model_errors(calibration, samples, prompt=False),
            prompt_errors=_model_errors(calibration, samples, prompt=True),
        )
    return msgspec.structs.replace(calibration, interference=interference)


def _model_errors(
    calibration: Calibration, samples: Sequence[FitSample], *, prompt: bool
) -> tuple[float, ...]:
    """Measured over fitted seconds of the prefills among the samples, or of the decodes."""
    pairs = zip(samples, calibration.residuals, strict=True)
    return tuple(
        round(residual.measured_s / residual.fitted_s, 4)
        for sample, residual in pairs
        if sample.prompt == prompt
    )


def _interference(
    calibration: Calibration, windows: Sequence[LoadWindow]
) -> InterferenceTrace | None:
    """The interference in all windows, which are of one engine; None without windows."""
    if not windows:
        return None
    model = calibrated_replica(calibration, windows[0].model, windows[0].quantization)

    def fitted_s(shapes: Sequence[Shape], num_sampled: int) -> float:
        return model.price(shapes, num_sampled).seconds + reader_s(model, num_sampled)

    return record_interference([window.steps for window in windows], fitted_s)


def calibrated_replica(calibration: Calibration, model: str, quantization: str | None) -> Replica:
    """A model on the calibrated device."""
    weight_dtype = None if quantization is None else FORMATS[quantization]
    return build_replica(
        load_planning_spec(model), calibration.accelerator(), weight_dtype=weight_dtype
    )


def _shapes_text(shapes: Sequence[tuple[int, int]]) -> str:
    """`8 x 1 new after 69 cached` for eight decodes."""
    new, cached = shapes[len(shapes) // 2]
    return f"{len(shapes)} x {new} new after {cached} cached"
