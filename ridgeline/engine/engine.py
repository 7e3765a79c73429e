"""The engine: one model, and one thread that computes.

    with Engine.open("demo") as engine:
        engine.generate(["def add(a, b):"], Sampling(max_tokens=32))      a batch, blocking
        for event in engine.iterate("import os", Sampling()): ...         one request, blocking
        async for event in engine.stream("import os", Sampling()): ...    one request, asynchronous

Times are seconds on the engine's clock (`clock`, by default `time.perf_counter`).
"""

from __future__ import annotations

import ridgeline.engine.import_torch  # noqa: F401  # before any import of torch

# isort: split
import asyncio
import atexit
import itertools
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal, TypedDict, Unpack

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from ridgeline.config.settings import EngineSettings, Settings, settings_from
from ridgeline.config.shared import DEFAULT_MODEL
from ridgeline.engine.adapters.registry import AdapterInfo, AdapterRegistry
from ridgeline.engine.build import EngineParts, assemble
from ridgeline.engine.completion import Completion, CompletionBuilder
from ridgeline.engine.config import ResolvedSettings, resolve
from ridgeline.engine.device import choose_device
from ridgeline.engine.engine_loop import EngineLoop
from ridgeline.engine.event_delivery import AsyncInboxes, BlockingInbox, Inbox, Sink
from ridgeline.engine.eviction.requirements import check_kv_eviction
from ridgeline.engine.parallel.resolve import check_eviction
from ridgeline.engine.profiling.step_stats import StepTotals
from ridgeline.engine.request_tokens import with_token_ids
from ridgeline.engine.scheduler.admission.queue_limits import QueueLimiter, QueueLimits
from ridgeline.engine.validate import check_sampling, check_tokens
from ridgeline.errors import CannotRun
from ridgeline.hub.download import ensure_downloaded
from ridgeline.modelspec.cost import cost_model, kv_bytes_per_token
from ridgeline.modelspec.cost.kv_layout import kv_layout
from ridgeline.records import (
    CachePolicy,
    EngineInfo,
    Event,
    Failed,
    Finished,
    KvTransferParams,
    Request,
    Sampling,
    SamplingDefaults,
    Slo,
    StepStat,
)

STALL_S = 120.0
"""Seconds for which work may be due without a finished step before the engine is unhealthy."""
LARGE_VOCABULARY = 10_000
"""Tokens from which the first grammar would stop other requests for more than 50 ms."""
CPU_PIECE_TOKENS = 128
"""Of a text to embed, between two steps: on a CPU, larger pieces are not faster per token."""

Prompt = str | Sequence[int]


class _Scheduling(TypedDict, total=False):
    priority: int
    tenant: str
    deadline_s: float | None
    slo: Slo | None
    background: bool
    account: str
    share: float
    cache: CachePolicy | None
    prediction: tuple[int, ...]
    adapter: int
    kv_source: KvTransferParams | None
    lease: str


class Engine:
    """Serves requests to one model. Close it, or use it as a context manager."""

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
        self._processes = parts.processes
        self._tiers, self.transfers = parts.tiers, parts.transfers
        self._adapters = parts.adapters
        # Unique, so that they never collide with ids chosen by callers.
        self._ids = map(f"req-{uuid.uuid4().hex}-{{}}".format, itertools.count())
        self._inboxes: dict[asyncio.AbstractEventLoop, AsyncInboxes] = {}
        self._loop = EngineLoop(
            parts.scheduler,
            parts.runner,
            parts.tokenizer,
            clock=clock,
            on_start=partial(_prepare_thread, resolved),
            totals=StepTotals(cost_model(resolved.spec), resolved.max_num_batched_tokens),
            queue_limiter=QueueLimiter(_queue_limits(resolved)),
        )
        self._processes.watch(self._loop.fail)
        self._loop.transfer = self._tiers.transfer
        self._loop.after_commit = self.transfers.after_commit
        self._tiers.on_loaded(self._loop.wake)
        self.transfers.watch(self._loop.abort, self._loop.wake)

    @staticmethod
    def open(model: str = DEFAULT_MODEL, **settings: Unpack[EngineSettings]) -> Engine:
        """Load a model by any of its names, after downloading it if it is not here.

        `settings` are the engine's options under their names in the configuration. For a large
        vocabulary, what grammars need is loaded too (`warm_up_grammars`). Raises BadModel,
        BadInput, CannotRun, DoesNotFit or DownloadFailed.
        """
        engine = Engine.from_settings(settings_from({"model": model, **settings}))
        if engine.resolved.spec.vocab_size > LARGE_VOCABULARY:
            engine.warm_up_grammars()
        return engine

    @staticmethod
    def from_settings(
        settings: Settings, *, clock: Callable[[], float] = time.perf_counter
    ) -> Engine:
        """Download what is missing, resolve, load and start.

        Raises BadModel, BadInput, CannotRun, DoesNotFit, DownloadFailed.
        """
        choose_device(settings.device, {})  # a device that is not here must not cost a download
        ensure_downloaded(settings.model)
        began_s = clock()
        resolved = resolve(settings)
        torch.set_num_threads(resolved.num_threads)
        parts = assemble(resolved, clock)
        engine = Engine(resolved, parts, clock=clock, load_s=clock() - began_s)
        # Python ends its threads at exit, and C++ aborts the process if one of them is in a step.
        atexit.register(engine.close)
        return engine

    # -- requests

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        adapter: str | Sequence[str] = "",
        resumed: Sequence[Sequence[int]] = (),
    ) -> list[Completion]:
        """Complete all prompts in one batch; blocks until they are done.

        `sampling` applies to all prompts, or gives one entry per prompt; without it the model's
        own defaults apply (`default_sampling`). `adapter` names a loaded adapter, "" the base
        model, or one entry per prompt. `resumed`: per prompt, the tokens with which its output
        begins; they are part of the completion and count towards `max_tokens`. Raises before
        anything runs if one prompt is invalid, and EngineUnavailable if one fails.
        """
        one = self.default_sampling.fill() if sampling is None else sampling
        samplings = one if isinstance(one, Sequence) else [one] * len(prompts)
        adapters = [adapter] * len(prompts) if isinstance(adapter, str) else adapter
        begun = [[tokens] for tokens in resumed] or [[]] * len(prompts)
        requests = [
            self._make_request(p, s, adapter_name=a, resumed=r)
            for p, s, a, r in zip(prompts, samplings, adapters, begun, strict=True)
        ]
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
        self, prompt: Prompt, sampling: Sampling, **options: Any
    ) -> AsyncGenerator[Event, None]:
        """Yield the events of one request until it ends.

        Takes the options of `listen` and raises the same errors. Closing the generator aborts the
        request.
        """
        queue: asyncio.Queue[Sequence[Event]] = asyncio.Queue()
        leave = await self.listen(prompt, sampling, queue.put_nowait, **options)
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
        **options: Any,
    ) -> Callable[[], None]:
        """Submit a request; `sink` is called on this event loop with the events of each step.

        Returns a function that unregisters the sink and aborts the request if it has not ended.

        `timeout_s`: seconds from now after which the request fails. Further options: `request_id`
        (unique among the requests being served; generated by default), `priority` (lower goes
        first), `tenant` (separates the prefix caches), `slo` (latency targets), `background`
        (yields its slot and blocks to interactive requests), `prediction` (the tokens that the
        client expects, for drafts), `adapter` (the name of a loaded adapter), `resumed` (the
        tokens that each choice has already, of which the events come again), `kv_source` (the
        server that has computed the prompt) and `lease` (under which its blocks are handed out).

        Raises BadInput, CannotRun, DoesNotFit, EngineFull or EngineUnavailable.
        """
        if sampling.structured is not None:
            await asyncio.to_thread(self._masks.prepare, sampling.structured)
        deadline_s = None if timeout_s is None else self._clock() + timeout_s
        adapter = options.pop("adapter", "")
        request = self._make_request(
            prompt, sampling, adapter_name=adapter, deadline_s=deadline_s, **options
        )
        inboxes = self._inboxes_here()
        inbox = inboxes.open(request.id, sink, sampling.n)
        leave = partial(self._leave, inboxes, request.id, inbox)
        try:
            self._loop.submit_if_admitted(request, inboxes)
        except BaseException:
            inboxes.close(request.id, inbox)
            raise
        if request.lease:
            self.transfers.bind(request.lease, request.id)
        return leave

    @property
    def adapters(self) -> tuple[AdapterInfo, ...]:
        """The loaded adapters."""
        return self._adapters.loaded if self._adapters else ()

    def load_adapter(self, name: str, directory: str) -> AdapterInfo:
        """Load a LoRA adapter that PEFT saved. Raises BadInput, BadModel or CannotRun."""
        return self._registry_of_adapters().load(name, directory)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; requests that still use it fail. Raises BadInput or CannotRun."""
        self._registry_of_adapters().unload(name)

    def warm_up_grammars(self) -> None:
        """Load what grammars need before the first one comes: seconds for a large vocabulary.

        Other requests stand still meanwhile. Without this call, the first grammar does it.
        """
        self._masks.warm_up()

    def abort(self, request_id: str) -> None:
        """End a request, from any thread; does nothing if it is unknown or has ended."""
        self._loop.abort(request_id)

    def forget_prefix(
        self, tokens: Sequence[int], tenant: str = "", account: str = ""
    ) -> Future[int]:
        """Drop what is cached of a prompt, and the account's pins on it: the number of tokens.

        Blocks that another account has pinned stay.
        """
        request = self._make_request(tokens, Sampling(), tenant=tenant, account=account)
        return self._loop.call(partial(self._loop.scheduler.forget_prefix, request))

    def pin_prefix(
        self, tokens: Sequence[int], policy: CachePolicy, tenant: str = "", account: str = ""
    ) -> Future[int]:
        """Pin the beginning of a prompt, or prolong its pin, without computing it: the number of
        tokens. Blocks that are not cached are pinned when they are computed.
        """
        request = self._make_request(
            tokens, Sampling(), tenant=tenant, account=account, cache=policy
        )
        return self._loop.call(partial(self._loop.scheduler.pin_prefix, request))

    def logprobs_of(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Log-probabilities, float32 [T, V], of the next token after each of T tokens.

        Runs on the engine thread between two steps, without the KV cache. Keep T to about a
        thousand: memory grows with T·V.
        """
        check_tokens(tokens, self.resolved.spec.vocab_size)
        return self._loop.call(partial(_logprobs, self._runner, tuple(tokens))).result()

    def embed(
        self, tokens: Sequence[int], pooling: Literal["mean", "last"], account: str = ""
    ) -> Future[Sequence[float]]:
        """The last layer's states of T tokens, pooled into one vector of hidden_size numbers.

        Runs on the engine thread without the KV cache. Between two steps, at most half as many
        tokens are computed as a step may have, on a CPU 128, of one text, and the next step has
        that many fewer; accounts take turns. A text counts in the queue limits until it begins.
        Raises BadInput for an invalid token id, EngineFull or EngineUnavailable.
        """
        check_tokens(tokens, self.resolved.spec.vocab_size)
        piece_tokens = max(1, self.resolved.max_num_batched_tokens // 2)
        if self.resolved.device == "cpu":
            piece_tokens = min(piece_tokens, CPU_PIECE_TOKENS)
        pieces = _pooled(self._runner, tuple(tokens), pooling, piece_tokens)
        return self._loop.call_in_pieces(pieces, len(tokens), account, piece_tokens)

    # -- monitoring

    @property
    def default_sampling(self) -> SamplingDefaults:
        """The sampling that the model's publisher recommends, by `generation_config`."""
        return self._info.default_sampling

    @property
    def info(self) -> EngineInfo:
        """Settings and derivations of this engine, including those that change while it serves."""
        now = {"background_tokens": self._loop.scheduler.background_budget.policy.describe()}
        adapters = tuple(own.name for own in self.adapters)
        return msgspec.structs.replace(
            self._info, derivations={**self._info.derivations, **now}, adapters=adapters
        )

    def drain_steps(self) -> list[StepStat]:
        """Remove and return the steps since the last call, oldest first, at most 100,000."""
        return self._loop.steps.drain()

    def counters(self) -> Mapping[str, float]:
        """Totals and current levels, under vLLM's names where it has them."""
        scheduler = self._loop.scheduler
        stats, totals = scheduler.stats(), scheduler.totals
        running, waiting = scheduler.num_background()
        return (
            {
                "num_requests_running": float(stats.num_running),
                "num_requests_waiting": float(stats.num_waiting),
                "num_background_running": float(running),
                "num_background_waiting": float(waiting),
                "kv_cache_usage_perc": stats.used_blocks / stats.num_blocks,
                "prefix_cache_queries": float(scheduler.cache.queried_tokens),
                "prefix_cache_hits": float(scheduler.cache.hit_tokens),
                "num_preemptions": float(totals.num_preempted),
                "generation_tokens": float(totals.num_sampled),
                "num_steps": float(totals.num_steps),
            }
            | scheduler.draft_scheduler.counters()
            | self._loop.counts.as_dict()
            | self._loop.queue_limiter.as_dict()
            | self._loop.as_dict()
            | self._loop.steps.totals.as_dict()
            | self._runner.graph_counters()
            | self._tiers.counters()
            | self.transfers.counters()
        )

    def is_healthy(self, stall_s: float = STALL_S) -> bool:
        """True if the engine thread is alive and makes progress with due work."""
        return self._loop.is_healthy(stall_s)

    @property
    def death(self) -> str | None:
        """Why the engine has stopped by itself, as when a rank was killed; None if it has not.

        It stays so: open a new engine.
        """
        return self._loop.death

    # -- closing

    def close(self) -> None:
        """Stop the engine; unfinished requests end as aborted. Closing twice does nothing."""
        atexit.unregister(self.close)
        self._loop.close()
        self.transfers.close()
        self._tiers.close()
        self._processes.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- internals

    def _make_request(
        self,
        prompt: Prompt,
        sampling: Sampling,
        request_id: str | None = None,
        resumed: Sequence[Sequence[int]] = (),
        adapter_name: str = "",
        **scheduling: Unpack[_Scheduling],
    ) -> Request:
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        vocab_size = self.resolved.spec.vocab_size
        check_tokens(tokens, vocab_size)
        check_tokens(scheduling.get("prediction", ()), vocab_size, "the prediction")
        for own in resumed:
            check_tokens(own, vocab_size, "the resumed output")
        sampling = with_token_ids(sampling, self.tokenizer, tokens)
        self._check_eviction(sampling, bool(scheduling.get("prediction")))
        check_sampling(sampling, vocab_size, self.resolved.spec.eos_token_ids)
        if adapter_name:
            scheduling["adapter"] = self._registry_of_adapters().id_of(adapter_name)
        return Request(
            id=next(self._ids) if request_id is None else request_id,
            prompt=tuple(tokens),
            sampling=sampling,
            arrival_s=self._clock(),
            resumed=tuple(map(tuple, resumed)),
            **scheduling,
        )

    def _check_eviction(self, sampling: Sampling, has_prediction: bool) -> None:
        """Raise CannotRun if the eviction policy of a request, or the engine's, cannot run."""
        used, policy = self.resolved, sampling.kv_eviction or self.resolved.kv_eviction_config
        if policy is None:
            return
        check_kv_eviction(
            policy,
            used.spec,
            used.speculative_config,
            has_prediction=has_prediction,
            has_beams=sampling.beam is not None,
        )
        check_eviction(policy, used.parallel_sizes)

    def _registry_of_adapters(self) -> AdapterRegistry:
        if self._adapters is None:
            raise CannotRun("this engine has no adapters", fix="serve with --enable-lora")
        return self._adapters

    def _inboxes_here(self) -> AsyncInboxes:
        loop = asyncio.get_running_loop()
        return self._inboxes.setdefault(loop, AsyncInboxes(loop))

    def _leave(self, inboxes: AsyncInboxes, request_id: str, inbox: Inbox) -> None:
        if inboxes.close(request_id, inbox):
            self.abort(request_id)
        loop = asyncio.get_running_loop()
        if not inboxes and self._inboxes.get(loop) is inboxes:  # a later one may have replaced it
            del self._inboxes[loop]


def _info(resolved: ResolvedSettings, parts: EngineParts, load_s: float) -> EngineInfo:
    embeddings = resolved.embeddings
    derivations = {
        "loaded": f"in {load_s:.2f} s",
        "decode_graphs": parts.runner.describe_graphs(),
        "kv_tiers": parts.tiers.describe(),
        "kv_transfers": parts.transfers.describe(),
        "embeddings": f"{embeddings.pooling} pooling, {embeddings.source}",
    }
    return EngineInfo(
        model=resolved.model,
        settings=resolved.values(),
        derivations={**resolved.derivations, **derivations},
        pooling=embeddings.pooling,
        normalize=embeddings.normalize,
        vocab_size=resolved.spec.vocab_size,
        max_model_len=resolved.max_model_len,
        num_blocks=resolved.num_blocks,
        block_size=resolved.block_size,
        weight_bytes=parts.weight_bytes,
        kv_bytes_per_token=kv_bytes_per_token(resolved.spec),
        device=resolved.device,
        compute_dtype=resolved.dtype,
        default_sampling=resolved.default_sampling,
        num_kv_groups=kv_layout(resolved.spec).num_groups,
    )


def _prepare_thread(resolved: ResolvedSettings) -> None:
    """Settings that torch keeps per thread."""
    torch.set_num_threads(resolved.num_threads)
    if resolved.device.startswith("cuda"):
        torch.cuda.set_device(torch.device(resolved.device).index or 0)


def _queue_limits(resolved: ResolvedSettings) -> QueueLimits:
    return QueueLimits(
        max_requests=resolved.max_num_queued_reqs,
        max_tokens=resolved.max_num_queued_tokens,
        throttle=resolved.slo_throttle,
    )


def _pooled(
    runner: Any, tokens: Sequence[int], pooling: str, piece_tokens: int
) -> Generator[None, None, Sequence[float]]:
    """Yields between two pieces of the text."""
    num_seen, last_C = 0, None
    sum_C = torch.zeros((), dtype=torch.float64)
    for x_TC in runner.state_pieces(tokens, piece_tokens):
        num_seen += len(x_TC)
        if pooling == "last":
            last_C = x_TC[-1].float()
        else:
            sum_C = sum_C + x_TC.sum(0, dtype=torch.float64)
        if num_seen < len(tokens):
            yield
    x_C = (sum_C / num_seen).float() if last_C is None else last_C
    if not bool(x_C.isfinite().all()):
        raise ArithmeticError("the hidden states of this text are not finite")
    return [float(value) for value in x_C.tolist()]


@torch.inference_mode()
def _logprobs(runner: Any, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
    logits_TV = runner.logits(tokens)
    logprobs_TV: npt.NDArray[np.float32] = torch.log_softmax(logits_TV.float(), 1).cpu().numpy()
    return logprobs_TV
