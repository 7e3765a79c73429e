"""An engine on the bench: single kinds of steps of Ridgeline's own engine, timed one after another.

Long contexts are not computed: their blocks are entered into the prefix cache, over a cache filled
with noise, so that a decode reads what it would read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from statistics import median

import numpy as np
import torch

from ridgeline.config.settings import Settings
from ridgeline.engine.build import EngineParts, assemble
from ridgeline.engine.config import resolve
from ridgeline.engine.engine import Engine
from ridgeline.measure.client.engine_target import InProcessTarget
from ridgeline.measure.client.target import Recorder
from ridgeline.measure.workload.base import LoadRequest
from ridgeline.plan.simulate.fast_forward_decode import insert_transferred_kv
from ridgeline.records import RequestTrace, Sampling, StepStat

DECODE_STEPS = 5
SHORT_S, AIM_S, MOST_STEPS = 0.04, 0.25, 80  # shorter steps are measured over a quarter of a second
_NOISE = 4096
Asking = Callable[[Sequence[tuple[int, ...]], int], None]


class Rig:
    """An engine at rest between measurements; `engine` is the real one, thread and all."""

    def __init__(self, engine: Engine, parts: EngineParts, seed: int) -> None:
        self.engine, self._parts = engine, parts
        self._rng = np.random.default_rng(seed)
        for layer in parts.runner.cache.layers:
            _fill(layer)

    def prompt(self, num_tokens: int) -> tuple[int, ...]:
        vocab_size = self.engine.resolved.spec.vocab_size
        return tuple(self._rng.integers(3, vocab_size, num_tokens).tolist())

    def decode(self, batch: int, context: int) -> Measured:
        """Decode steps of `batch` sequences that begin at `context` tokens, read at the end."""
        return self._often(batch, context, self._wait)

    def streamed(self, batch: int, context: int) -> Measured:
        """As `decode`, every token read as it comes by an event loop in this process: its work and
        the engine's take turns at the interpreter."""
        return self._often(batch, context, self._read)

    def _often(self, batch: int, context: int, ask: Asking) -> Measured:
        found = self._decode(batch, context, DECODE_STEPS, ask)
        if found.seconds > SHORT_S:
            return found
        return self._decode(batch, context, min(MOST_STEPS, int(AIM_S / found.seconds)), ask)

    def _decode(self, batch: int, context: int, steps: int, ask: Asking) -> Measured:
        prompts = [self.prompt(context) for _ in range(batch)]
        for prompt in prompts:
            self._remember(prompt)
        # the first sequences may be a few steps ahead of the last ones
        num_tokens = steps + 2 + batch * 16 // 256
        self.engine.drain_steps()
        ask(prompts, num_tokens)
        full = [
            (step, took_s)
            for step, took_s in _periods(self.engine.drain_steps())
            if len(step.shapes) == batch and all(new == 1 for new, _ in step.shapes)
        ]
        return Measured.of(full[1:])

    def _wait(self, prompts: Sequence[tuple[int, ...]], num_tokens: int) -> None:
        self.engine.generate(prompts, _answer(num_tokens))

    def _read(self, prompts: Sequence[tuple[int, ...]], num_tokens: int) -> None:
        asyncio.run(self._streams(prompts, num_tokens))

    async def _streams(
        self, prompts: Sequence[tuple[int, ...]], num_tokens: int
    ) -> list[RequestTrace]:
        """What a client of `bench` does with each."""
        target = InProcessTarget(self.engine)

        async def one(number: int, prompt: tuple[int, ...]) -> RequestTrace:
            request = LoadRequest(
                id=f"rig-{number}", kind="rig", prompt=prompt, max_tokens=num_tokens
            )
            record, sent_s = Recorder(time.perf_counter), time.perf_counter()
            await target.send(request, record)
            return record.trace(request, sent_s, sent_s)

        return await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(prompts)))

    def first(self, num_tokens: int, cached: int = 0) -> Measured:
        """The step of a prompt's last `num_tokens` tokens, `cached` being in the cache already."""
        prompt = self.prompt(num_tokens + cached)
        if cached:
            self._remember(prompt[: cached + 1])
        self.engine.drain_steps()
        self.engine.generate([prompt], _answer(3))
        return Measured.of(_periods(self.engine.drain_steps())[:1])

    def ttft_s(self, num_tokens: int) -> float:
        """Seconds from asking an idle engine to having its answer of one token."""
        prompt = self.prompt(num_tokens)
        began_s = time.perf_counter()
        self.engine.generate([prompt], _answer(1))
        return time.perf_counter() - began_s

    def streamed_ttft_s(self, num_tokens: int) -> float:
        """Seconds from asking an idle engine to reading the first token on an event loop."""
        prompt = self.prompt(num_tokens)

        async def once() -> float:
            await asyncio.sleep(0.01)  # the loop is up
            (trace,) = await self._streams([prompt], 4)
            return trace.token_s[0] - trace.sent_s

        return asyncio.run(once())

    def _remember(self, prompt: Sequence[int]) -> None:
        insert_transferred_kv(self._parts.scheduler, tuple(prompt), "", time.perf_counter())


class Measured:
    """Equal steps: the shapes of the middle one, the median of their seconds."""

    def __init__(self, shapes: tuple[tuple[int, int], ...], sampled: int, seconds: float) -> None:
        self.shapes, self.num_sampled, self.seconds = shapes, sampled, seconds

    @staticmethod
    def of(steps: Sequence[tuple[StepStat, float]]) -> Measured:
        middle = steps[len(steps) // 2][0]
        return Measured(middle.shapes, middle.num_sampled, median(took_s for _, took_s in steps))


@contextmanager
def rig(settings: Settings, seed: int = 0) -> Iterator[Rig]:
    """Open an engine for measurements; closed at the end."""
    resolved = resolve(settings)
    torch.set_num_threads(resolved.num_threads)
    parts = assemble(resolved)
    with Engine(resolved, parts) as engine:
        yield Rig(engine, parts, seed)


def _periods(steps: Sequence[StepStat]) -> list[tuple[StepStat, float]]:
    """Each step with the time until the next one began: everything that a step costs."""
    return [(a, b.at_s - a.at_s) for a, b in pairwise(steps)]


def _answer(num_tokens: int) -> Sampling:
    return Sampling(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def _fill(layer: torch.Tensor) -> None:
    """Small numbers everywhere: memory that was never written would be one page of zeros."""
    flat = layer.view(-1)
    if flat.dtype.is_floating_point:
        noise = torch.randn(_NOISE).mul_(0.1).to(flat.dtype)
    else:
        noise = torch.randint(0, 64, (_NOISE,)).to(flat.dtype)
    whole = len(flat) // _NOISE * _NOISE
    flat[:whole].view(-1, _NOISE).copy_(noise)
    flat[whole:] = noise[: len(flat) - whole]
