"""Faults injected into a running engine: does `ridgeline diagnose` name each by its true cause?

    python benchmarks/bench_faults.py --out faults.jsonl [--sitting 140] [--only NAME]

The demo model on this machine, in real time: every fault of `faults.py` under three workloads, and
the healthy engine, which must get no finding. Each case is one run of the load client, judged by
the very code behind `diagnose`. The faults' sizes follow from what the healthy engine does here.
Cases are kept in the file as they end, and those that it holds are not run again: a call stops
after `--sitting` seconds with exit code 3 while any are missing, and prints the table so far.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import sys
import time
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as `ridgeline` sets it

import msgspec
from faults import BLOCK, FAULTS, HEALTHY, Fault, Pace, Wrapped, visitor
from raw_runs import NOT_DONE, append, read

from ridgeline.config.load import BenchOptions
from ridgeline.config.settings import settings_from
from ridgeline.diagnose.facts import READING_GAP_S
from ridgeline.diagnose.losses.expected_steps import learn
from ridgeline.diagnose.losses.latency_losses import Expected
from ridgeline.engine.engine import Engine
from ridgeline.measure.bench_options import run_bench
from ridgeline.measure.client.engine_target import EngineTarget
from ridgeline.measure.client.load_client import OnStart
from ridgeline.records import RunTrace, Sampling, Slo, StepStat
from ridgeline.workflows.diagnose.diagnose_run import Diagnosis, diagnose_run
from ridgeline.workflows.load.load_session import chat_renderer, run_context
from ridgeline.workflows.load.server_monitor import Observed, observe_run

LOADS = {
    "chat": "chat",
    "code": "code",
    "documents": "synthetic:input=400,output=40,cv=0.4,prefix=192,groups=4",
}
USUAL = {"dtype": "float32", "max_num_batched_tokens": 128, "block_size": BLOCK}
RUN_S = 3.0  # of arrivals
LEAST, MOST = 24, 160  # requests of a run
SEED = 20
VISITS = 3  # long prompts whose pieces are timed


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One run and its diagnosis. `named`: verdicts by worth; `shares`: shares of the losses."""

    fault: str
    workload: str
    truth: str | None
    named: tuple[str, ...]
    causes: tuple[str, ...]
    shares: dict[str, float]
    facts: dict[str, float]
    took_s: float

    @property
    def right(self) -> bool:
        if self.truth is None or not self.named:
            return self.truth is None and not self.named
        return self.named[0] in self.truth.split(" or ")


class Usual(msgspec.Struct, frozen=True, kw_only=True):
    """The healthy engine under one workload; `steps` of all its runs so far, for a baseline."""

    pace: Pace
    steps: list[StepStat]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="cases, one JSON line each")
    parser.add_argument("--sitting", type=float, default=480.0, help="seconds of one call")
    parser.add_argument("--only", help="faults whose name holds this, run again and shown whole")
    parser.add_argument("--workload", choices=list(LOADS), action="append")
    args = parser.parse_args()
    if args.only:
        for load, fault in _cases(args.workload):
            if args.only in fault.name:
                print(msgspec.json.encode(one(fault, load)).decode())
        return 0
    ends_s = time.monotonic() + args.sitting
    done = {(case.fault, case.workload): case for case in read(args.out, Case)}
    for load, fault in _cases(args.workload):
        if (fault.name, load) in done:
            continue
        if time.monotonic() > ends_s:
            print(table(done.values()))
            return NOT_DONE
        case = done[fault.name, load] = one(fault, load)
        append(args.out, [case])
        print(f"{load:10} {fault.name:36} {case.right} {case.named}", file=sys.stderr, flush=True)
    print(table(done.values()))
    return 0


def _cases(loads: list[str] | None) -> Iterator[tuple[str, Fault]]:
    for load in loads or LOADS:
        for fault in (*HEALTHY, *FAULTS):
            yield load, fault


def one(fault: Fault, load: str) -> Case:
    """Inject, measure, judge."""
    began_s = time.monotonic()
    usual = usual_of(load)
    run, found = measured(fault, load, usual.pace, learn(usual.steps))
    assert found.losses is not None
    if fault in HEALTHY:
        usual.steps.extend(run.steps)
    facts = {"num_requests": len(run.requests), "duration_s": run.duration_s}
    if "cpu_taken_share" in found.metrics:  # share of the CPU taken by other processes
        facts["cpu_taken_share"] = found.metrics["cpu_taken_share"]
    return Case(
        fault=fault.name,
        workload=load,
        truth=fault.verdict,
        named=tuple(finding.verdict for finding in found.findings),
        causes=tuple(finding.cause for finding in found.findings),
        shares={k: round(v.mid, 3) for k, v in found.losses.shares.items() if v.mid >= 0.005},
        facts=facts,
        took_s=time.monotonic() - began_s,
    )


def measured(
    fault: Fault, load: str, pace: Pace, expected: Expected | None
) -> tuple[RunTrace, Diagnosis]:
    rate = fault.load * pace.capacity
    options = BenchOptions(
        workload=LOADS[load],
        request_rate=rate,
        num_prompts=min(MOST, max(LEAST, round(RUN_S * rate))),
        seed=SEED,
        **fault.options(pace),
    )
    tpot_s = READING_GAP_S if fault.tpot_s is None else fault.tpot_s(pace)
    slo = Slo.parse(f"ttft:60000 tpot:{1000 * tpot_s:.3f}")
    settings = settings_from({"model": "demo", **USUAL, **fault.settings(pace)})
    with Engine.from_settings(settings) as engine:
        run, seen = asyncio.run(_loaded(engine, options, fault, pace))
    return run, diagnose_run(run, run_context(options, seen), slo, expected)


async def _loaded(
    engine: Engine, options: BenchOptions, fault: Fault, pace: Pace | None
) -> tuple[RunTrace, Observed]:
    source = Wrapped(engine, fault.tokenizer_s(options.request_rate))
    target = EngineTarget(source, render_chat=chat_renderer(engine)[0])
    background = asyncio.create_task(fault.background(engine)) if fault.background else None
    with fault.during(engine, pace) if pace else contextlib.nullcontext():
        try:
            return await observe_run(partial(_bench, target, options), None)
        finally:
            if background is not None:
                background.cancel()


async def _bench(target: EngineTarget, options: BenchOptions, on_start: OnStart) -> RunTrace:
    return await run_bench(target, options, on_start=on_start)


@cache
def usual_of(load: str) -> Usual:
    """The healthy engine: all it can do, then half of that."""
    at_once = BenchOptions(workload=LOADS[load], num_prompts=64, max_concurrency=16, seed=SEED + 1)
    with Engine.from_settings(settings_from(USUAL)) as engine:
        whole, _ = asyncio.run(_loaded(engine, at_once, HEALTHY[0], None))
        capacity = len(whole.requests) / whole.duration_s
        half = msgspec.structs.replace(
            at_once,
            max_concurrency=None,
            request_rate=0.5 * capacity,
            num_prompts=min(MOST, max(LEAST, round(RUN_S * 0.5 * capacity))),
        )
        run, _ = asyncio.run(_loaded(engine, half, HEALTHY[0], None))
        block_bytes = BLOCK * engine.info.kv_bytes_per_token
        pace = _pace(run, capacity, block_bytes, _piece_s(engine))
    return Usual(pace=pace, steps=[*whole.steps, *run.steps])


def _piece_s(engine: Engine) -> float:
    """The median step of a few long prompts, alone."""
    rng, budget = random.Random(SEED), USUAL["max_num_batched_tokens"]
    engine.drain_steps()
    for _ in range(VISITS):
        engine.generate([visitor(rng)], Sampling(temperature=0.0, max_tokens=1))
    return median(step.run_s for step in engine.drain_steps() if step.num_tokens == budget)


def _pace(run: RunTrace, capacity: float, block_bytes: int, piece_s: float) -> Pace:
    done = [request for request in run.requests if request.output_tokens > 1]
    shared = max(request.cached_tokens for request in done)
    return Pace(
        capacity=capacity,
        step_s=median(step.run_s for step in run.steps),
        tpot_s=median((r.token_s[-1] - r.token_s[0]) / (r.output_tokens - 1) for r in done),
        piece_s=piece_s,
        longest=max(request.prompt_tokens + request.output_tokens for request in done),
        shared=shared,
        own=max(r.prompt_tokens + r.output_tokens - r.cached_tokens for r in done),
        block_bytes=block_bytes,
    )


def table(cases: Any) -> str:
    """Markdown: one row per fault, one column per workload; wrong verdicts are spelt out."""
    found = {(case.fault, case.workload): case for case in cases}
    lines = ["| fault | true cause | " + " | ".join(LOADS) + " |", "|---" * (2 + len(LOADS)) + "|"]
    for fault in (*HEALTHY, *FAULTS):
        row = [_cell(found.get((fault.name, load))) for load in LOADS]
        lines.append(f"| {fault.name} | {fault.verdict or 'none'} | " + " | ".join(row) + " |")
    faults = [case for case in found.values() if case.truth]
    healthy = [case for case in found.values() if not case.truth]
    lines.append(
        f"\n{sum(case.right for case in faults)} of {len(faults)} faults named; "
        f"{sum(case.right for case in healthy)} of {len(healthy)} healthy runs without a finding"
    )
    return "\n".join(lines)


def _cell(case: Case | None) -> str:
    if case is None:
        return "–"
    return "✓" if case.right else (case.named[0] if case.named else "nothing found")


if __name__ == "__main__":
    sys.exit(main())
