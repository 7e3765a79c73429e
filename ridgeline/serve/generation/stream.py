"""Engine output of one HTTP request, as an async iterator over updates of its choices."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec

from ridgeline.errors import BadGrammar
from ridgeline.records import (
    Event,
    Failed,
    Finished,
    Sampling,
    Started,
    Token,
    Usage,
    prediction_totals,
)
from ridgeline.serve.drain import ServerStopping
from ridgeline.serve.engine_protocol import EventSink
from ridgeline.serve.errors import ApiError, failure_error, grammar_error
from ridgeline.serve.generation.ids import new_id
from ridgeline.serve.generation.request import GenerationRequest
from ridgeline.serve.metrics.registry import Metrics

MAX_UNREAD_CHARS = 1 << 20
"""Text that may wait for a client that reads slower than the engine generates."""


class EventSource(Protocol):
    """Generates the events of a request: an engine, or a stored answer."""

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
        ...


class ChoiceUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """A token of choice `choice`, its end, or both.

    `num_output_tokens`: of the whole request, up to and including this update. `is_replayed`: the
    client has it from the server that this one continues for.
    """

    choice: int
    token: Token | None = None
    finished: Finished | None = None
    num_output_tokens: int = 0
    is_replayed: bool = False

    @property
    def token_id(self) -> int | None:
        return None if self.token is None else self.token.token

    @property
    def text(self) -> str:
        text = self.token.text if self.token else ""
        return text + self.finished.text if self.finished else text


class RequestTimes(msgspec.Struct, frozen=True, kw_only=True):
    """What a request came to. `began_ns` is Unix time; the rest are seconds after it.

    `resumed_tokens`: those of `usage` that another server has generated. `is_migrated`: another one
    was asked to continue, since this one stops. `error`: an HTTP status, an exception, or
    `cancelled`; "" for a request that has ended by itself or migrates.
    """

    began_ns: int
    started_s: float | None
    first_s: float | None
    ended_s: float
    usage: Usage
    resumed_tokens: int
    reasons: tuple[str, ...]
    is_migrated: bool
    error: str


class ResponseStream:
    """Submits a request to the engine, and iterates over lists of `ChoiceUpdate`.

    The first list comes when the engine has started, and may be empty. Later ones hold at least
    `interval` tokens, or the end of a choice; a consumer that falls behind gets all that has
    accumulated at once. Iteration raises ApiError where the engine refuses the request or fails, or
    where more than `max_unread_chars` of text wait for the consumer. `close` must be called: it
    aborts what has not finished, which frees its KV blocks within one step. `on_end` is called by
    the first `close`.

    The engine calls `_receive` on the event loop, once per step and prompt.
    """

    def __init__(
        self,
        engine: EventSource,
        request: GenerationRequest,
        metrics: Metrics,
        *,
        interval: float = 1,
        max_unread_chars: float = math.inf,
        on_end: Callable[[RequestTimes], None] | None = None,
    ) -> None:
        self.request = request
        self._on_end, self._began_s, self._began_ns = on_end, metrics.now(), time.time_ns()
        self.num_output_tokens = self._num_resumed_tokens = 0
        self.cached_tokens = [0] * len(request.prompts)
        self.pinned_tokens = 0
        self._engine, self._metrics = engine, metrics
        self._interval, self._max_unread_chars = interval, max_unread_chars
        self._timers = [
            metrics.time_request(
                len(prompt.tokens),
                request.sampling.n,
                request.scheduling.slo_class,
                request.scheduling.slo,
                score_only=request.score_only,
            )
            for prompt in request.prompts
        ]
        self._unfinished = dict.fromkeys(range(len(request.prompts)), request.sampling.n)
        resumed = request.resume.tokens if request.resume else ()
        self._num_replayed = {i: len(tokens) for i, tokens in enumerate(resumed) if tokens}
        self._usages: list[Usage] = []  # of the choices that have ended
        self._unsubscribe: list[Callable[[], None]] = []
        self._pending: list[ChoiceUpdate] = []
        self._num_pending_chars = 0
        self._error: Exception | None = None
        self._is_submitted = self._has_started = self._is_due = self._is_migrated = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_finished(self) -> bool:
        """Whether every choice has ended and every update has been yielded."""
        return not self._unfinished and not self._pending and self._error is None

    def usage(self, num_output_tokens: int | None = None) -> Usage:
        """Tokens over all prompts and choices; a prompt counts once whatever n is.

        `num_output_tokens`: as of an earlier update; None: as of now.
        """
        return Usage(
            prompt_tokens=self.request.num_prompt_tokens,
            cached_tokens=sum(self.cached_tokens),
            completion_tokens=(
                self.num_output_tokens if num_output_tokens is None else num_output_tokens
            ),
            **prediction_totals(self._usages),
        )

    def timings(self) -> dict[str, float | None]:
        """vLLM's `metrics` object of the first prompt."""
        return self._timers[0].timings()

    def __aiter__(self) -> ResponseStream:
        return self

    async def __anext__(self) -> list[ChoiceUpdate]:
        await self.submit()
        while not self._is_due:
            if self._error is not None:
                raise self._error
            if self.is_finished:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._is_due = False
        updates, self._pending, self._num_pending_chars = self._pending, [], 0
        return updates

    async def submit(self) -> None:
        """Pass the request to the engine, if that has not been done; raises its refusal."""
        if not self._is_submitted:
            self._is_submitted = True
            await self._submit()

    def fail(self, error: Exception) -> None:
        """End the iteration with `error`, after the updates that are already here."""
        if self._error is None and self._unfinished:
            self._error = error
            self._wake(bool(self._pending))

    def note_migration(self, error: ApiError) -> None:
        """The client was asked to continue elsewhere in place of `error`: that is no failure of
        the request where the server stops, and one where the engine has failed."""
        self._is_migrated = isinstance(error, ServerStopping)

    def close(self) -> None:
        """Stop listening and abort what has not finished."""
        if self._on_end is not None:
            on_end, self._on_end = self._on_end, None
            on_end(self._times())
        for unsubscribe in self._unsubscribe:
            unsubscribe()
        for index in self._unfinished:
            self._timers[index].abort()
        self._unfinished, self._unsubscribe = {}, []

    def _times(self) -> RequestTimes:
        def after(instants: Iterable[float | None]) -> float | None:
            first = min((at for at in instants if at is not None), default=None)
            return None if first is None else max(0.0, first - self._began_s)

        error = "" if self._error is None else type(self._error).__name__
        if isinstance(self._error, ApiError):
            error = str(self._error.status_code)
        error = error or ("cancelled" if self._unfinished else "")
        return RequestTimes(
            began_ns=self._began_ns,
            started_s=after(timer.started_s for timer in self._timers),
            first_s=after(timer.first_s for timer in self._timers),
            ended_s=self._metrics.now() - self._began_s,
            usage=self.usage(),
            resumed_tokens=self._num_resumed_tokens,
            reasons=tuple(reason for timer in self._timers for reason in timer.reasons),
            is_migrated=self._is_migrated,
            error="" if self._is_migrated else error,
        )

    async def _submit(self) -> None:
        """One engine request per prompt; raises the engine's refusal of the first it refuses."""
        request = self.request
        lease = request.handover.params.remote_request_id if request.handover else ""
        for index, prompt in enumerate(request.prompts):
            is_only_one = len(request.prompts) == 1
            resumed = request.resumed_tokens(index)
            # The server that broke off may be this one, and may not have noticed yet.
            own_id = new_id(f"{request.id}-") if request.resume else request.id
            try:
                unsubscribe = await self._engine.listen(
                    prompt.tokens,
                    request.sampling_of(index),
                    partial(self._receive, index),
                    request_id=own_id if is_only_one else f"{own_id}-{index}",
                    priority=request.scheduling.priority,
                    tenant=request.scheduling.tenant,
                    timeout_s=request.scheduling.timeout_s,
                    slo=request.scheduling.slo,
                    account=request.scheduling.account,
                    share=request.scheduling.share,
                    **({"resumed": resumed} if resumed else {}),
                    **({"prediction": request.prediction} if request.prediction else {}),
                    **({"adapter": request.adapter} if request.adapter else {}),
                    **({"cache": request.cache} if request.cache else {}),
                    **({"kv_source": request.kv_source} if request.kv_source else {}),
                    **({"lease": lease} if lease else {}),
                )
            except Exception as error:  # later prompts were never submitted, and are not aborted
                self._unfinished = {i: n for i, n in self._unfinished.items() if i < index}
                self._error = error
                if isinstance(error, BadGrammar):
                    raise grammar_error(error, request.grammar_field) from None
                raise
            self._unsubscribe.append(unsubscribe)
            self._metrics.count_submitted(request.sampling)

    def _receive(self, index: int, events: Sequence[Event]) -> None:
        """Take the events of one engine step for prompt `index`."""
        if self._num_replayed:
            events = self._take_replayed(index, events)
        num_tokens = self._timers[index].observe(events, self._metrics.now())
        if num_tokens:
            self.request.charge(num_tokens)
        is_due = False
        for event in events:
            if isinstance(event, Token):
                self.num_output_tokens += not self.request.score_only
                if self.request.log is not None:
                    choice = index * self.request.sampling.n + event.index
                    self.request.log.append(choice, event.token)
                self._append(index, event, None)
            elif isinstance(event, Finished):
                self._append(index, None, event)
                self._usages.append(event.usage)
                self._finish_choice(index)
                is_due = True
            elif isinstance(event, Started):
                self.cached_tokens[index] = event.cached_tokens
                self.pinned_tokens += event.pinned_tokens
            elif isinstance(event, Failed):
                self.fail(failure_error(event))
        if not self._has_started and self._error is None:
            is_due = self._has_started = True
        self._wake(is_due or len(self._pending) >= self._interval)

    def _take_replayed(self, index: int, events: Sequence[Event]) -> list[Event]:
        """Take the tokens that were sent before, and the ends that came with them; the rest."""
        rest: list[Event] = []
        ends_replayed: set[int] = set()
        for event in events:
            choice = index * self.request.sampling.n + getattr(event, "index", 0)
            left = self._num_replayed.get(choice, 0)
            if isinstance(event, Token) and left:
                self.num_output_tokens += not self.request.score_only
                self._num_resumed_tokens += not self.request.score_only
                self._pending.append(
                    ChoiceUpdate(
                        choice=choice,
                        token=event,
                        num_output_tokens=self.num_output_tokens,
                        is_replayed=True,
                    )
                )
                if left == 1:
                    del self._num_replayed[choice]
                    ends_replayed.add(choice)
                else:
                    self._num_replayed[choice] = left - 1
            elif isinstance(event, Finished) and choice in ends_replayed:
                self._timers[index].observe([event], self._metrics.now())
                self._finish_replayed(index, choice, event)
            else:
                ends_replayed.discard(choice)
                rest.append(event)
        return rest

    def _finish_replayed(self, index: int, choice: int, finished: Finished) -> None:
        place = max(i for i, update in enumerate(self._pending) if update.choice == choice)
        self._pending[place] = msgspec.structs.replace(self._pending[place], finished=finished)
        self._finish_choice(index)

    def _append(self, index: int, token: Token | None, finished: Finished | None) -> None:
        event = token or finished
        assert event is not None
        choice = index * self.request.sampling.n + event.index
        last = self._pending[-1] if self._pending else None
        if token is None and last is not None and last.choice == choice and last.finished is None:
            self._pending.pop()  # the end that comes with a token belongs to the same update
            token = last.token
        self._pending.append(
            ChoiceUpdate(
                choice=choice,
                token=token,
                finished=finished,
                num_output_tokens=self.num_output_tokens,
            )
        )
        was_unread = self._num_pending_chars > 0
        self._num_pending_chars += len(event.text)
        if was_unread and self._num_pending_chars > self._max_unread_chars:
            self._disconnect_slow_reader()

    def _finish_choice(self, index: int) -> None:
        self._unfinished[index] -= 1
        if not self._unfinished[index]:
            del self._unfinished[index]

    def _disconnect_slow_reader(self) -> None:
        message = f"the client reads too slowly: {MAX_UNREAD_CHARS} characters were waiting for it"
        self.fail(ApiError(408, message))
        self.close()

    def _wake(self, is_due: bool) -> None:
        self._is_due = self._is_due or is_due
        waiter = self._waiter
        if waiter is not None and not waiter.done() and (self._is_due or self._error is not None):
            waiter.set_result(None)
