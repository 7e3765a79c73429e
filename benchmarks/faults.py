"""Faults for `bench_faults.py`: each is put into a real engine or around it, and its name is known.

A limit is a setting; a slow part is a sleep where that part is called; a neighbour is a process on
one of the cores; a poor client is a client whose event loop is held up, or with few connections.
Diagnosis sees nothing of this file: only what the engine, the client and the clock record.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ridgeline.engine.engine import Engine
from ridgeline.records import EngineInfo, Event, Sampling

BLOCK = 16
VISITOR_TOKENS, VISIT_EVERY_S = 800, 0.5
BUSY_S, BREATH_S = 0.35, 0.02  # of a client's loop: held up, and at work


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """What the healthy engine does of one workload here. `capacity` in requests per second at many
    sequences; `step_s`, `tpot_s` medians at the usual load; `piece_s` of a step that computes as
    much of a long prompt as the budget lets it; tokens: the longest request's, and the means of
    prompt and output; `block_bytes` of one KV block.
    """

    capacity: float
    step_s: float
    tpot_s: float
    piece_s: float
    longest: int
    shared: int
    own: int
    block_bytes: int


class Wrapped:
    """An engine wrapper that delays requests in a simulated tokenizer."""

    def __init__(self, engine: Engine, tokenizer_s: float = 0.0) -> None:
        self._engine, self._tokenizer_s = engine, tokenizer_s
        self._tokenizer = asyncio.Lock()

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    def drain_steps(self) -> Any:
        return self._engine.drain_steps()

    async def stream(
        self, prompt: str | Sequence[int], sampling: Sampling, **terms: Any
    ) -> AsyncGenerator[Event, None]:
        """One tokenizer, in a separate thread, serves all requests in order."""
        if self._tokenizer_s:
            async with self._tokenizer:
                await asyncio.to_thread(time.sleep, self._tokenizer_s)
        async with aclosing(self._engine.stream(prompt, sampling, **terms)) as events:
            async for event in events:
                yield event


During = Callable[[Engine, Pace], AbstractContextManager[None]]
Background = Callable[[Engine], Coroutine[Any, Any, None]]


def _nothing(engine: Engine, pace: Pace) -> AbstractContextManager[None]:
    return nullcontext()


def _zero(rate: float) -> float:
    return 0.0


@dataclass(frozen=True)
class Fault:
    """An injected fault and its true verdict ("or": either of two). `load`: offered,
    over the capacity; `settings` of the engine; `options` of the client; `during` holds while the
    load runs; `tokenizer_s` by the offered rate; `background`: a coroutine on the client's loop;
    `tpot_s`: the TPOT limit, from the usual pace; None: reading speed.
    """

    name: str
    verdict: str | None
    load: float = 0.5
    settings: Callable[[Pace], dict[str, Any]] = field(default=lambda pace: {})
    options: Callable[[Pace], dict[str, Any]] = field(default=lambda pace: {})
    during: During = _nothing
    tokenizer_s: Callable[[float], float] = _zero
    background: Background | None = None
    tpot_s: Callable[[Pace], float] | None = None


# ---- what holds while the load runs ------------------------------------------------------------


@contextmanager
def _sleep_in_plan(engine: Engine, pace: Pace) -> Iterator[None]:
    scheduler = engine._loop.scheduler
    plan = scheduler.plan

    def slower(now_s: float) -> Any:
        time.sleep(pace.step_s)
        return plan(now_s)

    scheduler.plan = slower  # type: ignore[method-assign]
    yield
    scheduler.plan = plan  # type: ignore[method-assign]


@contextmanager
def _sleep_between_steps(engine: Engine, pace: Pace) -> Iterator[None]:
    loop = engine._loop
    take_in = loop._take_in

    def slower() -> bool:
        time.sleep(pace.step_s)
        return take_in()

    loop._take_in = slower  # type: ignore[method-assign]
    yield
    loop._take_in = take_in  # type: ignore[method-assign]


@contextmanager
def _burner(engine: Engine, pace: Pace) -> Iterator[None]:
    """A process that never sleeps, on the last of the cores."""
    core = max(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        try:
            yield
        finally:
            process.kill()


async def _hold_up(engine: Engine) -> None:
    """A client that does something else on its event loop most of the time."""
    while True:
        await asyncio.sleep(BREATH_S)
        time.sleep(BUSY_S)


def visitor(rng: random.Random) -> list[int]:
    """A long prompt that is in no cache."""
    return rng.choices(range(16, 2048), k=VISITOR_TOKENS)


async def _visitors(engine: Engine) -> None:
    """Long prompts of another client, one after the other, outside the measured load."""
    rng = random.Random(0)
    while True:
        prompt = visitor(rng)
        async for _ in engine.stream(prompt, Sampling(temperature=0.0, max_tokens=2)):
            pass
        await asyncio.sleep(VISIT_EVERY_S)


# ---- the faults --------------------------------------------------------------------------------


def _blocks_for(num_sequences: float) -> Callable[[Pace], dict[str, Any]]:
    """KV blocks for the shared prefixes and the unshared tokens of `num_sequences` requests; at
    least as many as the longest request needs, because the engine would reject fewer.
    """

    def settings(pace: Pace) -> dict[str, Any]:
        wanted = -(-pace.shared // BLOCK) + round(num_sequences * -(-pace.own // BLOCK))
        least = -(-pace.longest // BLOCK) + 2
        num_blocks = max(wanted, least)
        return {
            "kv_cache_memory_bytes": num_blocks * pace.block_bytes,
            "max_model_len": (least - 1) * BLOCK,
        }

    return settings


def _set(**settings: Any) -> Callable[[Pace], dict[str, Any]]:
    return lambda pace: settings


PIECES = 2.5
"""TPOT limit with long prompts, in chunks: above one chunk and below a whole prompt, which
has more than six (a fast machine reads the demo's longest prompt unnoticed)."""


def _long_prompt_tpot_s(pace: Pace) -> float:
    return PIECES * pace.piece_s


HEALTHY = (
    *(Fault(f"healthy at {load:.0%} of its capacity", None, load) for load in (0.3, 0.5, 0.6)),
    Fault(
        "healthy, with long prompts", None, 0.3, background=_visitors, tpot_s=_long_prompt_tpot_s
    ),
)

FAULTS = (
    Fault("one core of two taken away", "machine-bound", 0.3, during=_burner),
    Fault("few KV blocks", "kv-capacity-bound", 0.85, settings=_blocks_for(2)),
    Fault("hardly any KV block", "kv-capacity-bound", 0.7, settings=_blocks_for(1)),
    Fault("two slots", "queue-bound", 0.6, settings=_set(max_num_seqs=2)),
    Fault("one slot", "queue-bound", 0.6, settings=_set(max_num_seqs=1)),
    Fault("twice what can be served", "overload-bound", 2.0),
    Fault(
        "static batches of eight", "queue-bound", settings=_set(batching="static", max_num_seqs=8)
    ),
    Fault("no prefix cache", "prefix-miss-bound", settings=_set(enable_prefix_caching=False)),
    Fault("a slow tokenizer", "host-overhead-bound", tokenizer_s=lambda rate: 0.8 / rate),
    Fault("a client with one connection", "client-bound", 0.6, options=_set(max_concurrency=1)),
    Fault("a client that is busy elsewhere", "client-bound", 0.3, background=_hold_up),
    Fault("a sleep in the scheduler", "host-overhead-bound", 0.3, during=_sleep_in_plan),
    Fault("held up between steps", "host-overhead-bound", 0.3, during=_sleep_between_steps),
    Fault(
        "prompts in one piece",
        "scheduling-interference-bound",
        0.3,
        background=_visitors,
        settings=_set(enable_chunked_prefill=False, max_num_batched_tokens=2048),
        tpot_s=_long_prompt_tpot_s,
    ),
    Fault(
        "a token budget of six",
        "prefill-compute-bound",
        0.6,
        settings=_set(max_num_batched_tokens=6, max_num_seqs=6),
    ),
    Fault(
        "too many sequences per step",
        "over-batching-bound or overload-bound",  # half as much again is offered as can be served
        1.5,
        settings=_set(max_num_seqs=64, max_num_batched_tokens=512),
        tpot_s=lambda pace: 1.5 * pace.tpot_s,
    ),
)
