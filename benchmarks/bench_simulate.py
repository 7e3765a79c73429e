"""Simulated against real, under load: the demo model, three workloads at four rates each.

    python benchmarks/bench_simulate.py measure --raw under.jsonl   repeat until it is done
    python benchmarks/bench_simulate.py table --raw under.jsonl --calibration FILE

`measure` runs the engine in this process under open-loop Poisson arrivals (what `ridgeline bench`
does), looks at the machine's speed around each run, and appends. `table` simulates the same
requests at the same instants with the engine's own scheduler and the step times of a calibration
(`ridgeline calibrate`, or `bench_predict.py table --calibration FILE`), and prints both. The
interval of p99 is what comes out on machines slower and faster by the calibration's 80 % interval.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as `ridgeline` sets it

import msgspec

from ridgeline.cli.calibrate import Speed, machine_for, speed
from ridgeline.cli.lab import EngineSubject, Tokenised
from ridgeline.engine.assemble import make_scheduler
from ridgeline.engine.engine import Engine
from ridgeline.engine.resolve import resolve
from ridgeline.engine.text import load_tokenizer
from ridgeline.measure.summary import Summary, summarise
from ridgeline.measure.workload import parse_workload
from ridgeline.optimize.subject import Load, dues_s
from ridgeline.plan.calibrate import slowed
from ridgeline.plan.calibration import Calibration, load_calibration
from ridgeline.plan.efficiency import interval
from ridgeline.plan.pace import Modelled
from ridgeline.plan.simulate import Arrival, simulate
from ridgeline.records import RunTrace, Slo
from ridgeline.settings import Settings, settings_from

SETTINGS = settings_from({"model": "demo", "quantization": "int8", "enable_prefix_caching": False})
SLO = Slo.parse("ttft:150 tpot:12")
WINDOW_S, GRACE_S = 10.0, 5.0
CASES = {
    "synthetic:input=60,output=60": (10.0, 25.0, 45.0, 65.0),
    "synthetic:input=400,output=30": (5.0, 10.0, 16.0, 22.0),
    "synthetic:input=30,output=200": (4.0, 9.0, 15.0, 21.0),
}


class Real(msgspec.Struct, frozen=True, kw_only=True):
    """One measured run."""

    workload: str
    rate: float
    seed: int
    numbers: dict[str, float]
    speed: Speed


def load_of(rate: float, seed: int) -> Load:
    return Load(rate=rate, seed=seed, window_s=WINDOW_S, grace_s=GRACE_S)


def workload_of(name: str, settings: Settings) -> Tokenised:
    return Tokenised(parse_workload(name), load_tokenizer(settings.model))


def measure(path: Path, seconds: float) -> bool:
    """Append what is missing while there is time; True when nothing is."""
    ends_s = time.perf_counter() + seconds
    done = {(real.workload, real.rate) for real in read(path)}
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
            )
            with path.open("ab") as stream:
                stream.write(msgspec.json.encode(real) + b"\n")
            print(f"{name} at {rate:g}/s", flush=True)
    return True


def read(path: Path) -> list[Real]:
    if not path.exists():
        return []
    return [msgspec.json.decode(line, type=Real) for line in path.read_bytes().splitlines()]


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("measure", "table"))
    parser.add_argument("--raw", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--normalise", action="store_true", help="allow for each run's speed")
    given = parser.parse_args()
    if given.what == "measure":
        return 0 if measure(given.raw, given.seconds) else 3
    if given.calibration is None:
        parser.error("table needs --calibration")
    found = load_calibration(given.calibration)
    for each in table(read(given.raw), found, given.normalise):
        sys.stdout.write(each + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
