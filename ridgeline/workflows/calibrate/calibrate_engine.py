"""`ridgeline calibrate`: the fit to short runs of Ridgeline's engine on this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import date
from functools import lru_cache, partial
from pathlib import Path
from statistics import median

import msgspec
from rich.console import Console
from rich.table import Table

import ridgeline
from ridgeline.engine.config import resolve
from ridgeline.errors import BadInput
from ridgeline.hardware import measure, system
from ridgeline.measure.monitors.process_usage import Witness
from ridgeline.modelspec.checkpoints.planning import load_planning_spec
from ridgeline.modelspec.cost import Shape
from ridgeline.plan.calibration.calibration import Calibration, Memory, Reading
from ridgeline.plan.calibration.fit import Facts, Sample, blank, fit
from ridgeline.plan.calibration.interference import Weather, recorded
from ridgeline.plan.step_time.replica import Replica, replica
from ridgeline.plan.step_time.simulated import reading_s
from ridgeline.report.files import write_file
from ridgeline.report.json_line import json_line
from ridgeline.workflows.calibrate.step_bench import rig
from ridgeline.workflows.calibrate.step_passes import (
    FORMATS,
    Ran,
    Run,
    Speed,
    kinds_of,
    measure_run,
    moods,
    num_threads,
    quietest,
    settings_of,
)
from ridgeline.workflows.calibrate.load_windows import Loaded, middle_wait_s, windows

BANDWIDTH_BYTES = tuple(size << 20 for size in (1, 4, 8, 16, 24, 32, 48, 64, 128, 512))
MOST_RUNS = 5
TAKEN = 0.15  # of the CPU time asked for: where others had more, steps are not this machine's
MULTIPLIED_AS = {"float32": "float32", "bfloat16": "bf16", "int8": "int16", "int4": "int4"}


def undisturbed(ran: Sequence[Ran]) -> Speed:
    """What the machine does when nobody else is at it: the best of the passes, as of the steps."""
    return Speed(
        max(each.speed.read_bytes_s for each in ran), max(each.speed.ops_s for each in ran)
    )


def read_rates() -> dict[str, float]:
    """Read bandwidth by working set; never rising with it: what seems so was disturbed."""
    found = {n: measure.read_bandwidth(n, num_threads()).per_s for n in BANDWIDTH_BYTES}
    rates: dict[str, float] = {}
    best = 0.0
    for size in sorted(found, reverse=True):
        best = max(best, found[size])
        rates[str(size)] = best
    return rates


def kernel_ops(float32_ops_s: float) -> dict[str, float]:
    """Operations/s of what the kernel of each weight format multiplies with, in registers; a format
    whose instructions cannot be timed on this CPU is absent.

    Each is timed beside float32 and told as that multiple of `float32_ops_s`, so that a neighbour's
    burst takes no part in it.
    """
    module = measure.native()

    def rate(kind: str) -> float:
        return float(
            median(rate for rate, _ in module.multiply_rates(kind, num_threads(), 3, 0.02))
        )

    known = measure.kinds_of(sorted(set(MULTIPLIED_AS.values())))
    found = {}
    for name, kind in MULTIPLIED_AS.items():
        if module.linear_isa("auto") == "avxvnni" and kind.startswith("int"):
            continue  # its vpdpbusd has no timing loop
        if kind in known:
            times = median(rate(kind) / rate("float32") for _ in range(5))
            found[name] = float32_ops_s * times
    return found


def facts(ran: Sequence[Ran], memory: Memory, took_s: float, dense_dtype: str) -> Facts:
    """What a calibration tells beside the fit; rates are measured now."""
    rates = read_rates()
    rates[max(rates, key=int)] = undisturbed(ran).read_bytes_s
    peaks = measure.multiply_peaks(num_threads())
    runs = dict.fromkeys(str(Run(model=r.model, quantization=r.quantization)) for r in ran)
    first_s, read = waiting(quietest(ran))
    return Facts(
        device="this-machine",
        as_of=date.today().isoformat(),
        source=f"ridgeline {ridgeline.__version__} calibrate on {system.cpu_model()}",
        took_s=took_s,
        runs=tuple(runs),
        peak_flops={kind: rate.per_s for kind, rate in peaks.items()},
        kernel_ops_s=kernel_ops(undisturbed(ran).ops_s),
        bandwidth_bytes_s=rates,
        memory=memory,
        dense_dtype=dense_dtype,
        first_s=first_s,
        reading=read,
    )


def waiting(ran: Sequence[Ran]) -> tuple[float, Reading]:
    """Seconds between asking and the first token besides its step, read at the end; and what an
    event loop that reads costs. Both by the engine with the shortest steps: there a millisecond
    shows, while a long step is not the same twice by more than that.

    Zero where nothing was measured streaming.
    """
    quick = quickest(ran)
    own = [each for each in ran if (each.model, each.quantization) == quick]
    seconds = {kind: [e.seconds for e in own if e.kind == kind] for kind in ("ttft", "asked")}
    more = [
        (each.seconds - _plain_s(each, own)) / each.num_sampled
        for each in own
        if each.kind == "streamed"
    ]
    first_s = median(seconds["ttft"]) if seconds["ttft"] else 0.0
    if not more or not seconds["asked"]:
        return first_s, Reading(token_s=0.0, first_s=0.0)
    return first_s, Reading(token_s=max(0.0, median(more)), first_s=median(seconds["asked"]))


def quickest(ran: Sequence[Ran]) -> tuple[str, str | None]:
    """The (model, quantization) with the shortest decode step."""
    decodes = [each for each in ran if each.kind == "decode"]
    found = min(decodes or ran, key=lambda each: each.seconds)
    return found.model, found.quantization


def _plain_s(streamed: Ran, own: Sequence[Ran]) -> float:
    """Seconds of the decode that differs from `streamed` in how it is read alone."""
    depth = streamed.shapes[0][1]
    plain = [
        (abs(each.shapes[0][1] - depth), each.seconds)
        for each in own
        if each.kind == "decode" and each.num_sampled == streamed.num_sampled
    ]
    nearest = min(far for far, _ in plain)
    return median(seconds for far, seconds in plain if far == nearest)


def calibrated(ran: Sequence[Ran], told: Facts, loaded: Sequence[Loaded] = ()) -> Calibration:
    """The fit to everything that was run, and the weather of what ran under arrivals."""
    counting = blank(told, ("float32", "bfloat16", "float16", "int8", "int4"))
    machines = lru_cache(maxsize=None)(partial(machine_for, counting))
    samples = [
        Sample(
            what=f"{each.model} {each.quantization or 'dense'}: {words(each.shapes)}",
            work=machines(each.model, each.quantization).calibrated_work(
                each.shapes, each.num_sampled
            ),
            seconds=each.seconds,
            prompt=each.kind == "first",
        )
        for each in quietest(ran)
        if each.kind in ("first", "decode")
    ]
    found = fit(samples, told)
    over, wait_s = found.overheads, middle_wait_s(loaded)
    if wait_s is not None:
        over = msgspec.structs.replace(over, reader_first_s=wait_s)
    found = msgspec.structs.replace(found, overheads=over)
    weather = _weather(found, loaded)
    if weather is not None:
        weather = msgspec.structs.replace(
            weather,
            moods=moods(ran),
            decode_misfits=_misfits(found, samples, prompt=False),
            prompt_misfits=_misfits(found, samples, prompt=True),
        )
    return msgspec.structs.replace(found, weather=weather)


def _misfits(found: Calibration, samples: Sequence[Sample], *, prompt: bool) -> tuple[float, ...]:
    """Measured over fitted seconds of the prompts among the samples, or of the decodes."""
    pairs = zip(samples, found.residuals, strict=True)
    return tuple(
        round(residual.measured_s / residual.fitted_s, 4)
        for sample, residual in pairs
        if sample.prompt == prompt
    )


def _weather(found: Calibration, loaded: Sequence[Loaded]) -> Weather | None:
    """Of all windows, which are of one engine."""
    if not loaded:
        return None
    machine = machine_for(found, loaded[0].model, loaded[0].quantization)

    def fitted_s(shapes: Sequence[Shape], num_sampled: int) -> float:
        return machine.price(shapes, num_sampled).seconds + reading_s(machine, num_sampled)

    return recorded([each.steps for each in loaded], fitted_s)


def machine_for(calibration: Calibration, model: str, quantization: str | None) -> Replica:
    """A model of the engine on the calibrated device."""
    chosen = None if quantization is None else FORMATS[quantization]
    return replica(
        load_planning_spec(model),
        calibration.accelerator(),
        weight_dtype=chosen,
    )


def words(shapes: Sequence[tuple[int, int]]) -> str:
    """`8 x 1 new behind 69` for eight decodes."""
    new, done = shapes[len(shapes) // 2]
    return f"{len(shapes)} x {new} new behind {done}"


# ---- the command -------------------------------------------------------------------------------


def command(runs: Sequence[Run], output: Path, budget_s: float, as_json: bool) -> int:
    """Measure, fit, write, and tell how well the fit holds; the exit code."""
    if len(runs) > MOST_RUNS:
        raise BadInput(
            "too many runs", value=len(runs), limit=MOST_RUNS, fix="name fewer with --quantization"
        )
    for run in runs:
        resolve(settings_of(run))  # the last may not cost the first what was measured
    out, began_s = Console(highlight=False, stderr=True), time.perf_counter()
    found = system.memory()
    memory = Memory(total_bytes=found.total_bytes, available_bytes=found.available_bytes)
    ran: list[Ran] = []
    loaded: list[Loaded] = []
    dense_dtype = "float32"
    for number, run in enumerate(runs, 1):
        settings = settings_of(run)
        dense_dtype = resolve(settings).dtype
        witness = Witness()
        with rig(settings) as bench:
            found_now = list(measure_run(bench, run, budget_s / len(runs)))
            kinds = sum(1 for _ in kinds_of(bench, run))
            if number == len(runs):
                loaded = list(windows(bench, run.model, run.quantization))
        ran += found_now
        passes = len(found_now) / kinds
        spent_s = time.perf_counter() - began_s
        told = f"{passes:.1f} passes over {kinds} kinds of steps, {spent_s:.0f} s so far"
        out.print(f"run {number}/{len(runs)}: {run}: {told}", style="dim")
        taken = witness.taken()
        if taken is not None and taken > TAKEN:
            words = f"  others had {taken:.0%} of the CPU time that it asked for"
            out.print(f"{words}: calibrate again when they are gone", style="yellow")
        if passes < 1:
            out.print("  the rest did not fit --budget: expect larger errors", style="yellow")
    if not ran:
        raise BadInput("nothing was measured within --budget", value=budget_s, fix="allow more")
    known = facts(ran, memory, time.perf_counter() - began_s, dense_dtype)
    found_fit = calibrated(ran, known, loaded)
    write(found_fit, output)
    if as_json:
        print(json_line(found_fit))
    else:
        Console(highlight=False).print(table(found_fit, output))
    return 0


def write(calibration: Calibration, output: Path) -> None:
    """The file, indented: people read it."""
    write_file(output, [msgspec.json.format(msgspec.json.encode(calibration), indent=2)])


def table(found: Calibration, output: Path) -> Table:
    """What was learnt, for a person."""
    kinds = f"{len(found.residuals)} kinds of steps in {found.took_s:.0f} s"
    title = f"{found.device}, {found.as_of}: {kinds}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("", "", ""):
        table.add_column(name, justify="left")
    reads = found.memory_bandwidth / 1e9
    table.add_row("memory reads", f"{reads:.1f} GB/s", "")
    for name, linear in found.linears.items():
        at = min(64, linear.rows[-1])
        rate = 2 * at / linear.seconds_per_weight(at) / 1e9
        share = (
            f"{linear.bandwidth:.0%} of the read bandwidth; {1e6 * linear.layer_s:.0f} us a layer"
        )
        table.add_row(name, f"{rate:.0f} GFLOP/s at {at} rows", share)
    attention = found.attention
    table.add_row(
        "attention",
        f"{1e-9 / max(attention.fresh_flop_s, 1e-18):.0f} GFLOP/s in prompts",
        f"{1e-9 / max(attention.decode_byte_s, 1e-18):.0f} GB/s and "
        f"{1e-9 / max(attention.decode_flop_s, 1e-18):.0f} GFLOP/s in decodes",
    )
    over = found.overheads
    table.add_row(
        "overhead",
        f"{1e6 * over.step_s:.0f} us a step",
        f"{1e6 * over.run_s:.1f} us a sequence; {1e3 * over.first_s:.2f} ms to ask",
    )
    table.add_row(
        "readers",
        f"{1e6 * over.reader_s:.0f} us a token",
        f"{1e3 * over.reader_first_s:.2f} ms to ask from an event loop (simulate counts both)",
    )
    if found.weather is not None:
        table.add_row("weather", *_told(found.weather))
    table.add_row(
        "median error", f"TPOT {found.tpot_error:.0%} to expect", f"TTFT {found.ttft_error:.0%}"
    )
    table.add_row("written to", str(output), "use it with --calibration")
    return table


def _told(weather: Weather) -> tuple[str, str]:
    """Steps under arrivals over the fit: the middle, and the middle 80 %; the moods' ends."""

    def spread(values: Sequence[float]) -> str:
        low, middle, high = (sorted(values)[int(q * len(values))] for q in (0.1, 0.5, 0.9))
        return f"{middle:.2f} ({low:.2f} .. {high:.2f})"

    decode, prompt = spread(weather.decode), spread(weather.prompt)
    passes = (
        f"; passes {min(weather.moods):.2f} .. {max(weather.moods):.2f}" if weather.moods else ""
    )
    return (
        f"{weather.span_s:.0f} s under arrivals",
        f"decodes {decode}, prompts {prompt} of the fit{passes}",
    )
