"""The asks of one HTTP request: started together, merged into one stream, and never left behind.

One request may hold many prompts, each of which is one ask. `Asks` pumps the events of all of
them into one queue. However the request ends (answered, failed, client gone, server stopping),
leaving the `async with` aborts whatever still runs, so that its blocks are free within one step.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from types import TracebackType

import msgspec

from ridgeline.records import Event, Failed, Finished, Sampling, Slo, Started, Token
from ridgeline.serve.contract import ServedEngine
from ridgeline.serve.errors import of_failure
from ridgeline.serve.metrics import Metrics
from ridgeline.serve.translate import Prompt


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """On which terms the engine serves a job. `slo_class` names the promise `slo`."""

    priority: int = 0
    tenant: str = ""
    timeout_s: float | None = None
    slo_class: str = ""
    slo: Slo | None = None


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What one HTTP request asks of the engine. `scores_only`: the output token is no answer.

    `spent` hears of every output token, for whoever keeps the caller's account.
    """

    id: str
    prompts: Sequence[Prompt]
    sampling: Sampling
    terms: Terms = Terms()
    scores_only: bool = False
    spent: Callable[[int], None] = lambda _num_tokens: None

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


def _update(choice: int, event: Token | Finished) -> Update:
    if isinstance(event, Token):
        return Update(choice=choice, token=event)
    return Update(choice=choice, finished=event)


_Item = tuple[int, Event | Exception | None]


class Asks:
    """Every ask of a job as one stream of updates.

    `cached` is how much of each prompt came from the prefix cache, as far as is known.
    """

    def __init__(self, engine: ServedEngine, job: Job, metrics: Metrics) -> None:
        self._engine, self._job = engine, job
        self.cached = [0] * len(job.prompts)
        self._queue: asyncio.Queue[_Item] = asyncio.Queue()
        self.meters = [
            metrics.meter(len(prompt.tokens), job.sampling, job.terms.slo_class, job.terms.slo)
            for prompt in job.prompts
        ]
        self._open = set(range(len(job.prompts)))
        self._tasks: list[asyncio.Task[None]] = []
        self._first: _Item | None = None

    async def __aenter__(self) -> Asks:
        self._tasks = [asyncio.create_task(self._pump(index)) for index in sorted(self._open)]
        return self

    async def __aexit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        for index in self._open:
            self._engine.abort(self._ask_id(index))
            self.meters[index].left()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def updates(self) -> AsyncGenerator[Update, None]:
        """News in order of arrival; a token and the end that came with it are one update."""
        held: Update | None = None
        async for choice, event in self._events():
            if held and isinstance(event, Finished) and held.choice == choice:
                yield Update(choice=choice, token=held.token, finished=event)
                held = None
                continue
            if held:
                yield held
            held = _update(choice, event)
            if held.finished or self._queue.empty():  # else the same step has said more
                yield held
                held = None
        if held:
            yield held

    async def started(self) -> None:
        """Wait until the engine has accepted the job or refused it (then this raises why)."""
        self._first = await self._queue.get()
        if isinstance(self._first[1], Exception):
            raise self._first[1]
        if isinstance(self._first[1], Started):
            self.cached[self._first[0]] = self._first[1].cached_tokens

    async def _get(self) -> _Item:
        first, self._first = self._first, None
        return first if first is not None else await self._queue.get()

    async def _events(self) -> AsyncGenerator[tuple[int, Token | Finished], None]:
        """(choice, event) of every ask until all have ended."""
        while self._open:
            index, item = await self._get()
            if item is None:
                self._open.discard(index)
            elif isinstance(item, Exception):
                raise item
            elif isinstance(item, Failed):
                raise of_failure(item)
            elif isinstance(item, Started):
                self.cached[index] = item.cached_tokens
            elif isinstance(item, Token | Finished):
                yield index * self._job.sampling.n + item.index, item

    async def _pump(self, index: int) -> None:
        job, meter = self._job, self.meters[index]
        try:
            stream = self._engine.stream(
                job.prompts[index].tokens,
                job.sampling,
                ask_id=self._ask_id(index),
                priority=job.terms.priority,
                tenant=job.terms.tenant,
                timeout_s=job.terms.timeout_s,
                slo=job.terms.slo,
            )
            async for event in stream:
                meter.saw(event)
                if isinstance(event, Token):
                    job.spent(1)
                self._queue.put_nowait((index, event))
        except Exception as error:
            self._queue.put_nowait((index, error))
        else:
            self._queue.put_nowait((index, None))

    def _ask_id(self, index: int) -> str:
        return self._job.id if len(self._job.prompts) == 1 else f"{self._job.id}-{index}"
