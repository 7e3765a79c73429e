"""How wrong `ridgeline predict` is after a calibration: predicted and measured, at unseen points.

    python benchmarks/bench_predict.py measure --raw raw.jsonl     again while it exits with 3
    python benchmarks/bench_predict.py table --raw raw.jsonl --calibration here.json [--every]

`measure` works through the runs of a calibration and through the points, twice, and appends what
its results; finished parts are not measured again, so that a machine that is only free for minutes
at a time will do (`--seconds`, 480 by default). A piece in which others had more than 15 % of the
CPU time that it asked for is measured again (by the kernel's account, not by how long it took).
`table` fits the calibration to the calibration's runs alone, writes it where --calibration says,
and predicts every point from it.

Points are (model shape, weights, batch, context) that the calibration did not see: decode steps of
`batch` sequences behind `context` tokens (TPOT), prompts to an idle engine (TTFT), and what the
engine says its KV cache holds. Kinds of steps of the calibration and points alike are visited four
times, two by two and many minutes apart, and the fastest visit counts (each the median of its
steps): a neighbour on the host makes a step up to twice as long for a while and never shorter.
`--single` tells how far off points are by their first visit alone.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as `ridgeline` sets it

import msgspec
from raw_runs import NOT_DONE, append, flags, read, say

from ridgeline.config.settings import settings_from
from ridgeline.engine.config import resolve
from ridgeline.hardware import system
from ridgeline.measure.monitors.process_usage import CpuContention
from ridgeline.modelspec.checkpoints.planning import load_planning_spec
from ridgeline.plan.calibration.calibration import Calibration, MachineMemory
from ridgeline.plan.calibration.fit import CalibrationInputs
from ridgeline.plan.step_time.memory import MemoryLimits, memory_budget
from ridgeline.plan.step_time.operating_point import OperatingPoint
from ridgeline.plan.step_time.predict import predict_on
from ridgeline.workflows.calibrate.calibrate_engine import (
    calibrated_replica,
    calibration_facts,
    fit_calibration,
    request_overheads,
    undisturbed_speed,
)
from ridgeline.workflows.calibrate.calibration_result import CalibrationResult
from ridgeline.workflows.calibrate.load_windows import LoadWindow, measure_windows
from ridgeline.workflows.calibrate.machine_rates import RatesOfCpu
from ridgeline.workflows.calibrate.step_bench import StepBench, StepTiming, open_step_bench
from ridgeline.workflows.calibrate.step_passes import (
    CalibrationRun,
    PassTimer,
    StepMeasurement,
    calibration_runs,
    fastest_passes,
    measure_passes,
    median_of_repeats,
    run_settings,
)

CALIBRATED_WITH = calibration_runs(
    "dummy:qwen2.5-0.5b", "dense,int8", also=("dummy:llama-1b-32k=int4", "demo=int8")
)
RUN_S, MIN_S = 36.0, 42.0  # of a run's passes in one round; of a sitting, to begin another piece
CALM = 0.15  # of the CPU time asked for, that others may have had for a piece to be kept
ROUNDS, VISITS = 2, 2  # of a point, in each round
KV_BYTES = 3 << 29
KV_LENGTH = 4096  # for what the engine's cache holds by default

# (model, weights, decodes as (batch, context), prompts)
POINTS: tuple[tuple[str, str | None, tuple[tuple[int, int], ...], tuple[int, ...]], ...] = (
    ("demo", "int4", ((1, 100), (3, 700), (12, 64), (48, 256)), (48, 300, 1000)),
    ("demo", None, ((3, 200), (6, 1500), (24, 900), (48, 64)), (100, 700)),
    ("demo", "int8", ((1, 700), (6, 100), (12, 1200), (48, 500)), (40, 420)),
    ("dummy:smollm2-135m", None, ((1, 64), (3, 500), (12, 256), (48, 100)), (48, 300)),
    ("dummy:smollm2-135m", "int8", ((1, 1000), (6, 64), (24, 500), (64, 128)), (100, 700)),
    ("dummy:smollm2-135m", "bf16", ((1, 300), (12, 64)), (64,)),
    ("dummy:smollm2-360m", None, ((1, 200), (6, 700), (24, 64)), (100,)),
    ("dummy:smollm2-360m", "int8", ((1, 64), (3, 4000), (12, 300), (48, 64)), (48, 420)),
    ("dummy:qwen3-0.6b", None, ((1, 100), (12, 200)), (64,)),
    ("dummy:qwen3-0.6b", "int8", ((1, 500), (6, 64), (24, 256)), (48, 300)),
    ("dummy:qwen3-0.6b", "int4", ((1, 1500), (3, 300), (12, 64), (48, 100)), (100, 420)),
    ("dummy:gemma-3-1b", "int8", ((1, 100), (6, 1500)), (48,)),
    ("dummy:gemma-3-1b", "int4", ((1, 700), (12, 64)), (100,)),
    ("dummy:tinyllama-1.1b", "int8", ((1, 64), (6, 500), (24, 64)), (100,)),
    ("dummy:tinyllama-1.1b", "int4", ((1, 1000), (3, 64), (12, 300), (48, 64)), (48, 200)),
    ("dummy:llama-1b-32k", None, ((1, 64), (6, 100)), (32,)),
    ("dummy:llama-1b-32k", "int8", ((1, 2000), (12, 64)), (64,)),
    ("dummy:qwen2.5-1.5b", "int4", ((1, 64), (6, 1000), (24, 64)), (100, 300)),
    ("dummy:llama-3.2-1b", "int4", ((1, 300), (3, 3000), (12, 128)), (64,)),
    ("dummy:llama-3.2-1b", "int8", ((3, 64), (24, 100)), (48,)),
)


class Raw(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the file. `run`: of the calibration, or a point of `POINTS`."""

    round: int
    run: bool
    ran: StepMeasurement
    kv_tokens: int = 0
    memory: MachineMemory
    facts: CalibrationInputs | None = None  # of runs of the calibration
    loaded: tuple[LoadWindow, ...] = ()  # on the last line of the last run


# ---- measuring ---------------------------------------------------------------------------------


def measure(path: Path, seconds: float) -> bool:
    """Append what is missing while there is time; True when nothing is."""
    ends_s, all_kept = time.perf_counter() + seconds, True
    done = {(raw.round, raw.run, raw.ran.model, raw.ran.quantization) for raw in read(path, Raw)}
    for round_, is_run, run in pieces():
        if (round_, is_run, run.model, run.quantization) in done:
            continue
        if time.perf_counter() + MIN_S > ends_s:
            return False
        began_s, contention = time.perf_counter(), CpuContention()
        found = list((of_run if is_run else of_points)(run, round_))
        taken = contention.taken_share() or 0.0
        calm = taken <= CALM
        if calm:
            append(path, found)
        kind = "run" if is_run else "points"
        note = f", others had {taken:.0%} of the CPU" + ("" if calm else ": not kept")
        all_kept = all_kept and calm
        print(
            f"round {round_}, {kind} {run}: {time.perf_counter() - began_s:.0f} s{note}", flush=True
        )
    return all_kept


def pieces() -> Iterator[tuple[int, bool, CalibrationRun]]:
    """(round, whether of the calibration, what): everything once, then everything again."""
    for round_ in range(ROUNDS):
        for run in CALIBRATED_WITH:
            yield round_, True, run
        for model, name, _, _ in POINTS:
            yield round_, False, CalibrationRun(model=model, quantization=name)


def of_run(run: CalibrationRun, round_: int) -> Iterator[Raw]:
    """One run of the calibration; the last one under arrivals too."""
    found, settings = memory_now(), run_settings(run)
    dense_dtype = resolve(settings).dtype
    with open_step_bench(settings) as bench:
        measurements = list(measure_passes(bench, run, RUN_S, RatesOfCpu()))
        is_last = run == CALIBRATED_WITH[-1]
        loaded = tuple(measure_windows(bench, run.model, run.quantization)) if is_last else ()
    facts = calibration_facts(measurements, found, 0.0, dense_dtype, RatesOfCpu())
    for ran in measurements:
        raw = Raw(round=round_, run=True, ran=ran, memory=found, facts=facts)
        yield raw if ran is not measurements[-1] else msgspec.structs.replace(raw, loaded=loaded)


def of_points(run: CalibrationRun, round_: int) -> Iterator[Raw]:
    """The points of one model in one format."""
    decodes, prompts = next(p[2:] for p in POINTS if p[:2] == (run.model, run.quantization))
    found = memory_now()
    kv_tokens = default_kv_tokens(run)
    longest = max([context for _, context in decodes] + list(prompts)) + 64
    settings = msgspec.structs.replace(
        run_settings(run, kv_bytes=KV_BYTES), max_model_len=min(longest, 4200)
    )
    with open_step_bench(settings, seed=1) as bench:
        bench.prefill(16)
        for _ in range(VISITS):
            for ran in each_point(bench, run, decodes, prompts):
                yield Raw(round=round_, run=False, ran=ran, kv_tokens=kv_tokens, memory=found)


def each_point(
    bench: StepBench,
    run: CalibrationRun,
    decodes: tuple[tuple[int, int], ...],
    prompts: tuple[int, ...],
) -> Iterator[StepMeasurement]:
    """(batch, context) of decodes, (0, tokens) of prompts."""
    clock = PassTimer(run, RatesOfCpu())
    for shape in decodes:
        yield clock.measure("decode", shape, partial(bench.decode, *shape))
    for tokens in prompts:
        again = partial(median_of_repeats, partial(asking, bench, tokens))
        yield clock.measure("ttft", (0, tokens), again)


def asking(bench: StepBench, tokens: int) -> StepTiming:
    """From asking an idle engine to the answer's one token."""
    return StepTiming((), 0, bench.ttft_s(tokens))


def memory_now() -> MachineMemory:
    found = system.memory()
    return MachineMemory(total_bytes=found.total_bytes, available_bytes=found.available_bytes)


def default_kv_tokens(run: CalibrationRun) -> int:
    """What the engine would resolve to by itself."""
    fields = {"model": run.model, "quantization": run.quantization}
    limit = load_planning_spec(run.model).max_positions
    found = resolve(
        settings_from({"model": "demo", **fields, "max_model_len": min(KV_LENGTH, limit)})
    )
    return found.num_blocks * found.block_size


# ---- the table ---------------------------------------------------------------------------------


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One point: predicted over measured."""

    name: str
    metric: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def rows_of(raws: list[Raw], calibration: Calibration, single: bool) -> Iterator[Row]:
    """Every point against its prediction; one KV row per model and format."""
    reported: set[str] = set()
    counts = [raw for raw in raws if not raw.run]
    kept = (firsts if single else fastest_passes)([raw.ran for raw in counts])
    for raw in counts:
        ran = raw.ran
        if not any(ran is each for each in kept):
            continue
        name = f"{ran.model.removeprefix('dummy:')} {ran.quantization or 'fp32'}"
        if name not in reported:
            reported.add(name)
            machine = calibrated_replica(calibration, ran.model, ran.quantization)
            longest = min(KV_LENGTH, machine.spec.max_positions)
            asked = MemoryLimits(max_num_seqs=64, max_model_len=longest)
            tokens = memory_budget(machine, asked).kv_tokens
            yield Row(name=name, metric="kv", predicted=tokens, measured=raw.kv_tokens)
        yield Row(
            name=f"{name}, {where(raw)}",
            metric="tpot" if ran.kind == "decode" else "ttft",
            predicted=predicted_ms(calibration, raw),
            measured=1000 * ran.seconds,
        )


def firsts(ran: list[StepMeasurement]) -> list[StepMeasurement]:
    """Of each kind the first visit."""
    met: dict[tuple[object, ...], StepMeasurement] = {}
    for each in ran:
        met.setdefault((each.model, each.quantization, each.kind, each.requested), each)
    return list(met.values())


def where(raw: Raw) -> str:
    if raw.ran.kind == "decode":
        return f"{raw.ran.requested[0]} x {raw.ran.requested[1]}"
    return f"prompt of {raw.ran.requested[1]}"


def predicted_ms(calibration: Calibration, raw: Raw) -> float:
    """What `ridgeline predict` says."""
    machine = calibrated_replica(calibration, raw.ran.model, raw.ran.quantization)
    if raw.ran.kind == "decode":
        done = raw.ran.shapes[len(raw.ran.shapes) // 2][1]
        point = OperatingPoint(model="", device="", isl=done, osl=1, batch=len(raw.ran.shapes))
        return predict_on(machine, point, ROOMY).decode_ms
    point = OperatingPoint(model="", device="", isl=raw.ran.requested[1], osl=1)
    return predict_on(machine, point, ROOMY).ttft_ms


ROOMY = MemoryLimits(max_num_seqs=64, max_model_len=4200, kv_bytes=KV_BYTES)


def together(runs: list[Raw]) -> CalibrationInputs:
    """The facts of all runs: the best of the measurements."""
    each = [raw.facts for raw in runs if raw.facts is not None]
    sizes, kinds = each[0].bandwidth_bytes_s, each[0].peak_flops
    rates = {n: max(f.bandwidth_bytes_s[n] for f in each) for n in sizes}
    rates[max(rates, key=int)] = undisturbed_speed([raw.ran for raw in runs]).read_bytes_s
    first_s, reading = request_overheads(fastest_passes([raw.ran for raw in runs]))
    return msgspec.structs.replace(
        each[0],
        runs=tuple(dict.fromkeys(name for f in each for name in f.runs)),
        bandwidth_bytes_s=rates,
        peak_flops={kind: max(f.peak_flops[kind] for f in each) for kind in kinds},
        kernel_ops_s={
            name: max(f.kernel_ops_s[name] for f in each) for name in each[0].kernel_ops_s
        },
        first_s=first_s,
        reading=reading,
    )


LIMITS = {"tpot": 0.08, "ttft": 0.12, "kv": 0.03}
NAMES = {"tpot": "TPOT", "ttft": "TTFT, idle engine", "kv": "KV tokens"}


def summary(rows: list[Row]) -> Iterator[str]:
    """Markdown: quantiles of the errors by metric, then the worst points."""
    yield "| | points | median error | 90 % | worst | bias |"
    yield "|---|---|---|---|---|---|"
    for metric, limit in LIMITS.items():
        of = [row for row in rows if row.metric == metric]
        errors = sorted(abs(row.error) for row in of)
        middle = statistics.median(errors)
        yield (
            f"| {NAMES[metric]} | {len(of)} | {middle:.1%} (aim {limit:.0%}) "
            f"| {errors[int(0.9 * len(errors))]:.1%} | {errors[-1]:.1%} "
            f"| {statistics.median(row.error for row in of):+.1%} |"
        )
    yield ""
    yield "| worst | metric | predicted | measured | error |"
    yield "|---|---|---|---|---|"
    timed = [row for row in rows if row.metric != "kv"]
    for row in sorted(timed, key=lambda row: -abs(row.error))[:10]:
        yield line(row)


def line(row: Row) -> str:
    return (
        f"| {row.name} | {row.metric} | {row.predicted:.3g} ms | {row.measured:.3g} ms "
        f"| {row.error:+.1%} |"
    )


def table(
    raws: list[Raw], calibration_path: Path | None, every: bool, single: bool
) -> Iterator[str]:
    runs = [raw for raw in raws if raw.run]
    loaded = [window for raw in runs for window in raw.loaded]
    calibration = fit_calibration([raw.ran for raw in runs], together(runs), loaded)
    if calibration_path is not None:
        CalibrationResult(machine=calibration).save(calibration_path)
    rows = list(rows_of(raws, calibration, single))
    yield from summary(rows)
    yield ""
    misfit = statistics.median(abs(r.fitted_s / r.measured_s - 1) for r in calibration.residuals)
    num = len(calibration.residuals)
    yield f"Median misfit of the {num} kinds of steps that were calibrated with: {misfit:.1%}."
    if every:
        yield from ["", "| point | metric | predicted | measured | error |"]
        yield "|---|---|---|---|---|"
        yield from (line(row) for row in rows if row.metric != "kv")


def main() -> int:
    parser = flags(__doc__, "table")
    parser.add_argument("--every", action="store_true", help="print all points")
    parser.add_argument("--single", action="store_true", help="points by their first visit")
    given = parser.parse_args()
    if given.what == "measure":
        return 0 if measure(given.raw, given.seconds) else NOT_DONE
    return say(table(read(given.raw, Raw), given.calibration, given.every, given.single))


if __name__ == "__main__":
    sys.exit(main())
