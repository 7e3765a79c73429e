"""Sources of events in the place of the engine: one that gives an answer again, one that records.

A replayed answer goes the way of any other: it is charged, counted, and streamed token by token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

from msgspec.structs import replace

from ridgeline.records import Event, Finished, Sampling, Started, Token
from ridgeline.serve.engine_protocol import EventSink, ServedEngine
from ridgeline.serve.generation.request import GenerationRequest
from ridgeline.serve.response_cache.cache import ResponseCache, StoredAnswer, is_whole
from ridgeline.serve.response_cache.semantic import ScopedVector


class AnswerReplay:
    """Gives the events of a stored answer again, prompt by prompt in the order of `listen`."""

    def __init__(self, answer: StoredAnswer, now: Callable[[], float]) -> None:
        self._answer, self._now, self._num_prompts = answer, now, 0

    async def listen(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling,
        sink: EventSink,
        *,
        timeout_s: float | None = None,
        **terms: Any,
    ) -> Callable[[], None]:
        """As `ServedEngine.listen`; the whole prompt counts as cached, and nothing is drafted."""
        events = self._answer.events_of(self._num_prompts)
        self._num_prompts += 1
        request_id, num_tokens = str(terms["request_id"]), len(prompt)
        num_predicted = 0 if terms.get("prediction") else None
        own = [_replayed(event, request_id, num_tokens, num_predicted) for event in events]
        task = asyncio.create_task(self._deliver(own, sink))

        def leave() -> None:
            task.cancel()

        return leave

    async def _deliver(self, events: Sequence[Event], sink: EventSink) -> None:
        step: list[Event] = []
        for event, following in zip_longest(events, events[1:]):
            step.append(replace(event, at_s=self._now()))
            if not isinstance(following, Finished):  # an end comes with its last token
                sink(step)
                step = []
                await asyncio.sleep(0)  # the consumer sends these before the next


def _replayed(
    event: Started | Token | Finished,
    request_id: str,
    num_tokens: int,
    num_predicted: int | None,
) -> Event:
    """An event of a stored answer as one of this request, which may have another prediction."""
    if isinstance(event, Started):
        return replace(event, request_id=request_id, cached_tokens=num_tokens, pinned_tokens=0)
    if isinstance(event, Token):
        return replace(event, request_id=request_id)
    usage = replace(
        event.usage,
        accepted_prediction_tokens=num_predicted,
        rejected_prediction_tokens=num_predicted,
    )
    return replace(event, request_id=request_id, usage=usage)


class AnswerRecorder:
    """Passes a request to the engine, and stores its answer when all of its prompts have ended."""

    def __init__(
        self,
        engine: ServedEngine,
        cache: ResponseCache,
        key: bytes,
        request: GenerationRequest,
        place: ScopedVector | None = None,
    ) -> None:
        self._engine, self._cache, self._key, self._place = engine, cache, key, place
        self._tenant = request.scheduling.tenant
        self._events: list[list[Event]] = []
        self._num_open = len(request.prompts)

    async def listen(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling,
        sink: EventSink,
        *,
        timeout_s: float | None = None,
        **terms: Any,
    ) -> Callable[[], None]:
        """As `ServedEngine.listen`."""
        own: list[Event] = []
        self._events.append(own)

        def record(events: Sequence[Event]) -> None:
            own.extend(events)
            sink(events)
            if any(isinstance(event, Finished) for event in events) and is_whole(own, sampling.n):
                self._num_open -= 1
                if not self._num_open:
                    self._cache.store(self._key, self._tenant, self._events, self._place)

        return await self._engine.listen(prompt, sampling, record, timeout_s=timeout_s, **terms)
