"""Simulated against real, under load: our server, three workloads at four rates each.

    python benchmarks/bench_simulate.py measure --raw under.jsonl    again while it exits with 3
    python benchmarks/bench_simulate.py table --raw under.jsonl --calibration FILE
    python benchmarks/bench_simulate.py steps --raw under.jsonl --calibration FILE

FILE is of `bench_predict.py table`, or of `ridgeline calibrate` with the model of `--model`, on the
same machine and day. `measure` sends open-loop Poisson arrivals (what `ridgeline bench` does) and
appends, a line per run. qwen2.5-0.5b (INT8, the default) is served by `ridgeline serve`, a separate
process; demo, whose steps are shorter than what a client costs, is an engine in this process.
`table` simulates the same requests at the same instants, as `ridgeline simulate` does: the engine's
own scheduler, the step times of the calibration, its interference from 40 offsets. A figure is the
middle of the forty; the interval of p99 is their 5th to 95th percentile. `--fair` leaves the
interference out.

`steps` says where the rest of the error comes from, for demo: real steps against the calibration's
seconds for them, by kind and by how many sequences they had.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as `ridgeline` sets it

import msgspec
import numpy as np
from raw_runs import NOT_DONE, append, flags, read, say
from server import serving

from ridgeline.config.settings import Settings, settings_from
from ridgeline.engine.build import make_scheduler
from ridgeline.engine.config import resolve
from ridgeline.engine.engine import Engine
from ridgeline.engine.tokenization import load_tokenizer
from ridgeline.measure.client.http_target import HttpTarget, first_model
from ridgeline.measure.client.load_client import LoadOptions, run_load
from ridgeline.measure.metrics.summary import summarise
from ridgeline.measure.monitors.process_usage import CpuContention
from ridgeline.measure.workload import parse_workload
from ridgeline.measure.workload.arrivals import Closed
from ridgeline.optimize.environment import Load, arrival_times_s
from ridgeline.plan.calibration.calibration import Calibration, load_calibration
from ridgeline.plan.calibration.interference import InterferenceSampler, LoadedStep, has_prompt
from ridgeline.plan.simulate.fleet import simulate_fleet
from ridgeline.plan.simulate.records import (
    FleetConfig,
    FleetOutcome,
    ReplicaConfig,
    SimulatedRequest,
)
from ridgeline.plan.simulate.summary import meets_slo, tpot_of
from ridgeline.plan.step_time.replica import Replica
from ridgeline.plan.step_time.simulated import ModelledStepTimes, reader_s
from ridgeline.records import RunTrace, Slo
from ridgeline.workflows.calibrate.calibrate_engine import calibrated_replica
from ridgeline.workflows.calibrate.load_windows import busy_steps
from ridgeline.workflows.load.tokenized_workload import TokenizedWorkload
from ridgeline.workflows.optimize.engine_environment import EngineDeployment

PLACES = 40
CALM = 0.3  # of the CPU time asked for, that others may have had: the client, who shares it, too
LOW, HIGH = 5, 95  # percentiles of the places
MIN_STEPS = 30  # of a kind, that a median is made of


class Bench(msgspec.Struct, frozen=True, kw_only=True):
    """A model, three SLOs, and its workloads with their rates in requests/s.

    Windows are long enough for some dozens of requests at the least rate. `served`: by `ridgeline
    serve` and asked over HTTP.
    """

    model: str
    slos: tuple[str, str, str]
    cases: dict[str, tuple[float, ...]]
    window_s: float
    grace_s: float
    served: bool

    @property
    def settings(self) -> Settings:
        fields = {"model": self.model, "quantization": "int8", "max_model_len": 2048}
        return settings_from({"model": "demo", **fields, "enable_prefix_caching": False})

    def load(self, rate: float, seed: int) -> Load:
        return Load(rate=rate, seed=seed, window_s=self.window_s, grace_s=self.grace_s)

    def workload(self, name: str) -> TokenizedWorkload:
        return TokenizedWorkload(parse_workload(name), load_tokenizer(self.model))


BENCHES = {
    "qwen2.5-0.5b": Bench(
        model="dummy:qwen2.5-0.5b",
        slos=("ttft:500 tpot:50", "ttft:1000 tpot:100", "ttft:2000 tpot:200"),
        cases={
            "synthetic:input=120,output=80": (0.7, 1.3, 1.9, 2.5),
            "synthetic:input=500,output=40": (0.4, 0.6, 0.8, 1.1),
            "synthetic:input=60,output=200": (0.4, 0.7, 1.0, 1.3),
        },
        window_s=45.0,
        grace_s=15.0,
        served=True,
    ),
    "demo": Bench(
        model="demo",
        slos=("ttft:75 tpot:6", "ttft:150 tpot:12", "ttft:300 tpot:24"),
        cases={
            "synthetic:input=60,output=60": (10.0, 25.0, 45.0, 65.0),
            "synthetic:input=400,output=30": (5.0, 10.0, 16.0, 22.0),
            "synthetic:input=30,output=200": (4.0, 9.0, 15.0, 21.0),
        },
        window_s=10.0,
        grace_s=5.0,
        served=False,
    ),
}


class Real(msgspec.Struct, frozen=True, kw_only=True):
    """One measured run."""

    model: str
    workload: str
    rate: float
    seed: int
    numbers: dict[str, float]
    steps: tuple[LoadedStep, ...] = ()


def measure(bench: Bench, name: str, path: Path, seconds: float) -> bool:
    """Append what is missing while there is time; True when nothing is."""
    ends_s, all_kept = time.perf_counter() + seconds, True
    done = {(real.model, real.workload, real.rate) for real in read(path, Real)}
    todo = [(case, rate) for case, rates in bench.cases.items() for rate in rates]
    with opened(bench) as run_of:
        for case, rate in (case for case in todo if (name, *case) not in done):
            if time.perf_counter() + bench.window_s + bench.grace_s > ends_s:
                return False
            contention = CpuContention()
            run = run_of(case, bench.load(rate, seed=7))
            taken = contention.taken_share() or 0.0
            label = f"{case} at {rate:g}/s, others had {taken:.0%} of the CPU"
            if taken > CALM:
                print(f"{label}: not kept", flush=True)
                all_kept = False
                continue
            real = Real(
                model=name,
                workload=case,
                rate=rate,
                seed=7,
                numbers=numbers(run, bench),
                steps=tuple(busy_steps(run.steps)),
            )
            append(path, [real])
            print(label, flush=True)
    return all_kept


Running = Callable[[str, Load], RunTrace]


@contextmanager
def opened(bench: Bench) -> Iterator[Running]:
    """A way to run a workload under a load, on the server or on an engine in this process."""
    if not bench.served:
        with Engine.from_settings(bench.settings) as engine:
            yield lambda case, load: asyncio.run(
                EngineDeployment(engine, bench.workload(case)).run(load)
            )
        return
    with server(bench.settings) as url:
        yield lambda case, load: asyncio.run(over_http(url, bench, case, load))


@contextmanager
def server(settings: Settings) -> Iterator[str]:
    """`ridgeline serve` of these settings on a free port; its address."""
    flags = ["serve", settings.model, "--port", "0", "--quantization", str(settings.quantization)]
    flags += ["--max-model-len", str(settings.max_model_len), "--no-enable-prefix-caching"]
    with serving(flags) as (url, _):
        yield url


async def over_http(url: str, bench: Bench, case: str, load: Load) -> RunTrace:
    """One run from outside, after two uncounted requests."""
    arrivals, options = load.poisson()
    target = HttpTarget(url, await first_model(url), endpoint="completions")
    try:
        await run_load(target, bench.workload(case), Closed(1), LoadOptions(num_requests=2, seed=1))
        return await run_load(target, bench.workload(case), arrivals, options)
    finally:
        await target.close()


def numbers(run: RunTrace, bench: Bench) -> dict[str, float]:
    """ms, and requests/s under each SLO."""
    found = {slo: summarise(run, Slo.parse(slo)) for slo in bench.slos}
    whole = found[bench.slos[0]]
    assert whole.ttft and whole.tpot
    met = {slo: each.goodput.num_met for slo, each in found.items() if each.goodput}
    return {
        **{f"goodput {slo}": count / bench.window_s for slo, count in met.items()},
        "ttft p50": 1e3 * whole.ttft.p(50),
        "tpot p50": 1e3 * whole.tpot.p(50),
        "ttft p99": 1e3 * whole.ttft.p(99),
        "tpot p99": 1e3 * whole.tpot.p(99),
    }


# ---- simulated ---------------------------------------------------------------------------------


def requests_of(real: Real) -> list[SimulatedRequest]:
    """The same lengths at the same instants."""
    bench = BENCHES[real.model]
    load = bench.load(real.rate, real.seed)
    dues = arrival_times_s(load)
    asked = bench.workload(real.workload).requests(len(dues), load.seed)
    return [
        SimulatedRequest(at_s=due, num_prompt=len(each.prompt), num_output=each.max_tokens)
        for each, due in zip(asked, dues, strict=True)
    ]


def simulated(
    bench: Bench, requests: list[SimulatedRequest], calibration: Calibration, place: int
) -> dict[str, float]:
    """`place`: the seed of the interference's offset."""
    settings = bench.settings
    machine = calibrated_replica(calibration, settings.model, settings.quantization)
    over, trace = calibration.overheads, calibration.interference
    build = ReplicaConfig(
        name=settings.model,
        scheduler=partial(make_scheduler, resolve(settings)),
        step_times=ModelledStepTimes(machine),
        overhead_s=over.reader_first_s or over.first_s,
        interference=None if trace is None else partial(InterferenceSampler, trace, place),
    )
    plan = FleetConfig(replicas=(build,))
    outcome = simulate_fleet(requests, plan, end_s=bench.window_s + bench.grace_s)
    return simulated_figures(outcome, bench)


def simulated_figures(outcome: FleetOutcome, bench: Bench) -> dict[str, float]:
    """As `numbers`, of those that were served."""
    slos = {slo: Slo.parse(slo) for slo in bench.slos}
    served = [life for life in outcome.requests if life.finished_s == life.finished_s]
    ttfts = [1e3 * (life.first_s - life.request.at_s) for life in served]
    tpots = [1e3 * tpot_of(life) for life in served]
    return {
        **{
            f"goodput {name}": sum(meets_slo(life, slo) for life in served) / bench.window_s
            for name, slo in slos.items()
        },
        "ttft p50": float(np.percentile(ttfts, 50)),
        "tpot p50": float(np.percentile(tpots, 50)),
        "ttft p99": float(np.percentile(ttfts, 99)),
        "tpot p99": float(np.percentile(tpots, 99)),
    }


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of one run, and the interval of the simulated ones."""

    name: str
    real: float
    simulated: float
    low: float
    high: float

    @property
    def error(self) -> float:
        if not self.real:
            return 0.0 if not self.simulated else 1.0
        return self.simulated / self.real - 1


def figures(real: Real, calibration: Calibration) -> Iterator[Figure]:
    requests = requests_of(real)
    places = PLACES if calibration.interference is not None else 1
    bench = BENCHES[real.model]
    each = [simulated(bench, requests, calibration, place) for place in range(places)]
    for name, value in real.numbers.items():
        low, middle, high = np.percentile([one[name] for one in each], (LOW, 50, HIGH)).tolist()
        yield Figure(name=name, real=value, simulated=middle, low=low, high=high)


def table(reals: list[Real], calibration: Calibration) -> Iterator[str]:
    """Markdown: one row per run; then how much of the aims holds."""
    found: dict[str, list[Figure]] = {}
    slos = BENCHES[reals[0].model].slos
    heads = [f"goodput/s, {slo}" for slo in slos]
    heads += ["TTFT p50 ms", "TPOT p50 ms", "TTFT p99 ms", "TPOT p99 ms"]
    yield "| workload | rate | " + " | ".join(heads) + " |"
    yield "|---" * (2 + len(heads)) + "|"
    for real in reals:
        cells = []
        for figure in figures(real, calibration):
            found.setdefault(figure.name, []).append(figure)
            cells.append(cell(figure))
        name = real.workload.removeprefix("synthetic:")
        yield f"| {name} | {real.rate:g} | {' | '.join(cells)} |"
    yield ""
    yield "Each cell: measured / simulated; p99 with the simulated interval."
    yield ""
    goodputs = [figure for slo in slos for figure in found[f"goodput {slo}"]]
    for name, of, limit in (
        ("goodput", goodputs, 0.10),
        ("ttft p50", found["ttft p50"], 0.15),
        ("tpot p50", found["tpot p50"], 0.15),
    ):
        errors = [abs(f.error) for f in of]
        held = sum(error <= limit for error in errors)
        middle = statistics.median(errors)
        yield f"- {name}: {held} of {len(errors)} within {limit:.0%}, median {middle:.1%}"
    both = found["ttft p99"] + found["tpot p99"]
    covered = sum(f.low <= f.real <= f.high for f in both)
    width = statistics.median(f.high / f.low for f in both)
    yield f"- p99: the interval covers {covered} of {len(both)}; its ends are {width:.2g} apart"


def cell(figure: Figure) -> str:
    text = f"{figure.real:.3g} / {figure.simulated:.3g}"
    if "p99" in figure.name:
        text += f" ({figure.low:.3g} .. {figure.high:.3g})"
    return text


def steps_table(reals: list[Real], calibration: Calibration) -> Iterator[str]:
    """Measured steps over calibrated ones, by kind: 10th percentile, middle, 90th."""
    yield "| workload | rate | kind | steps | measured ms | over the fit: 10 % | 50 % | 90 % |"
    yield "|---|---|---|---|---|---|---|---|"
    for real in reals:
        settings = BENCHES[real.model].settings
        machine = calibrated_replica(calibration, settings.model, settings.quantization)
        kinds: dict[str, list[LoadedStep]] = {}
        for step in real.steps:
            kinds.setdefault(kind_of(step), []).append(step)
        for kind, steps in sorted(kinds.items()):
            if len(steps) < MIN_STEPS:
                continue
            ratios = np.percentile([over(machine, step) for step in steps], (10, 50, 90))
            middle = 1e3 * statistics.median(step.seconds for step in steps)
            name = real.workload.removeprefix("synthetic:")
            shares = " | ".join(f"{ratio:.2f}" for ratio in ratios)
            yield f"| {name} | {real.rate:g} | {kind} | {len(steps)} | {middle:.3g} | {shares} |"


def over(machine: Replica, step: LoadedStep) -> float:
    """Seconds over those of the fit, readers included."""
    fitted_s = machine.price(step.shapes, step.num_sampled).seconds
    return step.seconds / (fitted_s + reader_s(machine, step.num_sampled))


def kind_of(step: LoadedStep) -> str:
    """`3 decodes`, `prompt`, `prompt + 2`."""
    decodes = sum(new == 1 for new, _ in step.shapes)
    if not has_prompt(step.shapes):
        return f"{decodes:2d} decodes"
    return f"prompt + {min(decodes, 4)}" if decodes else "prompt"


def main() -> int:
    parser = flags(__doc__, "table", "steps")
    parser.add_argument("--model", choices=tuple(BENCHES), default="qwen2.5-0.5b")
    parser.add_argument("--fair", action="store_true", help="leave the interference out")
    given = parser.parse_args()
    if given.what == "measure":
        bench = BENCHES[given.model]
        return 0 if measure(bench, given.model, given.raw, given.seconds) else NOT_DONE
    if given.calibration is None:
        parser.error(f"{given.what} needs --calibration")
    found = load_calibration(given.calibration)
    reals = [real for real in read(given.raw, Real) if real.model == given.model]
    if given.fair:
        found = msgspec.structs.replace(found, interference=None)
    return say((steps_table if given.what == "steps" else table)(reals, found))


if __name__ == "__main__":
    sys.exit(main())
