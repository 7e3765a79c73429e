"""The load client: runs a workload under an arrival process against a target, and writes the
RunTrace.

It shares its process with the engine in most runs, so it does little: one task per request, one
timer per arrival, no polling. It watches itself too: its own CPU time and how late it sent. A run
whose client was the bottleneck says so (`goodput.validity_of`).

Each request keeps the instant at which it was *due* and the one at which it was *sent*. Under a
concurrency cap a due request waits here, and that wait belongs to its latency: a client that
measures from the send alone hides exactly the queue that it was to show (coordinated omission).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator

import msgspec

from ridgeline.errors import BadInput, EngineUnavailable
from ridgeline.measure.client.target import Recorder, Target
from ridgeline.measure.workload.arrivals import Arrivals, Closed
from ridgeline.measure.workload.base import LoadRequest, Workload
from ridgeline.records import RequestTrace, RunTrace
from ridgeline.records.trace import CANCELLED, TIMEOUT
from ridgeline.stats import percentile

UNLIMITED = 10**9
WARMUP_SEED_SHIFT = (
    7_919_000  # warm-up prompts must not be the measured ones, or they would be cached
)
DEFAULT_WARMUP_CONCURRENCY = 4
MOST_REQUESTS = 10_000_000  # their prompts are made before the first is sent

OnFinish = Callable[[RequestTrace], str | None]


class LoadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How much load, and its limits. Either `num_requests` or `duration_s` ends the arrivals, or
    both.

    What is in flight when arrivals end may finish, for at most `grace_s`; then it is cancelled, and
    counts as missed. `timeout_s` limits one request from its send.
    """

    num_requests: int | None = 100
    duration_s: float | None = None
    max_concurrency: int | None = None
    num_warmups: int = 0
    timeout_s: float = 600.0
    grace_s: float = 600.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_requests is None and self.duration_s is None:
            raise BadInput("the load never ends", fix="give a number of prompts or a duration")
        for name in ("num_requests", "duration_s", "max_concurrency", "timeout_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise BadInput(f"{name} must be positive", value=value, limit="> 0")
        for name in ("num_warmups", "grace_s"):
            if not getattr(self, name) >= 0:
                raise BadInput(f"{name} must not be negative", value=getattr(self, name))
        for name in ("num_requests", "num_warmups"):
            if (getattr(self, name) or 0) > MOST_REQUESTS:
                raise BadInput(
                    f"{name} is too large",
                    value=getattr(self, name),
                    limit=f"<= {MOST_REQUESTS}",
                    fix="--duration-s ends a load by time",
                )


OnStart = Callable[[], Awaitable[None]]


async def run_load(
    target: Target,
    workload: Workload,
    arrivals: Arrivals,
    options: LoadOptions,
    *,
    on_finish: OnFinish | None = None,
    on_start: OnStart | None = None,
    cpu_time: Callable[[], float] = time.thread_time,
) -> RunTrace:
    """Measure one run. `on_finish` sees every request as it ends; a reason from it stops the run
    early. `on_start` is awaited between the warm-up and the run: whoever watches begins there.
    """
    await _warm_up(target, workload, arrivals, options)
    if on_start is not None:
        await on_start()
    requests = _requests(workload, options)
    run = _Run(target, options, on_finish)
    target.drain_steps(run.now)  # what the warm-up did is not part of the run
    started_unix_s, started_cpu_s = time.time(), cpu_time()
    await run.drive(requests, arrivals)
    duration_s = run.now()
    return RunTrace(
        target=target.name,
        workload=workload.name,
        arrivals=_label(arrivals, options),
        seed=options.seed,
        started_unix_s=started_unix_s,
        duration_s=duration_s,
        requests=tuple(sorted(run.traces, key=lambda trace: trace.scheduled_s)),
        steps=target.drain_steps(run.now),
        info=target.info,
        client_cpu_share=(cpu_time() - started_cpu_s) / duration_s if duration_s > 0 else None,
        send_lag_p99_s=percentile(run.lags_s, 99) if run.lags_s else None,
    )


def _requests(workload: Workload, options: LoadOptions) -> Iterator[LoadRequest]:
    """The load; made beforehand where its number is known, so that making it costs no measured
    time.
    """
    if options.num_requests is None:
        return workload.sample(UNLIMITED, options.seed)
    return iter(list(workload.sample(options.num_requests, options.seed)))


def _label(arrivals: Arrivals, options: LoadOptions) -> str:
    cap = options.max_concurrency
    return arrivals.label if cap is None else f"{arrivals.label} cap:{cap}"


async def _warm_up(
    target: Target, workload: Workload, arrivals: Arrivals, options: LoadOptions
) -> None:
    """Requests that leave no record, at the run's own concurrency; the first that fails ends the
    run.
    """
    limit = arrivals.concurrency if isinstance(arrivals, Closed) else options.max_concurrency
    seats = asyncio.Semaphore(limit or DEFAULT_WARMUP_CONCURRENCY)
    loop = asyncio.get_running_loop()

    async def one(request: LoadRequest) -> None:
        async with seats:
            record = Recorder(loop.time)
            await _serve(target, request, record, options.timeout_s)
        error = record.trace(request, 0.0, 0.0).error
        if error is not None:
            raise EngineUnavailable(f"a warm-up request failed: {error}")

    warmups = workload.sample(options.num_warmups, options.seed + WARMUP_SEED_SHIFT)
    try:
        async with asyncio.TaskGroup() as group:
            for request in warmups:
                group.create_task(one(request))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def _serve(target: Target, request: LoadRequest, record: Recorder, timeout_s: float) -> None:
    """One request to its end, whatever that is: the record tells. Only cancellation passes
    through.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await target.send(request, record)
    except TimeoutError:
        record.failed(f"{TIMEOUT}: no end after {timeout_s:g} s")
    except Exception as error:  # a failed request is a measurement, not the end of the run
        record.failed(f"{type(error).__name__}: {error}")
    if not record.ended:
        record.failed("the stream ended without a word")


class _Run:
    """The state of one run: what is in flight, what has ended, and why to stop."""

    def __init__(self, target: Target, options: LoadOptions, on_finish: OnFinish | None) -> None:
        self._target, self._options, self._on_finish = target, options, on_finish
        self._loop = asyncio.get_running_loop()
        self._origin_s = self._loop.time()
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()  # something ended
        self._stop: str | None = None
        self._last_end_s = self._seat_free_s = 0.0
        self.traces: list[RequestTrace] = []
        self.lags_s: list[float] = []

    def now(self) -> float:
        return self._loop.time() - self._origin_s

    async def drive(self, requests: Iterator[LoadRequest], arrivals: Arrivals) -> None:
        due = arrivals.start(self._options.seed)
        try:
            for request in requests:
                due_s = await self._next_due(due.next)
                if due_s is None:
                    break
                self._send(request, due_s, await self._seat(due_s))
            await self._drain()
        finally:
            await self._cancel(self._stop or "the run was interrupted")

    async def _next_due(self, ask: Callable[[float, int], float | None]) -> float | None:
        """Wait until the next request is due; None when arrivals are over."""
        while self._stop is None:
            due_s = ask(self.now(), len(self._tasks))
            if due_s is None:
                await self._wait_change()
                if self._over(self.now()):
                    return None
                continue
            if math.isinf(due_s) or self._over(due_s):
                return None
            await self._sleep_until(due_s)
            return None if self._stop else due_s
        return None

    def _over(self, at_s: float) -> bool:
        limit = self._options.duration_s
        return limit is not None and at_s >= limit

    async def _sleep_until(self, at_s: float) -> None:
        while self._stop is None and (left_s := at_s - self.now()) > 0:
            await self._wait_change(left_s)
        if at_s <= self.now():
            await asyncio.sleep(0)  # a burst of due requests must not starve those in flight

    async def _seat(self, due_s: float) -> float:
        """Wait for a place under the concurrency cap; the instant from which sending was
        possible.
        """
        cap = self._options.max_concurrency
        while cap is not None and len(self._tasks) >= cap and self._stop is None:
            await self._wait_change()
            self._seat_free_s = self._last_end_s
        # who stood in this queue behind another was late because of the cap, not of the client
        return max(due_s, self._seat_free_s)

    async def _wait_change(self, timeout_s: float | None = None) -> None:
        self._changed.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return

    def _send(self, request: LoadRequest, due_s: float, possible_s: float) -> None:
        if self._stop is not None:
            return
        sent_s = self.now()
        self.lags_s.append(sent_s - possible_s)
        task = self._loop.create_task(self._one(request, due_s, sent_s))
        self._tasks.add(task)

    async def _one(self, request: LoadRequest, due_s: float, sent_s: float) -> None:
        """A request to its end; of a conversation, turn after turn."""
        try:
            turn: LoadRequest | None = request
            while turn is not None:
                trace = await self._turn(turn, due_s, sent_s)
                turn = turn.next_turn(trace.text) if trace.error is None else None
                if turn is not None:
                    due_s = self.now() + turn.think_s
                    await asyncio.sleep(turn.think_s)
                    sent_s = self.now()
                    self.lags_s.append(sent_s - due_s)
        except asyncio.CancelledError:
            pass  # while the user was thinking: no request was in flight
        finally:
            self._left()

    async def _turn(self, request: LoadRequest, due_s: float, sent_s: float) -> RequestTrace:
        record = Recorder(self.now)
        try:
            await _serve(self._target, request, record, self._options.timeout_s)
        except asyncio.CancelledError:
            record.failed(f"{CANCELLED}: {self._stop}", reason="abort")
        trace = record.trace(request, due_s, sent_s)
        self.traces.append(trace)
        if self._on_finish is not None and self._stop is None:
            self._stop = self._on_finish(trace)
        self._changed.set()
        return trace

    def _left(self) -> None:
        self._last_end_s = self.now()
        task = asyncio.current_task()
        if task is not None:
            self._tasks.discard(task)
        self._changed.set()

    async def _drain(self) -> None:
        deadline_s = self.now() + self._options.grace_s
        while self._tasks and self._stop is None and (left_s := deadline_s - self.now()) > 0:
            await self._wait_change(left_s)
        if self._tasks and self._stop is None:
            self._stop = f"unfinished {self._options.grace_s:g} s after the last arrival"

    async def _cancel(self, reason: str) -> None:
        self._stop = self._stop or reason
        await asyncio.sleep(0)  # a task that never began would leave no record
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
