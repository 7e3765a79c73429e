"""Is what is broken named? Faults put into a real engine, in real time, and what `diagnose` says.

    python benchmarks/bench_faults.py --load chat --json build/faults.json
    python benchmarks/bench_faults.py --json build/faults.json --show

Each fault is a true one: fewer blocks or seats than the load needs, a setting that is wrong for it,
a sleep in the scheduler's own call, a tokenizer that takes its time, a client that may have one
request in flight or reads slowly, other programs on the same cores. The engine runs a published
shape with random weights (speed alone counts), the judgement is that of `ridgeline diagnose`. The
same faults in virtual time, where nothing disturbs: tests/diagnose/faults.py. Give the machine to
it alone: a second program on the cores *is* one of the faults.

Each load's rate is a share of what a closed loop of four reached on the healthy engine just before,
so that the healthy engine has time to spare. Results gather in the file; what is there is not run
again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ridgeline.cli.diagnose import judged
from ridgeline.diagnose.baseline import learn
from ridgeline.engine.engine import Engine
from ridgeline.measure.bench import BenchOptions, run_bench, workload_of
from ridgeline.measure.inprocess import InProcessTarget
from ridgeline.measure.log import Beside
from ridgeline.measure.target import Recorder
from ridgeline.measure.workload.base import LoadRequest
from ridgeline.measure.workload.sharing import shared_of
from ridgeline.records import RunTrace, Slo, StepStat
from ridgeline.settings import settings_from

MODEL, SLO = "dummy:smollm2-135m", Slo.parse("ttft:1500 tpot:150")
SEATS, BLOCK, THREADS = 16, 16, 2


class Load(NamedTuple):
    """Tokens of a prompt, of its shared head, and of an answer; how many different heads."""

    input: int
    prefix: int
    groups: int
    output: int
    count: int
    share: float  # of the closed loop's rate

    def options(self, rate: float, **changes: Any) -> BenchOptions:
        text = f"synthetic:input={self.input},prefix={self.prefix},groups={self.groups},"
        text += f"output={self.output},cv=0.3"
        fixed: dict[str, Any] = {"workload": text, "num_prompts": self.count, "num_warmups": 2}
        return BenchOptions(**(fixed | {"request_rate": rate} | changes))


LOADS = {
    "chat": Load(input=128, prefix=96, groups=1, output=32, count=28, share=0.5),
    "rag": Load(input=320, prefix=224, groups=3, output=16, count=24, share=0.5),
    "code": Load(input=224, prefix=160, groups=2, output=40, count=24, share=0.5),
}


class Injected(NamedTuple):
    """What is wrong around a run: settings, the load's options, and what is done to the engine."""

    verdict: str
    settings: Callable[[Load], dict[str, Any]] = lambda load: {}
    options: dict[str, Any] = {}
    plan_s: float = 0.0
    gap_s: float = 0.0
    tokenize_s: float = 0.0
    read_s: float = 0.0
    others: int = 0


def _blocks(num_sequences: float) -> Callable[[Load], dict[str, Any]]:
    """KV memory for the shared heads once, and the rest of so many of the longest sequences."""

    def settings(load: Load) -> dict[str, Any]:
        longest = 2.2 * (load.input - load.prefix + load.output) + load.prefix
        own = -(-(longest - load.prefix) // BLOCK)
        blocks = 2 + load.groups * -(-load.prefix // BLOCK) + round(num_sequences * own)
        return {"num_blocks": blocks}

    return settings


HEALTHY = Injected("")
FAULTS = {
    "few KV blocks": Injected("kv-capacity-bound", _blocks(1.6)),
    "hardly any KV block": Injected("kv-capacity-bound", _blocks(1.1)),
    "two seats": Injected("queue-bound", lambda load: {"max_num_seqs": 2}),
    "one seat": Injected("queue-bound", lambda load: {"max_num_seqs": 1}),
    "static batches of eight": Injected(
        "queue-bound", lambda load: {"batching": "static", "max_num_seqs": 8}
    ),
    "no prefix cache": Injected("prefix-miss-bound", lambda load: {"enable_prefix_caching": False}),
    "a slow tokenizer": Injected("host-overhead-bound", tokenize_s=0.15),
    "a client with one request in flight": Injected("client-bound", options={"max_concurrency": 1}),
    "a client that reads late": Injected("client-bound", read_s=0.06),
    "a sleep in the scheduler": Injected("host-overhead-bound", plan_s=0.012),
    "the loop is held up between steps": Injected("host-overhead-bound", gap_s=0.012),
    "other programs on its cores": Injected("machine-bound", others=4),
    "prompts in one piece": Injected(
        "scheduling-interference-bound",
        lambda load: {"enable_chunked_prefill": False, "enable_prefix_caching": True},
        options={"workload": "synthetic:input=640,output=24,cv=0.3"},
    ),
    "a token budget of sixteen": Injected(
        "prefill-compute-bound", lambda load: {"max_num_batched_tokens": 16, "max_num_seqs": 12}
    ),
}


# ---- injecting -----------------------------------------------------------------------------------


class _Target(InProcessTarget):
    """A front end that takes its time before the engine hears of a request, one after the other;
    and a client that takes its time after each piece of an answer."""

    def __init__(self, engine: Engine, fault: Injected) -> None:
        super().__init__(_Slow(engine, fault.read_s) if fault.read_s else engine)
        self._fault, self._door = fault, asyncio.Lock()

    async def send(self, request: LoadRequest, record: Recorder) -> None:
        async with self._door:
            await asyncio.sleep(self._fault.tokenize_s)
        await super().send(request, record)


class _Slow:
    """An engine whose events are read with a pause after each."""

    def __init__(self, engine: Engine, pause_s: float) -> None:
        self._engine, self._pause_s = engine, pause_s
        self.info, self.drain_steps = engine.info, engine.drain_steps

    async def stream(self, *args: Any, **terms: Any) -> AsyncIterator[Any]:
        async for event in self._engine.stream(*args, **terms):
            yield event
            await asyncio.sleep(self._pause_s)


@contextmanager
def _engine(load: Load, fault: Injected) -> Iterator[Engine]:
    asked = fault.settings(load)
    blocks = asked.pop("num_blocks", None)
    plain = {"model": MODEL, "quantization": "int8", "max_num_seqs": SEATS, "max_model_len": 2048}
    plain |= {"max_num_batched_tokens": 128, "num_threads": THREADS, **asked}
    if not plain.get("enable_chunked_prefill", True):
        plain["max_num_batched_tokens"] = 2048
    if blocks is not None:
        plain |= {"max_model_len": BLOCK * (blocks - 1)}
        plain |= {"kv_cache_memory_bytes": blocks * BLOCK * _kv_bytes()}
    with Engine.from_settings(settings_from(plain)) as engine:
        _slow_down(engine, fault)
        yield engine


def _kv_bytes() -> int:
    from ridgeline.spec.cost import kv_bytes_per_token
    from ridgeline.spec.load import load_spec
    from ridgeline.spec.rewrite import with_dtype

    return kv_bytes_per_token(with_dtype(load_spec(MODEL), "float32"))


def _slow_down(engine: Engine, fault: Injected) -> None:
    """Sleeps inside the engine's own loop, on its own thread."""
    loop = engine._loop
    plan, tell = loop.scheduler.plan, loop._tell

    def slow_plan(now_s: float) -> Any:
        time.sleep(fault.plan_s)
        return plan(now_s)

    def slow_tell(events: Any) -> None:
        tell(events)
        time.sleep(fault.gap_s if loop.scheduler.has_work else 0.0)

    if fault.plan_s:
        loop.scheduler.plan = slow_plan  # type: ignore[method-assign]
    if fault.gap_s:
        loop._tell = slow_tell  # type: ignore[method-assign]


def _burn() -> None:
    while True:
        pass


@contextmanager
def _others(count: int) -> Iterator[None]:
    others = [multiprocessing.Process(target=_burn, daemon=True) for _ in range(count)]
    for each in others:
        each.start()
    try:
        yield
    finally:
        for each in others:
            each.kill()


# ---- measuring -----------------------------------------------------------------------------------


def measured(load: Load, fault: Injected, rate: float, seed: int) -> tuple[RunTrace, BenchOptions]:
    options = load.options(rate, seed=seed, **fault.options)
    with _engine(load, fault) as engine, _others(fault.others):
        run = asyncio.run(run_bench(_Target(engine, fault), options))
    return run, options


def named(
    run: RunTrace, options: BenchOptions, baseline: tuple[StepStat, ...]
) -> list[dict[str, Any]]:
    """What `ridgeline diagnose --baseline` says of the run, the first finding first."""
    shared = shared_of(list(workload_of(options).sample(200, options.seed)))
    found = judged(run, Beside(shared_prompt_share=shared), SLO, learn(baseline))
    return [
        {"verdict": each.verdict, "cause": each.cause, "gain": round(each.gain.mid, 3)}
        for each in found.findings
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--load", action="append", choices=LOADS, help="only this one")
    parser.add_argument("--fault", action="append", help="only this one")
    parser.add_argument("--json", type=Path, required=True, help="where results gather")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no run after so long")
    parser.add_argument("--show", action="store_true", help="print the table, run nothing")
    args = parser.parse_args()
    known: dict[str, Any] = json.loads(args.json.read_text()) if args.json.exists() else {}
    if not args.show:
        began_s = time.monotonic()
        for name in args.load or LOADS:
            for key in _missing(name, args.fault, known):
                if time.monotonic() - began_s < args.seconds:
                    _one(name, key, known)
                    args.json.write_text(json.dumps(known))
    print(_table(known))


def _missing(load: str, chosen: list[str] | None, known: dict[str, Any]) -> list[str]:
    keys = ["rate", "healthy", "healthy again", *(chosen or FAULTS)]
    return [key for key in keys if key not in known.get(load, {})]


def _one(name: str, key: str, known: dict[str, Any]) -> None:
    load, row = LOADS[name], known.setdefault(name, {})
    began_s = time.monotonic()
    if key == "rate":
        run, _ = _closed(load)
        row["rate"] = load.share * len(run.requests) / run.duration_s
        row["steps"] = msgspec.to_builtins(run.steps)
        print(f"{name}: {row['rate']:.2f} requests/s", flush=True)
        return
    fault = FAULTS.get(key, HEALTHY)
    seed = 100 + [*FAULTS, "healthy", "healthy again"].index(key)
    run, options = measured(load, fault, row["rate"], seed)
    steps = msgspec.convert(row["steps"], tuple[StepStat, ...])
    row[key] = named(run, options, steps)
    if key == "healthy":  # an open loop has the steps that a closed one has not
        row["steps"] = msgspec.to_builtins((*steps, *run.steps))
    took_s = time.monotonic() - began_s
    print(f"{name}, {key}: {row[key][:2]} ({took_s:.1f} s)", flush=True)


def _closed(load: Load) -> tuple[RunTrace, BenchOptions]:
    options = load.options(float("inf"), seed=7, max_concurrency=4)
    with _engine(load, HEALTHY) as engine:
        return asyncio.run(run_bench(_Target(engine, HEALTHY), options)), options


def _table(known: dict[str, Any]) -> str:
    lines = ["| fault | truth | " + " | ".join(known) + " |", "|---" * (2 + len(known)) + "|"]
    right = total = 0
    for key in ("healthy", "healthy again", *FAULTS):
        cells = []
        for row in known.values():
            if key not in row:
                cells.append("")
                continue
            truth, told = FAULTS.get(key, HEALTHY).verdict, row[key]
            top = told[0]["verdict"] if told else ""
            right, total = right + (top == truth), total + 1
            cells.append((top or "no finding") + ("" if top == truth else " ✗"))
        truth = FAULTS.get(key, HEALTHY).verdict or "no finding"
        lines.append(f"| {key} | {truth} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", f"right: {right} of {total}"])


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    main()
