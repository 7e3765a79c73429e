"""An engine in this process as a load target: no socket, no JSON, the same clock.

Tokens are timed when the client's event loop receives them, as a user's socket would; the start of
a request is timed by the engine. Tokens of one engine step carry the same time and become one
chunk, so that speculative decoding shows as several tokens per chunk.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Protocol, cast

import msgspec

from ridgeline.measure.client.target import Now, Recorder
from ridgeline.measure.workload.base import ChatPrompt, LoadRequest, plain_chat
from ridgeline.records import (
    EngineInfo,
    Event,
    Failed,
    Finished,
    Sampling,
    Started,
    StepStat,
    Token,
)

RenderChat = Callable[[ChatPrompt], str | Sequence[int]]


class MeasurableEngine(Protocol):
    """The part of an engine that a load target needs."""

    @property
    def info(self) -> EngineInfo: ...

    def stream(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling,
        *,
        request_id: str | None = None,
        priority: int = 0,
        tenant: str = "",
    ) -> AsyncIterator[Event]: ...

    def drain_steps(self) -> Iterable[StepStat]: ...


class EngineTarget:
    """An engine as a load target; closing it does not close the engine.

    `engine_clock` is the clock of the engine's events, `render_chat` applies its chat template.
    """

    def __init__(
        self,
        engine: MeasurableEngine,
        *,
        name: str | None = None,
        render_chat: RenderChat = plain_chat,
        engine_clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine, self._render_chat, self._engine_clock = engine, render_chat, engine_clock
        self._serials = itertools.count()
        self._name = name or f"engine:{engine.info.model}"

    @property
    def name(self) -> str:
        return self._name

    @property
    def info(self) -> EngineInfo | None:
        return self._engine.info

    async def send(self, request: LoadRequest, record: Recorder) -> None:
        prompt = request.prompt
        events = self._engine.stream(
            self._render_chat(prompt) if isinstance(prompt, ChatPrompt) else prompt,
            sampling_of(request),
            # Unique beyond this run: equal seeds give equal ids, and an aborted request may linger.
            request_id=f"{request.id}#{next(self._serials)}",
            tenant=request.tenant,
        )
        last_s: float | None = None
        # Closing the generator at once removes a cancelled request from the engine.
        async with aclosing(cast("_Closable", events)) as stream:
            async for event in stream:
                last_s = self._record(event, record, last_s)

    def drain_steps(self, now: Now) -> tuple[StepStat, ...]:
        shift_s = now() - self._engine_clock()
        return tuple(
            msgspec.structs.replace(step, at_s=step.at_s + shift_s)
            for step in self._engine.drain_steps()
        )

    async def close(self) -> None:
        return None

    def _record(self, event: Event, record: Recorder, last_s: float | None) -> float | None:
        """Record one event; return the engine's time of the last token."""
        match event:
            case Token() if event.at_s == last_s:
                record.extend_chunk(event.text)
            case Token():
                record.record_chunk(event.text)
                if record.first_computed_s is None:
                    record.first_computed_s = record.now() - (self._engine_clock() - event.at_s)
                return event.at_s
            case Started():
                age_s = self._engine_clock() - event.at_s
                record.record_start(record.now() - age_s, cached_tokens=event.cached_tokens)
            case Finished():
                record.append_text(event.text)
                _record_end(event, record)
            case Failed():
                record.record_failure(event.error)
        return last_s


class _Closable(Protocol):
    def __aiter__(self) -> AsyncIterator[Event]: ...

    async def aclose(self) -> None: ...


def _record_end(event: Finished, record: Recorder) -> None:
    if event.reason == "abort":
        record.record_failure("the engine aborted the request", reason="abort")
        return
    record.record_finish(
        event.reason,
        prompt_tokens=event.usage.prompt_tokens,
        output_tokens=event.usage.completion_tokens,
        cached_tokens=event.usage.cached_tokens,
    )


def sampling_of(request: LoadRequest) -> Sampling:
    """Greedy and of a fixed length: the load must not depend on the generated tokens."""
    return Sampling(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=request.ignore_eos)
