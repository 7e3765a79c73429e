"""Time single kinds of steps of Ridgeline's own engine, one after another.

Long contexts are not computed: their blocks are entered into the prefix cache, and the KV cache is
filled with noise, so that a decode step reads as many bytes as it would after a real prefill.
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
from ridgeline.measure.client.engine_target import EngineTarget
from ridgeline.measure.client.target import Recorder
from ridgeline.measure.workload.base import LoadRequest
from ridgeline.plan.simulate.fast_forward_decode import insert_transferred_kv
from ridgeline.records import RequestTrace, Sampling, StepStat

DECODE_STEPS = 5
# Steps shorter than SHORT_STEP_S are repeated for TARGET_S, but no more than MAX_STEPS times.
SHORT_STEP_S, TARGET_S, MAX_STEPS = 0.04, 0.25, 80
_NOISE_VALUES = 4096
Generate = Callable[[Sequence[tuple[int, ...]], int], None]


class StepBench:
    """An open engine, idle between measurements."""

    def __init__(self, engine: Engine, parts: EngineParts, seed: int) -> None:
        self.engine, self._parts = engine, parts
        self._captured: set[int] | None = set() if engine.info.device.startswith("cuda") else None
        self._rng = np.random.default_rng(seed)
        for layer in parts.runner.cache.layers:
            _fill_with_noise(layer)

    def random_prompt(self, num_tokens: int) -> tuple[int, ...]:
        vocab_size = self.engine.resolved.spec.vocab_size
        return tuple(self._rng.integers(3, vocab_size, num_tokens).tolist())

    def decode(self, batch: int, context: int) -> StepTiming:
        """Decode steps of `batch` sequences from `context` tokens on, without streaming."""
        return self._repeat_decode(batch, context, self._generate_blocking)

    def streamed_decode(self, batch: int, context: int) -> StepTiming:
        """As `decode`, with every token read by an event loop in this process as it comes.

        The loop and the engine share the interpreter.
        """
        return self._repeat_decode(batch, context, self._generate_streaming)

    def _repeat_decode(self, batch: int, context: int, generate: Generate) -> StepTiming:
        timing = self._decode(batch, context, DECODE_STEPS, generate)
        if timing.seconds > SHORT_STEP_S:
            return timing
        steps = min(MAX_STEPS, int(TARGET_S / timing.seconds))
        return self._decode(batch, context, steps, generate)

    def _decode(self, batch: int, context: int, steps: int, generate: Generate) -> StepTiming:
        prompts = [self.random_prompt(context) for _ in range(batch)]
        for prompt in prompts:
            self._insert_into_cache(prompt)
        # the first sequences may be a few steps ahead of the last ones
        num_tokens = steps + 2 + batch * 16 // 256
        self.engine.drain_steps()
        generate(prompts, num_tokens)
        full = [
            (step, step_s)
            for step, step_s in _periods(self.engine.drain_steps())
            if len(step.shapes) == batch and all(new == 1 for new, _ in step.shapes)
        ]
        return StepTiming.of(full[1:])

    def _generate_blocking(self, prompts: Sequence[tuple[int, ...]], num_tokens: int) -> None:
        self.engine.generate(prompts, _greedy(num_tokens))

    def _generate_streaming(self, prompts: Sequence[tuple[int, ...]], num_tokens: int) -> None:
        asyncio.run(self._streams(prompts, num_tokens))

    async def _streams(
        self, prompts: Sequence[tuple[int, ...]], num_tokens: int
    ) -> list[RequestTrace]:
        """Stream every prompt as the client of `bench` does."""
        target = EngineTarget(self.engine)

        async def stream(number: int, prompt: tuple[int, ...]) -> RequestTrace:
            request = LoadRequest(
                id=f"step-bench-{number}", kind="step-bench", prompt=prompt, max_tokens=num_tokens
            )
            record, sent_s = Recorder(time.perf_counter), time.perf_counter()
            await target.send(request, record)
            return record.to_trace(request, sent_s, sent_s)

        return await asyncio.gather(*(stream(i, prompt) for i, prompt in enumerate(prompts)))

    def prefill(self, num_tokens: int, cached: int = 0) -> StepTiming:
        """The step of a prompt's last `num_tokens` tokens, after `cached` ones.

        On a GPU the first step of a size captures graphs: it is repeated.
        """
        if self._captured is not None and num_tokens not in self._captured:
            self._captured.add(num_tokens)
            self.prefill(num_tokens, cached)
        prompt = self.random_prompt(num_tokens + cached)
        if cached:
            self._insert_into_cache(prompt[: cached + 1])
        self.engine.drain_steps()
        self.engine.generate([prompt], _greedy(3))
        return StepTiming.of(_periods(self.engine.drain_steps())[:1])

    def ttft_s(self, num_tokens: int) -> float:
        """Seconds from a request to an idle engine to its output of one token."""
        prompt = self.random_prompt(num_tokens)
        start_s = time.perf_counter()
        self.engine.generate([prompt], _greedy(1))
        return time.perf_counter() - start_s

    def streamed_ttft_s(self, num_tokens: int) -> float:
        """Seconds from a request to an idle engine to its first token on an event loop."""
        prompt = self.random_prompt(num_tokens)

        async def once() -> float:
            await asyncio.sleep(0.01)  # let the loop start
            (trace,) = await self._streams([prompt], 4)
            return trace.token_s[0] - trace.sent_s

        return asyncio.run(once())

    def _insert_into_cache(self, prompt: Sequence[int]) -> None:
        insert_transferred_kv(self._parts.scheduler, tuple(prompt), "", time.perf_counter())


class StepTiming:
    """Steps of one kind: the shapes of the middle one, and their median seconds."""

    def __init__(self, shapes: tuple[tuple[int, int], ...], sampled: int, seconds: float) -> None:
        self.shapes, self.num_sampled, self.seconds = shapes, sampled, seconds

    @staticmethod
    def of(steps: Sequence[tuple[StepStat, float]]) -> StepTiming:
        middle = steps[len(steps) // 2][0]
        seconds = median(step_s for _, step_s in steps)
        return StepTiming(middle.shapes, middle.num_sampled, seconds)


@contextmanager
def open_step_bench(settings: Settings, seed: int = 0) -> Iterator[StepBench]:
    """Open an engine for measurements; it is closed at the end."""
    resolved = resolve(settings)
    torch.set_num_threads(resolved.num_threads)
    parts = assemble(resolved)
    with Engine(resolved, parts) as engine:
        yield StepBench(engine, parts, seed)


def _periods(steps: Sequence[StepStat]) -> list[tuple[StepStat, float]]:
    """Each step with the time until the next one starts: everything that a step costs."""
    return [(a, b.at_s - a.at_s) for a, b in pairwise(steps)]


def _greedy(num_tokens: int) -> Sampling:
    return Sampling(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def _fill_with_noise(layer: torch.Tensor) -> None:
    """Write small numbers everywhere: memory never written is a single page of zeros."""
    flat = layer.view(-1)
    if flat.dtype.is_floating_point:
        noise = torch.randn(_NOISE_VALUES).mul_(0.1).to(flat.dtype)
    else:
        noise = torch.randint(0, 64, (_NOISE_VALUES,)).to(flat.dtype)
    whole = len(flat) // _NOISE_VALUES * _NOISE_VALUES
    flat[:whole].view(-1, _NOISE_VALUES).copy_(noise)
    flat[whole:] = noise[: len(flat) - whole]
