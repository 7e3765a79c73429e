"""CPU time of the Python around the kernels: a decode step by phase, a streamed token on the loop.

    python benchmarks/bench_host.py [--model demo] [--quantization int4] [--sequences 1,64]
        [--steps 80] [--warm] [--streams 32] [--drafts 4]

The clock is the thread's CPU time, so that a busy machine disturbs it less than wall time. A model
of a few million weights leaves its caches warm, a large one never does: after each step's segment
64 MB are read, as a large model's weights would be (`--warm`: not). Kernels and that reading are
subtracted. With `--drafts` every sequence carries that many wrong guesses; "by tensors": the same,
kept from the greedy step's short way. A streamed token: from the engine's events on the event loop
to the bytes of the chunk, without the socket. Prints microseconds, medians (least), then one JSON
line.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch

import ridgeline._native as _native
from ridgeline.config.settings import settings_from
from ridgeline.engine.build import assemble
from ridgeline.engine.config import resolve
from ridgeline.engine.event_delivery import AsyncInboxes
from ridgeline.engine.execution.greedy_fast_path import NoGreedyPath
from ridgeline.engine.profiling.profile import StepDriver
from ridgeline.engine.scheduler.plan import Run
from ridgeline.engine.scheduler.speculation.base import (
    DraftContext,
    DraftOutcome,
    DraftProposer,
    NoDrafts,
    StepCapacity,
)
from ridgeline.records import Event, Sampling, Token
from ridgeline.serve.generation.event_stream import EventStreamResponse
from ridgeline.serve.generation.request import GenerationRequest, TokenPrompt
from ridgeline.serve.generation.stream import ResponseStream
from ridgeline.serve.metrics.registry import Metrics
from ridgeline.serve.openai.completion_stream import CompletionStream
from ridgeline.serve.openai.schemas import CompletionRequest

Row = dict[str, tuple[float, float]]


NATIVE = ("linear", "linear_quantised", "first_largest", "draw")


class CpuClock:
    """Seconds of this thread's CPU that were spent in native code."""

    def __init__(self, evict: Callable[[], object]) -> None:
        self.native_s, self._evict = 0.0, evict

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **named: Any) -> Any:
            begun = time.thread_time()
            try:
                return call(*args, **named)
            finally:
                if name == "segment":
                    self._evict()
                self.native_s += time.thread_time() - begun

        return wrapped


class Timed:
    """A step's segment whose runs are timed."""

    def __init__(self, clock: CpuClock, segment: _native.FusedSegment) -> None:
        self.run_step = clock.timed("segment", segment.run_step)


@contextmanager
def native_timed(clock: CpuClock) -> Iterator[None]:
    """Every call of the native module timed, for the Python around it to be left."""
    before = {name: getattr(_native, name) for name in NATIVE}
    for name, call in before.items():
        setattr(_native, name, clock.timed(name, call))
    try:
        yield
    finally:
        for name, call in before.items():
            setattr(_native, name, call)


def row_of(spent: dict[str, list[float]]) -> Row:
    """(median, least) microseconds by name."""
    return {
        name: (round(statistics.median(each) * 1e6, 1), round(min(each) * 1e6, 1))
        for name, each in spent.items()
    }


def steps(
    bench: StepDriver,
    clock: CpuClock,
    num_seqs: int,
    num_steps: int,
    drafts: DraftProposer | None = None,
) -> Row:
    """A decode step of `num_seqs` greedy sequences, by phase."""
    scheduler, runner, now = bench.parts.scheduler, bench.parts.runner, time.thread_time
    spent: dict[str, list[float]] = defaultdict(list)
    ids = bench.start_decoding(num_seqs, 128)
    scheduler.draft_scheduler._proposer = drafts or NoDrafts()
    for _ in range(num_steps):
        bench.now_s += 1.0
        clock.native_s, at = 0.0, [now()]
        plan = scheduler.plan(bench.now_s)
        at.append(now())
        result = runner.run(plan)
        at.append(now() - clock.native_s)
        committed = now()
        events = scheduler.commit(plan, result, bench.now_s)
        at.append(at[-1] + now() - committed)
        delivered = now()
        bench.texts.add_texts(events)
        at.append(at[-1] + now() - delivered)
        for name, begun, ended in zip(("plan", "run", "commit", "texts"), at, at[1:], strict=False):
            spent[name].append(ended - begun)
        spent["step"].append(at[-1] - at[0])
    for request_id in ids:
        bench.end(request_id)
    scheduler.draft_scheduler._proposer = NoDrafts()
    return row_of(spent)


class Wrong:
    """Drafts that are hardly ever accepted."""

    def __init__(self, depth: int) -> None:
        self._draft = (7,) * depth

    def should_propose(self, runs: Sequence[Run]) -> bool:
        return True

    def alternatives(self, seq_id: int) -> Sequence[tuple[int, ...]]:
        return ()

    def propose(
        self, contexts: Sequence[DraftContext], room: StepCapacity
    ) -> list[tuple[int, ...]]:
        return [self._draft] * len(contexts)

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        pass

    def forget(self, seq_id: int, tokens: Sequence[int], tenant: str) -> None:
        pass

    def counters(self) -> dict[str, float]:
        return {}


def drafted(bench: StepDriver, clock: CpuClock, num_seqs: int, asked: argparse.Namespace) -> Row:
    """The same with drafts, step by step the short way and by tensors."""
    runner, wrong = bench.parts.runner, Wrong(asked.drafts)
    row, short = steps(bench, clock, num_seqs, asked.steps, wrong), runner.greedy
    runner.greedy = NoGreedyPath()
    slow = steps(bench, clock, num_seqs, asked.steps, wrong)
    runner.greedy = short
    return row | {f"{what} by tensors": us for what, us in slow.items()}


class Listening:
    """An engine with made-up events: the part that `ResponseStream` and `Metrics` use."""

    def __init__(self, inboxes: AsyncInboxes) -> None:
        self._inboxes = inboxes

    async def listen(
        self, _prompt: object, sampling: Sampling, sink: Any, *, request_id: str, **_terms: object
    ) -> Callable[[], None]:
        self._inboxes.open(request_id, sink, sampling.n)
        return lambda: None

    def decode(self, _tokens: Sequence[int]) -> str:
        raise AssertionError("nothing is echoed")


async def streams(num_streams: int, num_steps: int) -> Row:
    """A token of a streamed completion, `num_streams` of them to a step."""
    inboxes = AsyncInboxes(asyncio.get_running_loop())
    engine = cast("Any", Listening(inboxes))
    metrics = Metrics(engine, "model")
    ids, tasks = [f"cmpl-{i:032x}" for i in range(num_streams)], []
    body = CompletionRequest(prompt="a")

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(_message: object) -> None:
        pass

    for request_id in ids:
        prompt, sampling = TokenPrompt((1,), "a"), Sampling(temperature=0.0)
        request = GenerationRequest(id=request_id, prompts=[prompt], sampling=sampling)
        stream = ResponseStream(engine, request, metrics)
        serializer = CompletionStream(body, stream, "model", engine)
        response = EventStreamResponse(stream, serializer, {})
        tasks.append(asyncio.create_task(response({}, receive, send)))
    await asyncio.sleep(0)
    spent: dict[str, list[float]] = defaultdict(list)
    for _ in range(num_steps):
        at_s = metrics.now()
        events: Sequence[Event] = [
            Token(request_id=request_id, index=0, token=5, text=" hello", at_s=at_s)
            for request_id in ids
        ]
        inboxes._pending.append(events)
        begun = time.thread_time()
        inboxes._spread()
        await asyncio.sleep(0)  # every response wakes up, and sends its chunk
        spent["streamed token"].append((time.thread_time() - begun) / num_streams)
    for task in tasks:
        task.cancel()
    return row_of(spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--quantization", default="int4")
    parser.add_argument("--sequences", default="1,64")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--drafts", type=int, default=0)
    asked = parser.parse_args()
    counts = [int(count) for count in asked.sequences.split(",")]
    quantization = None if asked.quantization == "none" else asked.quantization
    wanted = {"model": asked.model, "quantization": quantization, "num_threads": 1}
    more = {"max_model_len": 1024, "max_num_seqs": max(counts), "enable_prefix_caching": False}
    resolved = resolve(settings_from(wanted | more))
    torch.set_num_threads(1)
    bench = StepDriver(assemble(resolved), resolved.spec.vocab_size)
    large = np.ones(0 if asked.warm else 8 << 20)
    clock = CpuClock(large.sum)
    forward: Any = bench.parts.runner.decoder.forward
    for request_id in bench.start_decoding(1, 128):
        bench.end(request_id)
    segment: Any = Timed(clock, forward.whole.segment)
    forward.whole = dataclasses.replace(forward.whole, segment=segment)
    found: dict[str, Row] = {}
    with native_timed(clock):
        for count in counts:
            found[f"{count} sequences"] = steps(bench, clock, count, asked.steps)
            if asked.drafts:
                name = f"{count} sequences, {asked.drafts} drafts each"
                found[name] = drafted(bench, clock, count, asked)
    found[f"{asked.streams} streams"] = asyncio.run(streams(asked.streams, asked.steps))
    for name, row in found.items():
        print(name, " · ".join(f"{what} {us} ({least})" for what, (us, least) in row.items()))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
