"""An engine in this process as a target: no socket, no JSON, the same clock.

Token instants are those at which the client's event loop sees the event, as a user's socket
would; the instant at which the engine first ran the request comes from the engine. Tokens of one
engine step carry the same instant and become one chunk, so that speculative decoding shows as
tokens per chunk.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Protocol, cast

import msgspec

from ridgeline.measure.client.target import Now, Recorder
from ridgeline.measure.workload.base import Chat, LoadRequest, plain_chat
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

RenderChat = Callable[[Chat], str | Sequence[int]]


class Source(Protocol):
    """What an engine must offer to be measured."""

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


class InProcessTarget:
    """Wraps an engine. `engine_clock` is the clock of its events, `render_chat` its chat template.

    Closing the target does not close the engine: whoever opened it does.
    """

    def __init__(
        self,
        source: Source,
        *,
        name: str | None = None,
        render_chat: RenderChat = plain_chat,
        engine_clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._source, self._render_chat, self._engine_clock = source, render_chat, engine_clock
        self._serials = itertools.count()
        self._name = name or f"engine:{source.info.model}"

    @property
    def name(self) -> str:
        return self._name

    @property
    def info(self) -> EngineInfo | None:
        return self._source.info

    async def send(self, request: LoadRequest, record: Recorder) -> None:
        prompt = request.prompt
        events = self._source.stream(
            self._render_chat(prompt) if isinstance(prompt, Chat) else prompt,
            sampling_of(request),
            # unique beyond this run: equal seeds give equal ids, and an aborted ask may linger
            request_id=f"{request.id}#{next(self._serials)}",
            tenant=request.tenant,
        )
        last_s: float | None = None
        # closing the generator at once is what makes a cancelled request leave the engine
        async with aclosing(cast("_Closable", events)) as stream:
            async for event in stream:
                last_s = self._note(event, record, last_s)

    def drain_steps(self, now: Now) -> tuple[StepStat, ...]:
        shift_s = now() - self._engine_clock()
        return tuple(
            msgspec.structs.replace(step, at_s=step.at_s + shift_s)
            for step in self._source.drain_steps()
        )

    async def close(self) -> None:
        return None

    def _note(self, event: Event, record: Recorder, last_s: float | None) -> float | None:
        """Write one event down; returns the engine's instant of the last token."""
        match event:
            case Token() if event.at_s == last_s:
                record.more(event.text)
            case Token():
                record.chunk(event.text)
                if record.first_computed_s is None:
                    record.first_computed_s = record.now() - (self._engine_clock() - event.at_s)
                return event.at_s
            case Started():
                age_s = self._engine_clock() - event.at_s
                record.started(record.now() - age_s, cached_tokens=event.cached_tokens)
            case Finished():
                record.tail(event.text)
                _note_end(event, record)
            case Failed():
                record.failed(event.error)
        return last_s


class _Closable(Protocol):
    def __aiter__(self) -> AsyncIterator[Event]: ...

    async def aclose(self) -> None: ...


def _note_end(event: Finished, record: Recorder) -> None:
    if event.reason == "abort":
        record.failed("the engine aborted the request", reason="abort")
        return
    record.finished(
        event.reason,
        prompt_tokens=event.usage.prompt_tokens,
        output_tokens=event.usage.completion_tokens,
        cached_tokens=event.usage.cached_tokens,
    )


def sampling_of(request: LoadRequest) -> Sampling:
    """Greedy, of a fixed length: load must not depend on which tokens come out."""
    return Sampling(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=request.ignore_eos)
