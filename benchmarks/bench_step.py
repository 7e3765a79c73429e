"""One decode step of an engine, operator by operator, and what a step costs outside its kernels.

    python benchmarks/bench_step.py [--model dummy:llama-1b-32k] [--quantization int4]
        [--sequences 1,8,64] [--context 128] [--steps 15] [--layer-backend auto] [--json FILE]

The engine's own parts are driven: its scheduler plans, its runner computes, the scheduler commits,
texts are made, as in `engine/loop.py`; every sequence decodes greedily. The native step times its
own operators (`FusedFrame.profile`). Bytes are those an operator must read and write at least once
(weights, or rows), its bound is the larger of bytes over the read rate and multiplications over the
peak, both measured in this run, and "% of bound" is bound / time. Overhead is the step less its
calls of native code.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as `ridgeline` sets it

import torch

import ridgeline._native as _native
from ridgeline.engine.assemble import Parts, assemble
from ridgeline.engine.forward.native import NativeForward
from ridgeline.engine.resolve import Resolved, resolve
from ridgeline.engine.text.events import EventTexts
from ridgeline.records import Ask, Sampling
from ridgeline.settings import settings_from

Spent = dict[str, float]  # seconds by name
NATIVE = ("linear", "linear_quantised", "first_largest", "draw")


@dataclass
class Clock:
    """Seconds by name, of one step."""

    spent: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **named: Any) -> Any:
            begun = time.perf_counter()
            try:
                return call(*args, **named)
            finally:
                self.spent[name] += time.perf_counter() - begun

        return wrapped


class Timed:
    """A step's segment whose runs are timed."""

    def __init__(self, clock: Clock, segment: _native.FusedSegment) -> None:
        self.run_step = clock.timed("segment", segment.run_step)


@dataclass
class Bench:
    """An engine's parts with `num_seqs` sequences that decode for ever."""

    resolved: Resolved
    parts: Parts
    now_s: float = 0.0

    def start(self, num_seqs: int, context: int) -> None:
        vocab = self.resolved.spec.vocab_size
        generator = torch.Generator().manual_seed(num_seqs)
        sampling = Sampling(temperature=0.0, max_tokens=None, ignore_eos=True)
        self.texts = EventTexts(self.parts.tokenizer, lambda *_: [])
        for i in range(num_seqs):
            prompt = tuple(torch.randint(3, vocab, (context,), generator=generator).tolist())
            ask = Ask(id=f"{num_seqs}-{i}", prompt=prompt, sampling=sampling, arrival_s=0.0)
            self.texts.begin(ask)
            self.parts.scheduler.add(ask)
        while any(len(run.tokens) > 1 for run in self.step().runs):
            pass

    def stop(self, num_seqs: int) -> None:
        for i in range(num_seqs):
            self.parts.scheduler.cancel(f"{num_seqs}-{i}", self.now_s)

    def step(self) -> Any:
        self.now_s += 1.0
        plan = self.parts.scheduler.plan(self.now_s)
        result = self.parts.runner.run(plan)
        self.texts.put(self.parts.scheduler.commit(plan, result, self.now_s))
        return plan


@contextmanager
def native_timed(clock: Clock) -> Iterator[None]:
    """Every call of the native module timed by its name, for the Python around it to be left."""
    before = {name: getattr(_native, name) for name in NATIVE}
    for name, call in before.items():
        setattr(_native, name, clock.timed(name, call))
    try:
        yield
    finally:
        for name, call in before.items():
            setattr(_native, name, call)


def seconds(step: Callable[[], object], steps: int) -> float:
    spent = []
    for _ in range(steps):
        begun = time.perf_counter()
        step()
        spent.append(time.perf_counter() - begun)
    return statistics.median(spent)


def overhead(bench: Bench, clock: Clock, steps: int) -> float:
    """Median over steps of what a step takes outside native code."""
    found = []
    with native_timed(clock):
        for _ in range(steps):
            clock.spent.clear()
            begun = time.perf_counter()
            bench.step()
            found.append(time.perf_counter() - begun - sum(clock.spent.values()))
    return statistics.median(found)


def by_operator(bench: Bench, clock: Clock, frame: _native.FusedFrame, steps: int) -> Spent:
    """Median time of each operator of a step."""
    found: dict[str, list[float]] = defaultdict(list)
    frame.profile(True)
    with native_timed(clock):
        for _ in range(steps):
            clock.spent.clear()
            bench.step()
            for name, spent in {**clock.spent, **frame.profile(True)}.items():
                found[name].append(spent)
    frame.profile(False)
    return {name: statistics.median(spent) for name, spent in found.items()}


def work(resolved: Resolved, num_seqs: int, context: int) -> dict[str, tuple[float, float]]:
    """(bytes, multiply-adds) of each operator of a decode step, all layers together."""
    spec, kv = resolved.spec, {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def add(name: str, num_bytes: float, macs: float = 0.0) -> None:
        found[name][0] += num_bytes
        found[name][1] += macs

    for layer in spec.layers:
        attention, mlp = layer.attention, layer.mlp
        heads = attention.num_heads + 2 * attention.num_kv_heads
        wide = mlp.gate.num_out
        for name, linears in {
            "qkv": (attention.q, attention.k, attention.v),
            "o": (attention.o,),
            "gate_up": (mlp.gate, mlp.up),
            "down": (mlp.down,),
        }.items():
            for linear in linears:
                macs = num_seqs * linear.num_in * linear.num_out
                add(name, linear.format.nbytes(linear.num_out, linear.num_in), macs)
        rows = 4.0 * num_seqs
        add("norm+quantise", rows * spec.hidden_size * 6)
        add("gate+quantise", rows * wide * 2.25)
        add("turn, store", rows * heads * attention.head_dim * 2)
        keys = num_seqs * context * attention.num_kv_heads * attention.head_dim * 2
        width = kv[spec.kv_dtype]
        per_key = attention.num_heads // attention.num_kv_heads
        add("attend", keys * width, keys * per_key)
    head = spec.lm_head
    head_bytes = head.format.nbytes(head.num_out, head.num_in)
    add("lm_head", head_bytes, num_seqs * head.num_in * head.num_out)
    add("argmax", 4.0 * num_seqs * spec.vocab_size)
    return {name: (num_bytes, macs) for name, (num_bytes, macs) in found.items()}


def rates(resolved: Resolved) -> tuple[float, dict[str, float]]:
    """Bytes and multiply-adds per second that this machine reaches now."""
    threads = resolved.num_threads
    read = statistics.median(r for r, _ in _native.read_rates(256 << 20, threads, 5, 0.1))
    peaks = {
        kind: statistics.median(r for r, _ in _native.multiply_rates(kind, threads, 5, 0.05)) / 2
        for kind in ("int4", "int16", "float32")
    }
    return read, peaks


KIND = {"int4": "int4", "int8": "int16", "bf16": "float32", "dense": "float32"}


def table(
    resolved: Resolved,
    num_seqs: int,
    context: int,
    spent: dict[str, float],
    whole: float,
    limits: tuple[float, dict[str, float]],
) -> list[dict[str, Any]]:
    """A row per operator, the slowest first."""
    read, peaks = limits
    need = work(resolved, num_seqs, context)
    layer = KIND[resolved.spec.layers[0].mlp.gate.format.kind]
    head = KIND[resolved.spec.lm_head.format.kind]
    alias = {"linear": "lm_head", "first_largest": "argmax"}
    rows = []
    for name, taken in sorted(spent.items(), key=lambda pair: -pair[1]):
        name = alias.get(name, name)
        num_bytes, macs = need.get(name, (0.0, 0.0))
        peak = peaks[head if name == "lm_head" else "float32" if name == "attend" else layer]
        bound = max(num_bytes / read, macs / peak)
        limit = "bytes" if num_bytes / read >= macs / peak else "multiply"
        rows.append(
            {
                "operator": name,
                "ms": taken * 1e3,
                "mb": num_bytes * 1e-6,
                "macs": macs,
                "bound_ms": bound * 1e3,
                "bound_by": limit if bound else "",
                "of_bound": bound / taken,
                "of_step": taken / whole,
            }
        )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    print(
        f"  {'operator':<14} {'ms':>8} {'MB':>8} {'bound ms':>9}"
        f" {'% of bound':>10} {'% of step':>9}"
    )
    for row in rows:
        of_bound = f"{row['of_bound']:.0%}" if row["bound_by"] else ""
        print(
            f"  {row['operator']:<14} {row['ms']:8.3f} {row['mb']:8.2f} {row['bound_ms']:9.3f}"
            f" {of_bound:>10} {row['of_step']:9.0%}"
        )


def measure(bench: Bench, num_seqs: int, context: int, steps: int) -> dict[str, Any]:
    """One row of results for so many sequences."""
    clock, forward = Clock(), bench.parts.runner.decoder.forward
    bench.start(num_seqs, context)
    seconds(bench.step, 3)
    whole = seconds(bench.step, steps)
    outside: float | None = None
    rows: list[dict[str, Any]] = []
    limits = rates(bench.resolved)
    if isinstance(forward, NativeForward) and forward.whole is not None:
        whole_step = forward.whole
        timed: Any = Timed(clock, whole_step.segment)
        forward.whole = dataclasses.replace(whole_step, segment=timed)
        outside = overhead(bench, clock, steps)
        forward.whole = whole_step
        spent = by_operator(bench, clock, forward.frame, steps)
        rows = table(bench.resolved, num_seqs, context, spent, whole, limits)
    bench.stop(num_seqs)
    print(f"{num_seqs} sequences of {context}: step {whole * 1e3:.3f} ms", end="")
    print("" if outside is None else f", outside native code {outside * 1e3:.3f} ms")
    show(rows)
    measured = {"read_bytes_s": limits[0], "peak_macs_s": limits[1], "operators": rows}
    return {"sequences": num_seqs, "step_s": whole, "outside_s": outside, **measured}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="dummy:llama-1b-32k")
    parser.add_argument("--quantization", default="int4")
    parser.add_argument("--lm-head-quantization", default=None)
    parser.add_argument("--sequences", default="1,8,64")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--layer-backend", default="auto")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", type=Path, default=None)
    asked = parser.parse_args()
    settings = settings_from(
        {
            "model": asked.model,
            "quantization": None if asked.quantization == "none" else asked.quantization,
            "lm_head_quantization": asked.lm_head_quantization,
            "layer_backend": asked.layer_backend,
            "num_threads": asked.threads,
            "max_model_len": asked.context + 8 * asked.steps + 16,
            "max_num_seqs": max(map(int, asked.sequences.split(","))),
            "enable_prefix_caching": False,
        }
    )
    resolved = resolve(settings)
    torch.set_num_threads(resolved.num_threads)
    bench = Bench(resolved, assemble(resolved))
    print(
        f"{asked.model} {asked.quantization}, {resolved.num_threads} threads, "
        f"layers {resolved.layer_backend}"
    )
    found = [measure(bench, int(n), asked.context, asked.steps) for n in asked.sequences.split(",")]
    line = {"model": asked.model, "quantization": asked.quantization, "results": found}
    print(json.dumps(line))
    if asked.json:
        asked.json.write_text(json.dumps(line, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
