"""The measurements of a calibration: short passes over the kinds of steps that an engine runs.

A run is one model in one weight format. Measurements are kept raw (`StepMeasurement`), so that runs
made at different times can be fitted together, as `benchmarks/bench_predict.py` does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import fmean, median
from typing import Literal

import msgspec

from ridgeline.config.settings import Settings, settings_from
from ridgeline.errors import BadInput
from ridgeline.hardware import system
from ridgeline.modelspec.checkpoints.planning import load_planning_spec
from ridgeline.modelspec.cost import kv_bytes_per_token
from ridgeline.workflows.calibrate.machine_rates import MachineRates, MachineSpeed
from ridgeline.workflows.calibrate.step_bench import StepBench, StepTiming

PREFILLS = (2, 4, 8, 16, 32, 64, 128, 256, 512)  # prompt tokens
DEEP_PREFILLS = ((256, 1024), (64, 1024))  # (new tokens, cached tokens)
DECODES = (
    *((1, 32), (8, 32), (1, 1536), (64, 32), (8, 1024)),
    *((2, 32), (32, 32), (4, 32), (16, 32), (32, 512)),
)  # (batch, context)
STREAMED = ((1, 32), (8, 32), (64, 32))  # of the decodes, with the small model only
MAX_PASSES = 4  # over all kinds, if there is time
MIN_KINDS_PER_PASS = 4  # to tell how fast the machine was in a pass
MAX_MODEL_LEN = 2048
SHORT_REPEATS, SHORT_S = 9, 0.03  # repetitions of steps shorter than this
REPEATS, LONG_S = 3, 0.3  # repetitions of other steps; longer ones run once
SMALL_MODEL = "demo"  # fits into a cache and shows the overheads that a large model hides
MAX_OUTPUT_TOKENS = 128  # of a measured decode
MAX_KV_SHARE = 0.25  # of the free memory
FORMATS = {"int8": "int8", "int4": "int4", "bf16": "bfloat16"}
"""Weight format → its name in the planning arithmetic."""

StepKind = Literal["prefill", "decode", "streamed", "ttft", "streamed_ttft"]


class StepMeasurement(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of step of one engine in one pass; `seconds` is a median.

    `kind`: prefill, decode, or streamed (a decode whose tokens an event loop reads). ttft is what a
    request costs besides its step, as a step without runs; streamed_ttft the same with an event
    loop. `requested`: the wanted shape, the same in every pass. `speed`: the machine's before the
    pass.
    """

    model: str
    quantization: str | None
    kind: StepKind
    requested: tuple[int, int]
    shapes: tuple[tuple[int, int], ...]
    num_sampled: int
    seconds: float
    speed: MachineSpeed


class CalibrationRun(msgspec.Struct, frozen=True, kw_only=True):
    """A model in a weight format (None: as the engine stores it)."""

    model: str
    quantization: str | None

    def __str__(self) -> str:
        return f"{self.model} {self.quantization or 'dense'}"


def calibration_runs(
    model: str, formats: str | None, also: Sequence[str] = ()
) -> tuple[CalibrationRun, ...]:
    """The runs of a calibration with `model` in `formats` (dense, int8, int4, bf16).

    A small model for the overheads comes first, then what `also` names as MODEL=FORMAT, then the
    model itself; the last one also runs under load.
    """
    names = [name.strip() for name in (formats or "dense,int8,int4").split(",")]
    runs = [calibration_run(model, name) for name in names]
    small = []
    if model != SMALL_MODEL:
        small.append(CalibrationRun(model=SMALL_MODEL, quantization=runs[0].quantization))
        if formats is None:
            small.append(CalibrationRun(model=SMALL_MODEL, quantization="int8"))
    return tuple(dict.fromkeys((*small, *map(_named_run, also), *runs)))


def calibration_run(model: str, format_name: str) -> CalibrationRun:
    """The model in a format by its name."""
    if format_name not in ("dense", *FORMATS):
        raise BadInput(
            "unknown weight format", value=format_name, limit=", ".join(("dense", *FORMATS))
        )
    quantization = None if format_name == "dense" else format_name
    return CalibrationRun(model=model, quantization=quantization)


def _named_run(text: str) -> CalibrationRun:
    model, separator, format_name = text.rpartition("=")
    if not separator:
        raise BadInput("--also needs MODEL=FORMAT", value=text, limit="e.g. demo=int8")
    return calibration_run(model, format_name)


def run_settings(
    run: CalibrationRun,
    kv_bytes: int | None = None,
    *,
    device: str = "cpu",
    available_bytes: int | None = None,
) -> Settings:
    """Settings with a KV cache for every measured context, within a share of the free memory.

    `kv_bytes` overrides the size of the cache. `available_bytes`: of the device's memory (None:
    of this machine's).
    """
    spec = load_planning_spec(run.model)
    token_bytes = kv_bytes_per_token(msgspec.structs.replace(spec, kv_dtype="float32"))
    needed = token_bytes * max(batch * (context + MAX_OUTPUT_TOKENS) for batch, context in DECODES)
    if available_bytes is None:
        available_bytes = system.memory().available_bytes
    available = int(MAX_KV_SHARE * available_bytes)
    return settings_from(
        {
            "model": run.model,
            "device": device,
            "quantization": run.quantization,
            "kv_cache_memory_bytes": kv_bytes or max(1 << 29, min(needed, available)),
            "max_model_len": min(MAX_MODEL_LEN, spec.max_positions),
        }
    )


TimedKind = tuple[StepKind, tuple[int, int], Callable[[], StepTiming]]


class PassTimer:
    """Times kinds of steps in one pass, after measuring the machine's speed."""

    def __init__(self, run: CalibrationRun, rates: MachineRates) -> None:
        self._run, self._speed = run, rates.speed()

    def measure(
        self, kind: StepKind, requested: tuple[int, int], time_steps: Callable[[], StepTiming]
    ) -> StepMeasurement:
        timing = time_steps()
        return StepMeasurement(
            model=self._run.model,
            quantization=self._run.quantization,
            kind=kind,
            requested=requested,
            shapes=timing.shapes,
            num_sampled=timing.num_sampled,
            seconds=timing.seconds,
            speed=self._speed,
        )


def step_kinds(bench: StepBench, run: CalibrationRun) -> Iterator[TimedKind]:
    """The kinds of one pass, the most informative first.

    The cost of reading a stream shows where steps are short, so only the small model measures it.
    Decodes that the KV cache is too small for are left out.
    """
    kv_tokens = bench.engine.info.kv_tokens
    decodes = [shape for shape in DECODES if shape[0] * (shape[1] + MAX_OUTPUT_TOKENS) <= kv_tokens]
    yield "ttft", (0, 0), lambda: _request_overhead(bench, bench.ttft_s)
    if run.model == SMALL_MODEL:
        yield "streamed_ttft", (0, 0), lambda: _request_overhead(bench, bench.streamed_ttft_s)
    for shape in decodes[:5]:
        yield "decode", shape, partial(bench.decode, *shape)
        if run.model == SMALL_MODEL and shape in STREAMED:
            yield "streamed", shape, partial(bench.streamed_decode, *shape)
    for shape in (*((n, 0) for n in PREFILLS), *DEEP_PREFILLS):
        yield "prefill", shape, partial(median_of_repeats, partial(bench.prefill, *shape))
    for shape in decodes[5:]:
        yield "decode", shape, partial(bench.decode, *shape)


def measure_passes(
    bench: StepBench, run: CalibrationRun, budget_s: float, rates: MachineRates
) -> Iterator[StepMeasurement]:
    """As many passes over all kinds as fit the budget, but at most `MAX_PASSES`."""
    end_s = time.perf_counter() + budget_s
    for _ in range(MAX_PASSES):
        if time.perf_counter() >= end_s:
            return
        timer = PassTimer(run, rates)
        for kind, requested, time_steps in step_kinds(bench, run):
            if time.perf_counter() < end_s:
                yield timer.measure(kind, requested, time_steps)


def fastest_passes(measurements: Sequence[StepMeasurement]) -> list[StepMeasurement]:
    """The fastest pass of each kind.

    Another process on the second thread of a core makes steps up to twice as long for seconds at a
    time, and never shorter: the median of the passes depends on luck, the minimum is the machine.
    """
    best: dict[tuple[object, ...], StepMeasurement] = {}
    for measurement in measurements:
        key = (measurement.model, measurement.quantization, measurement.kind, measurement.requested)
        if key not in best or measurement.seconds < best[key].seconds:
            best[key] = measurement
    return list(best.values())


def pass_slowness(measurements: Sequence[StepMeasurement]) -> tuple[float, ...]:
    """How slow each pass of each run was, relative to the geometric mean of all passes.

    The median over a pass's kinds; () if no run has two passes. Decodes and prefills of a run count
    as separate passes: they are measured some seconds apart.
    """
    visits: dict[tuple[object, ...], list[float]] = {}
    for measurement in measurements:
        if measurement.kind in ("prefill", "decode"):
            key = (
                measurement.model,
                measurement.quantization,
                measurement.kind,
                measurement.requested,
            )
            visits.setdefault(key, []).append(measurement.seconds)
    passes: dict[tuple[object, ...], list[float]] = {}
    for kind, seconds in visits.items():
        for i, step_s in enumerate(seconds if len(seconds) > 1 else ()):
            passes.setdefault((*kind[:3], i), []).append(step_s / min(seconds))
    slow = [median(ratios) for ratios in passes.values() if len(ratios) >= MIN_KINDS_PER_PASS]
    if not slow:
        return ()
    middle = math.exp(fmean(map(math.log, slow)))
    return tuple(round(ratio / middle, 4) for ratio in slow)


def median_of_repeats(time_step: Callable[[], StepTiming]) -> StepTiming:
    """The median of several repetitions; long steps run once, since another pass follows."""
    timings = [time_step()]
    if timings[0].seconds > LONG_S:
        return timings[0]
    repeats = SHORT_REPEATS if timings[0].seconds < SHORT_S else REPEATS
    while len(timings) < repeats:
        timings.append(time_step())
    return sorted(timings, key=lambda timing: timing.seconds)[len(timings) // 2]


def _request_overhead(bench: StepBench, ttft_s: Callable[[int], float]) -> StepTiming:
    """What a request costs besides its step."""
    bench.prefill(16)  # includes one-time setup
    request_s = median(ttft_s(16) for _ in range(5))
    step_s = median(bench.prefill(16).seconds for _ in range(5))
    return StepTiming((), 0, max(0.0, request_s - step_s))
