"""Simulated against real, under load: the demo model, three workloads at four rates each.

    python benchmarks/bench_simulate.py measure --raw under.jsonl    again while it exits with 3
    python benchmarks/bench_simulate.py table --raw under.jsonl --calibration FILE
    python benchmarks/bench_simulate.py steps --raw under.jsonl --calibration FILE

FILE is of `bench_predict.py table`, or of `ridgeline calibrate --engine demo --quantization
dense,int8 --budget 60`, on the same machine and day. `measure` runs the engine in this process
under open-loop Poisson arrivals (what `ridgeline bench` does), looks at the machine's speed around
each run, and appends; twelve runs of some 15 s each. `table` simulates the same requests at the
same instants with the engine's own scheduler, the step times of a calibration and what it says of
readers, and prints both. The interval of p99 is what comes out on machines slower and faster by the
calibration's 80 % interval.

`steps` says where the rest of the error comes from: real steps that only decode, by how many
sequences they had, against the calibration's seconds for them, without and with readers.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as `ridgeline` sets it

import msgspec
from raw_runs import NOT_DONE, append, flags, read, say
from slowed import slowed

from ridgeline.cli.calibrate import machine_for
from ridgeline.cli.calibrate_runs import Speed, speed
from ridgeline.cli.lab import EngineSubject, Tokenised
from ridgeline.engine.assemble import make_scheduler
from ridgeline.engine.engine import Engine
from ridgeline.engine.resolve import resolve
from ridgeline.engine.text import load_tokenizer
from ridgeline.measure.summary import Summary, summarise
from ridgeline.measure.workload import parse_workload
from ridgeline.optimize.subject import Load, dues_s
from ridgeline.plan.calibration import Calibration, load_calibration
from ridgeline.plan.efficiency import interval
from ridgeline.plan.pace import Modelled, reading_s
from ridgeline.plan.simulate import Arrival, simulate
from ridgeline.records import RunTrace, Slo, StepStat
from ridgeline.settings import Settings, settings_from

SETTINGS = settings_from({"model": "demo", "quantization": "int8", "enable_prefix_caching": False})
SLO = Slo.parse("ttft:150 tpot:12")
WINDOW_S, GRACE_S = 10.0, 5.0
LEAST_STEPS = 30  # of a batch, that a median is made of
CASES = {
    "synthetic:input=60,output=60": (10.0, 25.0, 45.0, 65.0),
    "synthetic:input=400,output=30": (5.0, 10.0, 16.0, 22.0),
    "synthetic:input=30,output=200": (4.0, 9.0, 15.0, 21.0),
}


class Decodes(msgspec.Struct, frozen=True, kw_only=True):
    """Steps that only decode, of one batch: how many, the middle of their tokens in the cache, and
    of the seconds until the next step began."""

    batch: int
    count: int
    computed: int
    seconds: float


class Real(msgspec.Struct, frozen=True, kw_only=True):
    """One measured run."""

    workload: str
    rate: float
    seed: int
    numbers: dict[str, float]
    speed: Speed
    decodes: tuple[Decodes, ...] = ()


def load_of(rate: float, seed: int) -> Load:
    return Load(rate=rate, seed=seed, window_s=WINDOW_S, grace_s=GRACE_S)


def workload_of(name: str, settings: Settings) -> Tokenised:
    return Tokenised(parse_workload(name), load_tokenizer(settings.model))


def measure(path: Path, seconds: float) -> bool:
    """Append what is missing while there is time; True when nothing is."""
    ends_s = time.perf_counter() + seconds
    done = {(real.workload, real.rate) for real in read(path, Real)}
    todo = [(name, rate) for name, rates in CASES.items() for rate in rates]
    with Engine.from_settings(SETTINGS) as engine:
        for name, rate in (case for case in todo if case not in done):
            if time.perf_counter() + WINDOW_S + GRACE_S > ends_s:
                return False
            subject = EngineSubject(engine, workload_of(name, SETTINGS))
            before = speed()
            run = asyncio.run(subject.run(load_of(rate, seed=7)))
            real = Real(
                workload=name,
                rate=rate,
                seed=7,
                numbers=numbers(summarise(run, SLO)),
                speed=before.middle(speed()),
                decodes=tuple(decodes_of(run.steps)),
            )
            append(path, [real])
            print(f"{name} at {rate:g}/s", flush=True)
    return True


def decodes_of(steps: Sequence[StepStat]) -> Iterator[Decodes]:
    """By batch. A step counts where the next one goes on with the same sequences, one token on."""
    found: dict[int, list[tuple[int, float]]] = {}
    for step, after in pairwise(steps):
        if any(new != 1 for new, _ in step.shapes) or not step.shapes:
            continue
        if after.shapes[: len(step.shapes)] == tuple((1, done + 1) for _, done in step.shapes):
            computed = sum(done for _, done in step.shapes)
            found.setdefault(len(step.shapes), []).append((computed, after.at_s - step.at_s))
    for batch, each in sorted(found.items()):
        yield Decodes(
            batch=batch,
            count=len(each),
            computed=int(statistics.median(computed for computed, _ in each)),
            seconds=statistics.median(seconds for _, seconds in each),
        )


def simulated(real: Real, calibration: Calibration) -> dict[str, float]:
    """The same requests, at the same instants, on the virtual clock."""
    machine = machine_for(calibration, SETTINGS.model, SETTINGS.quantization)
    load = load_of(real.rate, real.seed)
    dues = dues_s(load)
    requests = workload_of(real.workload, SETTINGS).requests(len(dues), load.seed)
    arrivals = [
        Arrival(at_s=due, prompt=tuple(request.prompt), num_output=request.max_tokens)
        for request, due in zip(requests, dues, strict=True)
    ]
    done = simulate(
        make_scheduler(resolve(SETTINGS)),
        arrivals,
        Modelled(machine).step_s,
        end_s=WINDOW_S + GRACE_S,
    )
    run = RunTrace(
        target="simulated",
        workload=real.workload,
        arrivals=f"poisson:{real.rate:g}",
        seed=real.seed,
        started_unix_s=0.0,
        duration_s=max(done.duration_s, WINDOW_S),
        requests=done.requests,
        steps=done.steps,
    )
    over = calibration.overheads
    return numbers(summarise(run, SLO), over.reader_first_s or over.first_s)


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of one run; the interval is of p99 alone."""

    name: str
    real: float
    told: float
    low: float
    high: float

    @property
    def error(self) -> float:
        if not self.real:
            return 0.0 if not self.told else 1.0
        return self.told / self.real - 1


def figures(real: Real, calibration: Calibration) -> Iterator[Figure]:
    _, spread = interval(1.0, max(calibration.tpot_error, calibration.ttft_error))
    speeds = (1.0, 1 / spread, spread)
    middle, fast, slow = (simulated(real, slowed(calibration, f, f)) for f in speeds)
    for name, value in real.numbers.items():
        yield Figure(name=name, real=value, told=middle[name], low=fast[name], high=slow[name])


def numbers(found: Summary, first_s: float = 0.0) -> dict[str, float]:
    """ms and requests/s; `first_s` is what asking costs and the simulator does not know."""
    assert found.ttft and found.tpot and found.goodput
    return {
        "goodput": found.goodput.num_met / WINDOW_S,
        "ttft p50": 1e3 * (found.ttft.p(50) + first_s),
        "tpot p50": 1e3 * found.tpot.p(50),
        "ttft p99": 1e3 * (found.ttft.p(99) + first_s),
        "tpot p99": 1e3 * found.tpot.p(99),
    }


def table(reals: list[Real], calibration: Calibration, normalise: bool) -> Iterator[str]:
    """Markdown: one row per run; then how much of the aims holds."""
    usual = Speed(
        statistics.median(r.speed.read_bytes_s for r in reals),
        statistics.median(r.speed.ops_s for r in reals),
    )
    told: dict[str, list[Figure]] = {}
    yield "| workload | rate | goodput/s | TTFT p50 ms | TPOT p50 ms | TTFT p99 ms | TPOT p99 ms |"
    yield "|---|---|---|---|---|---|---|"
    for real in reals:
        here = calibration
        if normalise:
            slow = usual.read_bytes_s / real.speed.read_bytes_s, usual.ops_s / real.speed.ops_s
            here = slowed(calibration, *slow)
        cells = []
        for figure in figures(real, here):
            told.setdefault(figure.name, []).append(figure)
            cells.append(cell(figure))
        name = real.workload.removeprefix("synthetic:")
        yield f"| {name} | {real.rate:g} | {' | '.join(cells)} |"
    yield ""
    yield "Each cell: measured / simulated; p99 with the simulated interval."
    yield ""
    for name, limit in (("goodput", 0.10), ("ttft p50", 0.15), ("tpot p50", 0.15)):
        errors = [abs(f.error) for f in told[name]]
        held = sum(error <= limit for error in errors)
        middle = statistics.median(errors)
        yield f"- {name}: {held} of {len(errors)} within {limit:.0%}, median {middle:.1%}"
    both = told["ttft p99"] + told["tpot p99"]
    covered = sum(f.low <= f.real <= f.high for f in both)
    yield f"- p99: the interval covers {covered} of {len(both)}"


def cell(figure: Figure) -> str:
    text = f"{figure.real:.3g} / {figure.told:.3g}"
    if "p99" in figure.name:
        text += f" ({figure.low:.3g} .. {figure.high:.3g})"
    return text


def steps_table(reals: list[Real], calibration: Calibration) -> Iterator[str]:
    """Measured decode steps against calibrated ones: the error of a step, by its sequences."""
    machine = machine_for(calibration, SETTINGS.model, SETTINGS.quantization)
    yield "| workload | rate | sequences | steps | measured ms | engine alone | with readers |"
    yield "|---|---|---|---|---|---|---|"
    misses: list[tuple[float, float]] = []
    for real in reals:
        for each in (d for d in real.decodes if d.count >= LEAST_STEPS):
            alone_s = machine.decode_sum(each.batch, each.computed).seconds
            both_s = alone_s + reading_s(machine, each.batch)
            misses.append((alone_s / each.seconds - 1, both_s / each.seconds - 1))
            name = real.workload.removeprefix("synthetic:")
            yield (
                f"| {name} | {real.rate:g} | {each.batch} | {each.count} "
                f"| {1e3 * each.seconds:.3g} | {misses[-1][0]:+.0%} | {misses[-1][1]:+.0%} |"
            )
    if misses:
        alone, both = (statistics.median(column) for column in zip(*misses, strict=True))
        yield f"\nmedian error of a step: {alone:+.1%} alone, {both:+.1%} with readers"


def main() -> int:
    parser = flags(__doc__, "table", "steps")
    parser.add_argument("--normalise", action="store_true", help="allow for each run's speed")
    given = parser.parse_args()
    if given.what == "measure":
        return 0 if measure(given.raw, given.seconds) else NOT_DONE
    if given.calibration is None:
        parser.error(f"{given.what} needs --calibration")
    found, reals = load_calibration(given.calibration), read(given.raw, Real)
    if given.what == "steps":
        return say(steps_table(reals, found))
    return say(table(reals, found, given.normalise))


if __name__ == "__main__":
    sys.exit(main())
