"""The engine: one model, one thread that computes, and three ways to ask.

    with Engine.open("demo") as engine:
        engine.generate(["def add(a, b):"], Sampling(max_tokens=32))      a batch, blocking
        async for event in engine.stream("import os", Sampling()): ...    one request, token by token
    ridgeline.generate("demo", "def add(a, b):")                          one line

Instants are seconds on the engine's clock (`clock`, by default `time.perf_counter`).
"""

from __future__ import annotations

import ridgeline.engine.import_torch  # noqa: F401  # before all that imports torch

# isort: split
import asyncio
import itertools
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from ridgeline.config.settings import Settings, settings_from
from ridgeline.engine.build import EngineParts, assemble
from ridgeline.engine.completion import Completion, CompletionBuilder
from ridgeline.engine.config import ResolvedSettings, resolve
from ridgeline.engine.engine_loop import EngineLoop
from ridgeline.engine.event_delivery import AsyncInboxes, BlockingInbox, Inbox, Sink
from ridgeline.engine.profiling.step_stats import StepTotals
from ridgeline.engine.scheduler.admission.queue_limits import QueueLimiter, QueueLimits
from ridgeline.engine.validate import check_sampling, check_tokens
from ridgeline.modelspec.cost import cost_model, kv_bytes_per_token
from ridgeline.records import (
    EngineInfo,
    Event,
    Failed,
    Finished,
    Request,
    Sampling,
    Slo,
    StepStat,
)

STALL_S = 120.0
"""Work that has been due for so long without one step done: the engine hangs."""

Prompt = str | Sequence[int]


class Engine:
    """See the head of this file. Close it, or use it as a context manager."""

    def __init__(
        self,
        resolved: ResolvedSettings,
        parts: EngineParts,
        *,
        clock: Callable[[], float] = time.perf_counter,
        load_s: float = 0.0,
    ) -> None:
        self.resolved, self.tokenizer, self.load_s = resolved, parts.tokenizer, load_s
        self._info = _info(resolved, parts, load_s)
        self._runner, self._masks, self._clock = parts.runner, parts.masks, clock
        # no id that a caller makes up is one of these, whichever of both comes first
        self._ids = map(f"ask-{uuid.uuid4().hex}-{{}}".format, itertools.count())
        self._inboxes: dict[asyncio.AbstractEventLoop, AsyncInboxes] = {}
        self._loop = EngineLoop(
            parts.scheduler,
            parts.runner,
            parts.tokenizer,
            clock=clock,
            on_start=partial(torch.set_num_threads, resolved.num_threads),
            totals=StepTotals(cost_model(resolved.spec), resolved.max_num_batched_tokens),
            queue_limiter=QueueLimiter(_queue_limits(resolved)),
        )

    @staticmethod
    def open(model: str = "demo", **settings: Any) -> Engine:
        """Load `model` with settings by name (`ridgeline.config.settings.Settings`)."""
        return Engine.from_settings(settings_from({"model": model, **settings}))

    @staticmethod
    def from_settings(
        settings: Settings, *, clock: Callable[[], float] = time.perf_counter
    ) -> Engine:
        """Resolve, load and start. Raises BadModel, BadInput, CannotRun, DoesNotFit."""
        began_s = clock()
        resolved = resolve(settings)
        torch.set_num_threads(resolved.num_threads)
        parts = assemble(resolved, clock)
        return Engine(resolved, parts, clock=clock, load_s=clock() - began_s)

    # -- asking

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling | Sequence[Sampling] | None = None
    ) -> list[Completion]:
        """Answer every prompt, batched as the engine sees fit; blocks. One sampling, or one each.

        Raises before anything runs where one prompt is bad; EngineUnavailable where one fails.
        """
        each = (
            sampling if isinstance(sampling, Sequence) else [sampling or Sampling()] * len(prompts)
        )
        requests = [self._make_request(p, s) for p, s in zip(prompts, each, strict=True)]
        builders = {request.id: CompletionBuilder(request) for request in requests}
        inbox, waiting = BlockingInbox(), set(builders)
        for structured in {request.sampling.structured for request in requests}:
            if structured is not None:
                self._masks.prepare(structured)
        try:
            for request in requests:
                self._loop.submit(request, inbox)
            events = iter(inbox)
            while waiting:
                event = next(events)
                builders[event.request_id].add(event)
                if builders[event.request_id].is_done:
                    waiting.discard(event.request_id)
        finally:
            for request_id in waiting:
                self.abort(request_id)
        return [builder.build() for builder in builders.values()]

    def iterate(self, prompt: Prompt, sampling: Sampling) -> Generator[Event, None, None]:
        """The events of one request, to its end, for a thread that may block.

        Closing the generator aborts the request. Raises BadInput, CannotRun, DoesNotFit or
        EngineUnavailable when the first event is requested.
        """
        request = self._make_request(prompt, sampling)
        if sampling.structured is not None:
            self._masks.prepare(sampling.structured)
        inbox, num_unfinished = BlockingInbox(), sampling.n
        self._loop.submit(request, inbox)
        try:
            for event in inbox:
                num_unfinished -= isinstance(event, Finished)
                if isinstance(event, Failed):
                    num_unfinished = 0
                yield event
                if not num_unfinished:
                    return
        finally:
            if num_unfinished:
                self.abort(request.id)

    async def stream(
        self, prompt: Prompt, sampling: Sampling, **terms: Any
    ) -> AsyncGenerator[Event, None]:
        """The events of one request, to its end; terms and errors as `listen` has them.

        Closing the generator aborts the request.
        """
        queue: asyncio.Queue[Sequence[Event]] = asyncio.Queue()
        leave = await self.listen(prompt, sampling, queue.put_nowait, **terms)
        num_unfinished = sampling.n
        try:
            while num_unfinished:
                for event in await queue.get():
                    num_unfinished -= isinstance(event, Finished)
                    if isinstance(event, Failed):
                        num_unfinished = 0
                    yield event
        finally:
            leave()

    async def listen(
        self,
        prompt: Prompt,
        sampling: Sampling,
        sink: Sink,
        *,
        timeout_s: float | None = None,
        **terms: Any,
    ) -> Callable[[], None]:
        """Ask; from then on `sink` gets the request's events, on this asyncio loop, a step's at once.

        Returns how to leave: nothing more is heard, and what has not ended is aborted.
        `timeout_s`: from now, after which the answer is of no use. `terms`: `request_id` (any that none
        being served has; the engine makes one that nobody else has if it is left out), `priority`,
        `tenant`, `slo` (what the caller was promised), `background` (yields its seat and its blocks
        to any other request, `core/lanes.py`).
        Raises BadInput, CannotRun, DoesNotFit, EngineFull or EngineUnavailable.
        """
        if sampling.structured is not None:
            await asyncio.to_thread(self._masks.prepare, sampling.structured)
        deadline_s = None if timeout_s is None else self._clock() + timeout_s
        request = self._make_request(prompt, sampling, deadline_s=deadline_s, **terms)
        inboxes = self._inboxes_here()
        inbox = inboxes.open(request.id, sink, sampling.n)
        leave = partial(self._leave, inboxes, request.id, inbox)
        try:
            self._loop.submit_if_admitted(request, inboxes)
        except BaseException:
            inboxes.close(request.id, inbox)
            raise
        return leave

    def abort(self, request_id: str) -> None:
        """End a request; nothing happens if it is unknown or has ended. From any thread."""
        self._loop.abort(request_id)

    def logprobs_of(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Log-softmax [T, V] after each of T tokens: what the model thinks comes next.

        Runs on the engine thread between two steps, without the KV cache, by the same weights; keep
        T to about a thousand.
        """
        check_tokens(tokens, self.resolved.spec.vocab_size)
        return self._loop.call(partial(_logprobs, self._runner, tuple(tokens))).result()

    def embed(
        self, tokens: Sequence[int], pooling: Literal["mean", "last"]
    ) -> Future[Sequence[float]]:
        """The last layer's states of T tokens, pooled to one vector of hidden_size numbers.

        As `logprobs_of`: between two steps, without the KV cache. BadInput for a bad token id.
        """
        check_tokens(tokens, self.resolved.spec.vocab_size)
        return self._loop.call(partial(_pooled, self._runner, tuple(tokens), pooling))

    # -- watching

    @property
    def info(self) -> EngineInfo:
        """What this engine is; what it derives while it serves, as of now."""
        now = {"background_tokens": self._loop.scheduler.background_budget.policy.describe()}
        return msgspec.structs.replace(self._info, derivations={**self._info.derivations, **now})

    def drain_steps(self) -> list[StepStat]:
        """The steps since the last call (at most the latest 100,000), oldest first."""
        return self._loop.steps.drain()

    def counters(self) -> Mapping[str, float]:
        """Running totals and present levels, under vLLM's names where it has one."""
        scheduler = self._loop.scheduler
        view, totals = scheduler.stats(), scheduler.totals
        running, waiting = scheduler.num_background()
        return (
            {
                "num_requests_running": float(view.num_running),
                "num_requests_waiting": float(view.num_waiting),
                "num_background_running": float(running),
                "num_background_waiting": float(waiting),
                "kv_cache_usage_perc": view.used_blocks / view.num_blocks,
                "prefix_cache_queries": float(scheduler.cache.queried_tokens),
                "prefix_cache_hits": float(scheduler.cache.hit_tokens),
                "num_preemptions": float(totals.num_preempted),
                "generation_tokens": float(totals.num_sampled),
                "num_steps": float(totals.num_steps),
            }
            | scheduler.draft_scheduler.counters()
            | self._loop.counts.as_dict()
            | self._loop.queue_limiter.as_dict()
            | self._loop.steps.totals.as_dict()
        )

    def is_healthy(self, stall_s: float = STALL_S) -> bool:
        """Whether the engine makes progress: not merely that it exists."""
        return self._loop.is_healthy(stall_s)

    # -- ending

    def close(self) -> None:
        """Stop; unfinished requests end as aborted. Closing twice does nothing."""
        self._loop.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- inside

    def _make_request(
        self,
        prompt: Prompt,
        sampling: Sampling,
        request_id: str | None = None,
        priority: int = 0,
        tenant: str = "",
        deadline_s: float | None = None,
        slo: Slo | None = None,
        background: bool = False,
    ) -> Request:
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        vocab_size = self.resolved.spec.vocab_size
        check_tokens(tokens, vocab_size)
        check_sampling(sampling, vocab_size, self.resolved.spec.eos_token_ids)
        return Request(
            id=next(self._ids) if request_id is None else request_id,
            prompt=tuple(tokens),
            sampling=sampling,
            arrival_s=self._clock(),
            priority=priority,
            deadline_s=deadline_s,
            tenant=tenant,
            slo=slo,
            background=background,
        )

    def _inboxes_here(self) -> AsyncInboxes:
        loop = asyncio.get_running_loop()
        return self._inboxes.setdefault(loop, AsyncInboxes(loop))

    def _leave(self, inboxes: AsyncInboxes, request_id: str, inbox: Inbox) -> None:
        if inboxes.close(request_id, inbox):
            self.abort(request_id)
        if not inboxes:
            self._inboxes.pop(asyncio.get_running_loop(), None)


def generate(model: str, prompt: str, *, max_tokens: int = 128, **settings: Any) -> str:
    """The greedy completion of one prompt: opens an engine, answers, closes it."""
    with Engine.open(model, **settings) as engine:
        sampling = Sampling(temperature=0.0, max_tokens=max_tokens)
        return engine.generate([prompt], sampling)[0].text


def _info(resolved: ResolvedSettings, parts: EngineParts, load_s: float) -> EngineInfo:
    return EngineInfo(
        model=resolved.model,
        settings=resolved.values(),
        derivations={**resolved.derivations, "loaded": f"in {load_s:.2f} s"},
        max_model_len=resolved.max_model_len,
        num_blocks=resolved.num_blocks,
        block_size=resolved.block_size,
        weight_bytes=parts.weight_bytes,
        kv_bytes_per_token=kv_bytes_per_token(resolved.spec),
        device=resolved.device,
        compute_dtype=resolved.dtype,
    )


def _queue_limits(resolved: ResolvedSettings) -> QueueLimits:
    return QueueLimits(
        max_requests=resolved.max_num_queued_reqs,
        max_tokens=resolved.max_num_queued_tokens,
        throttle=resolved.slo_throttle,
    )


@torch.inference_mode()
def _pooled(runner: Any, tokens: Sequence[int], pooling: str) -> Sequence[float]:
    x_TC = runner.states(tokens).float()
    x_C = x_TC[-1] if pooling == "last" else x_TC.mean(0)
    if not bool(x_C.isfinite().all()):
        raise ArithmeticError("the states of this text are not finite")
    return [float(value) for value in x_C.tolist()]


@torch.inference_mode()
def _logprobs(runner: Any, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
    logits_TV = runner.logits(tokens)
    found: npt.NDArray[np.float32] = torch.log_softmax(logits_TV.float(), 1).cpu().numpy()
    return found
