"""The requests of one HTTP request: started together, told of together, and never left behind.

One request may hold many prompts, each of which is one request. What a step of the engine says of an
ask comes as one call on the event loop, and goes from there to whoever words the answer without a
queue or a task between: at 32 streams those would cost more than the writing. However the request
ends (answered, failed, client gone, server stopping), `close` aborts whatever still runs, so that
its blocks are free within one step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import msgspec

from ridgeline.records import (
    Event,
    Failed,
    Finished,
    Preempted,
    Sampling,
    Slo,
    Started,
    Token,
)
from ridgeline.serve.engine_protocol import ServedEngine
from ridgeline.serve.errors import of_failure
from ridgeline.serve.http.native_writer import Around, Carried, Errand, Lent
from ridgeline.serve.metrics.registry import Metrics
from ridgeline.serve.openai.sampling_params import Prompt


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """On which terms the engine serves a job. `slo_class` names the promise `slo`."""

    priority: int = 0
    tenant: str = ""
    timeout_s: float | None = None
    slo_class: str = ""
    slo: Slo | None = None


def free(_num_tokens: int) -> None:
    """Nobody counts tokens."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What one HTTP request asks of the engine. `scores_only`: the output token is no answer.

    `spent` hears of every output token, for whoever keeps the caller's account.
    """

    id: str
    prompts: Sequence[Prompt]
    sampling: Sampling
    terms: Terms = Terms()
    scores_only: bool = False
    spent: Callable[[int], None] = free

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.tokens) for prompt in self.prompts)


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """One chunk's worth of news about choice `choice`: a token, its end, or both."""

    choice: int
    token: Token | None = None
    finished: Finished | None = None

    @property
    def text(self) -> str:
        head = self.token.text if self.token else ""
        return head + (self.finished.text if self.finished else "")


Tell = Callable[[list[Update]], None]
Brief = Callable[[int, Token], bool]
"""Tells of a token of a choice that came alone; False where it has to be told as an update."""
TakeBack = Callable[[Carried, bytes], None]
"""Tells what a courier has carried of the only choice, and what is left to send of it."""


class RequestGroup:
    """Every request of a job as one series of updates.

    `run` asks and tells; `close` ends what has not ended. `cached` is how much of each prompt came
    from the prefix cache, as far as is known. `interval`: how many tokens are gathered before they
    are told together; the first one is told at once, and so is an end with all before it.
    """

    def __init__(
        self, engine: ServedEngine, job: Job, metrics: Metrics, interval: float = 1
    ) -> None:
        self._engine, self._job, self._now = engine, job, metrics.now
        self._couriers, self._count_asked = metrics.couriers, metrics.count_submitted
        self._interval = interval
        self._errand: Errand | None = None
        self._take_back: TakeBack = _nothing_left
        self.cached = [0] * len(job.prompts)
        self.meters = [
            metrics.meter(
                len(prompt.tokens),
                job.sampling,
                job.terms.slo_class,
                job.terms.slo,
                scores_only=job.scores_only,
            )
            for prompt in job.prompts
        ]
        self._open = dict.fromkeys(range(len(job.prompts)), job.sampling.n)
        self._leave: list[Callable[[], None]] = []
        self._told: Tell = _nobody
        self._brief: Brief = _never
        self._flows = False  # every token is told by itself, at once
        self._gathered: list[Update] = []
        self._has_begun = False
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ended.add_done_callback(_seen)

    @property
    def have_ended(self) -> bool:
        """Nothing more will be told."""
        return not self._open

    async def run(self, told: Tell, brief: Brief | None = None) -> None:
        """Ask for everything. `told` gets all updates, those of one step at once; first of all,
        without any if need be, when the engine has begun. From then on `brief` is asked first,
        where it is given and tokens are not gathered. Returns at the end, raises why not."""
        self._told, self._brief = told, brief or _never
        for index in range(len(self._job.prompts)):
            try:
                self._leave.append(await self._ask(index))
            except Exception:  # refused, with all after it: no choice of theirs was ever open
                self._open = {asked: n for asked, n in self._open.items() if asked < index}
                raise
            self._count_asked(self._job.sampling)
        await self._ended

    @property
    def can_be_carried(self) -> bool:
        """Its tokens may go without being heard here: one choice, whose tokens nobody pays for."""
        job = self._job
        return len(job.prompts) == job.sampling.n == 1 and job.spent is free and not job.scores_only

    def send_by_courier(self, lent: Lent, around: Around, take_back: TakeBack) -> bool:
        """Before `run`: tokens go straight to the socket, until their last or until it is full;
        then `take_back` is called, and all else is told. False where there is no courier."""
        errand = self._couriers.take(lent, around, int(self._interval))
        if errand is None:
            return False
        self._errand, self._take_back = errand, take_back
        errand.look, errand.stuck = self._look, self._relieve
        return True

    def stop_courier(self) -> None:
        """The connection is lost: nobody may write to it when this returns."""
        if self._errand is not None:
            self._errand.stop()

    def fail(self, error: Exception) -> None:
        """Nobody waits for what has not come yet: `run` raises `error`, behind all that has."""
        self._relieve()
        if self._gathered:  # nobody is told less for having waited
            self._tell(self._gathered)
            self._gathered = []
        self._fail(error)

    def close(self) -> None:
        """Leave the engine; what has not ended is aborted. Whoever sends the answer has it back:
        he has to know whether it has begun."""
        for leave in self._leave:
            leave()
        self._relieve()
        for index in self._open:
            self.meters[index].left()
        self._open = {}

    def _ask(self, index: int) -> Coroutine[Any, Any, Callable[[], None]]:
        terms = self._job.terms
        more = {} if self._errand is None else {"errand": self._errand.handle}
        return self._engine.listen(
            self._job.prompts[index].tokens,
            self._job.sampling,
            partial(self._heard, index),
            request_id=self._request_id(index),
            priority=terms.priority,
            tenant=terms.tenant,
            timeout_s=terms.timeout_s,
            slo=terms.slo,
            **more,
        )

    def _look(self) -> None:
        """The meter, as far as the courier is."""
        if self._errand is not None:
            self.meters[0].saw_carried(self._errand.seen())

    def _relieve(self) -> None:
        """The courier's part is over: tokens are heard here from now on, behind all it has sent."""
        errand, self._errand = self._errand, None
        if errand is None:
            return
        carried, left = errand.end()
        self.meters[0].saw_carried(carried)
        self._has_begun = carried.num_tokens > 0
        self._flows = self._has_begun and self._interval <= 1
        try:
            self._take_back(carried, left)
        except Exception as error:
            self._fail(error)

    def _heard(self, index: int, events: Sequence[Event]) -> None:
        """On the loop, once per step: accounts, and the news in the order they came."""
        if self._errand is not None:
            if all(type(event) in _QUIET for event in events):
                self.meters[index].saw(events, self._now())
                self._updates(index, events)
                return
            self._relieve()
        if self._flows and len(events) == 1:
            event = events[0]
            if type(event) is Token:
                self._flow(index, event)
                return
        if num_tokens := self.meters[index].saw(events, self._now()):
            self._job.spent(num_tokens)
        updates = self._updates(index, events)
        if not self._ended.done() and (updates or not self._has_begun):
            self._gather(updates)
        if not self._open and not self._ended.done():
            self._ended.set_result(None)

    def _flow(self, index: int, event: Token) -> None:
        """What nearly every call is about, in few steps: the next token of a stream."""
        if self.meters[index].saw_token(event, self._now()):
            self._job.spent(1)
        choice = self._choice(index, event)
        try:
            is_told = self._brief(choice, event)
        except Exception as error:
            self._fail(error)
            return
        if not is_told:
            self._tell([Update(choice=choice, token=event)])

    def _updates(self, index: int, events: Sequence[Event]) -> list[Update]:
        """A token and the end that came with it are one update."""
        updates: list[Update] = []
        for event in events:
            if isinstance(event, Token):
                updates.append(Update(choice=self._choice(index, event), token=event))
            elif isinstance(event, Finished):
                choice = self._choice(index, event)
                last = updates.pop() if updates and updates[-1].choice == choice else None
                token = None if last is None else last.token
                updates.append(Update(choice=choice, token=token, finished=event))
                self._ended_one(index)
            elif isinstance(event, Started):
                self.cached[index] = event.cached_tokens
            elif isinstance(event, Failed):
                self._gathered += updates
                self.fail(of_failure(event))
        return updates

    def _gather(self, updates: list[Update]) -> None:
        """Tell it at once, unless it may wait for more."""
        if self._gathered:
            self._gathered += updates
            updates = self._gathered
        if self._has_begun and len(updates) < self._interval and updates[-1].finished is None:
            self._gathered = updates
            return
        self._gathered, self._has_begun = [], True
        self._flows = self._interval <= 1
        self._tell(updates)

    def _tell(self, updates: list[Update]) -> None:
        try:
            self._told(updates)
        except Exception as error:  # a fault in wording one answer is that answer's alone
            self._fail(error)

    def _ended_one(self, index: int) -> None:
        self._open[index] -= 1
        if not self._open[index]:
            del self._open[index]

    def _fail(self, error: Exception) -> None:
        self._flows = False
        if not self._ended.done():
            self._ended.set_exception(error)

    def _choice(self, index: int, event: Token | Finished) -> int:
        return index * self._job.sampling.n + event.index

    def _request_id(self, index: int) -> str:
        return self._job.id if len(self._job.prompts) == 1 else f"{self._job.id}-{index}"


def _seen(future: asyncio.Future[None]) -> None:
    """A failure that nobody waits for any more is no news."""
    if not future.cancelled():
        future.exception()


_QUIET = (Started, Preempted)
"""Kinds of events that no client hears of."""


def _nothing_left(_carried: Carried, _left: bytes) -> None:
    """No courier was sent."""


def _nobody(_updates: list[Update]) -> None:
    """Nothing is asked yet, so nothing comes."""


def _never(_choice: int, _token: Token) -> bool:
    """Whoever wants every token as an update."""
    return False
