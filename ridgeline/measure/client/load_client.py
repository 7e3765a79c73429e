"""The load client: sends a workload to a target under an arrival process, and returns the RunTrace.

Most runs share a process with the engine, so the client does little: one task per request, one
timer per arrival, no polling. It records its own CPU time and how late it sent, so that
`validity_of` can reject runs in which the client was the bottleneck.

Every request has the time at which it was *due* and the time at which it was *sent*. Under a
concurrency limit a due request waits here, and that wait is part of its latency: a client that
measures from the send hides the very queue that it should show (coordinated omission).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator

import msgspec

from ridgeline.config.units import MAX_REQUESTS
from ridgeline.errors import BadInput, EngineUnavailable
from ridgeline.hardware.open_files import OpenFilesError
from ridgeline.measure.client.target import LoadTarget, Recorder
from ridgeline.measure.workload.arrivals import Arrivals, Closed
from ridgeline.measure.workload.base import LoadRequest, Workload
from ridgeline.records import RequestTrace, RunTrace
from ridgeline.records.trace import CANCELLED, TIMEOUT
from ridgeline.stats import percentile

UNLIMITED = 10**9
WARMUP_SEED_SHIFT = 7_919_000  # warm-up prompts must not put the measured ones into the cache
DEFAULT_WARMUP_CONCURRENCY = 4

OnFinish = Callable[[RequestTrace], str | None]


class LoadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Amount of load and its limits. `num_requests` or `duration_s`, or both, end the arrivals.

    Requests in flight at that time may finish for `grace_s`, then they are cancelled and count as
    missed. `timeout_s` limits one request from its send.
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
            raise BadInput("the load has no end", fix="set a number of prompts or a duration")
        for name in ("num_requests", "duration_s", "max_concurrency", "timeout_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise BadInput(f"{name} must be positive", value=value, limit="> 0")
        for name in ("num_warmups", "grace_s"):
            if not getattr(self, name) >= 0:
                raise BadInput(f"{name} must not be negative", value=getattr(self, name))
        for name in ("num_requests", "num_warmups"):
            if (getattr(self, name) or 0) > MAX_REQUESTS:
                raise BadInput(
                    f"{name} is too large",
                    value=getattr(self, name),
                    limit=f"<= {MAX_REQUESTS}",
                    fix="use --duration-s to end a load by time",
                )


OnStart = Callable[[], Awaitable[None]]


async def run_load(
    target: LoadTarget,
    workload: Workload,
    arrivals: Arrivals,
    options: LoadOptions,
    *,
    on_finish: OnFinish | None = None,
    on_start: OnStart | None = None,
    cpu_time: Callable[[], float] = time.thread_time,
) -> RunTrace:
    """Measure one run.

    `on_finish` is called with every request that ends; if it returns a reason, the run stops.
    `on_start` is awaited between warm-up and run: monitors start there. Raises EngineUnavailable if
    a warm-up request fails, and OpenFilesError if this process may open no further connection.
    """
    await _warm_up(target, workload, arrivals, options)
    if on_start is not None:
        await on_start()
    requests = _requests(workload, options)
    run = _LoadRun(target, options, on_finish)
    target.drain_steps(run.now)  # drop the steps of the warm-up
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
    """The requests; generated before the run if their number is known."""
    if options.num_requests is None:
        return workload.sample(UNLIMITED, options.seed)
    return iter(list(workload.sample(options.num_requests, options.seed)))


def _label(arrivals: Arrivals, options: LoadOptions) -> str:
    cap = options.max_concurrency
    return arrivals.label if cap is None else f"{arrivals.label} cap:{cap}"


async def _warm_up(
    target: LoadTarget, workload: Workload, arrivals: Arrivals, options: LoadOptions
) -> None:
    """Send unrecorded requests at the concurrency of the run. The first failure ends the run."""
    limit = arrivals.concurrency if isinstance(arrivals, Closed) else options.max_concurrency
    slots = asyncio.Semaphore(limit or DEFAULT_WARMUP_CONCURRENCY)
    loop = asyncio.get_running_loop()

    async def one(request: LoadRequest) -> None:
        async with slots:
            record = Recorder(loop.time)
            await _send_one(target, request, record, options.timeout_s)
        error = record.to_trace(request, 0.0, 0.0).error
        if error is not None:
            raise EngineUnavailable(f"a warm-up request failed: {error}")

    warmups = workload.sample(options.num_warmups, options.seed + WARMUP_SEED_SHIFT)
    try:
        async with asyncio.TaskGroup() as group:
            for request in warmups:
                group.create_task(one(request))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def _send_one(
    target: LoadTarget, request: LoadRequest, record: Recorder, timeout_s: float
) -> None:
    """Send one request and wait for its end, which is recorded.

    Raised are a cancellation, and OpenFilesError, for which the server is not to blame.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await target.send(request, record)
    except TimeoutError:
        record.record_failure(f"{TIMEOUT}: no end after {timeout_s:g} s")
    except OpenFilesError as error:
        record.record_failure(str(error))
        raise
    except Exception as error:  # a failed request is a measurement, not the end of the run
        record.record_failure(f"{type(error).__name__}: {error}")
    if not record.has_ended:
        record.record_failure("the stream ended without an end event")


class _LoadRun:
    """State of one run: requests in flight, traces of ended ones, and the reason to stop."""

    def __init__(
        self, target: LoadTarget, options: LoadOptions, on_finish: OnFinish | None
    ) -> None:
        self._target, self._options, self._on_finish = target, options, on_finish
        self._loop = asyncio.get_running_loop()
        self._origin_s = self._loop.time()
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()  # set when a request ends
        self._stop: str | None = None
        self._failure: OpenFilesError | None = None
        self._last_end_s = self._slot_free_s = 0.0
        self.traces: list[RequestTrace] = []
        self.lags_s: list[float] = []

    def now(self) -> float:
        return self._loop.time() - self._origin_s

    async def drive(self, requests: Iterator[LoadRequest], arrivals: Arrivals) -> None:
        schedule = arrivals.start(self._options.seed)
        try:
            for request in requests:
                due_s = await self._next_due(schedule.next)
                if due_s is None:
                    break
                self._send(request, due_s, await self._wait_for_slot(due_s))
            await self._drain()
        finally:
            await self._cancel(self._stop or "the run was interrupted")
        if self._failure is not None:
            raise self._failure

    async def _next_due(self, next_due: Callable[[float, int], float | None]) -> float | None:
        """Wait until the next request is due; None once arrivals are over."""
        while self._stop is None:
            due_s = next_due(self.now(), len(self._tasks))
            if due_s is None:
                await self._wait_change()
                if self._is_over(self.now()):
                    return None
                continue
            if math.isinf(due_s) or self._is_over(due_s):
                return None
            await self._sleep_until(due_s)
            return None if self._stop else due_s
        return None

    def _is_over(self, at_s: float) -> bool:
        limit = self._options.duration_s
        return limit is not None and at_s >= limit

    async def _sleep_until(self, at_s: float) -> None:
        while self._stop is None and (left_s := at_s - self.now()) > 0:
            await self._wait_change(left_s)
        if at_s <= self.now():
            await asyncio.sleep(0)  # a burst of due requests must not starve those in flight

    async def _wait_for_slot(self, due_s: float) -> float:
        """Wait for a slot under the concurrency limit; return when sending became possible."""
        cap = self._options.max_concurrency
        while cap is not None and len(self._tasks) >= cap and self._stop is None:
            await self._wait_change()
            self._slot_free_s = self._last_end_s
        # A request that waited here was late because of the limit, not because of the client.
        return max(due_s, self._slot_free_s)

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
        task = self._loop.create_task(self._run_conversation(request, due_s, sent_s))
        self._tasks.add(task)

    async def _run_conversation(self, request: LoadRequest, due_s: float, sent_s: float) -> None:
        """Send a request, and the further turns of its conversation."""
        try:
            turn: LoadRequest | None = request
            while turn is not None:
                trace = await self._run_turn(turn, due_s, sent_s)
                turn = turn.next_turn(trace.text) if trace.error is None else None
                if turn is not None:
                    due_s = self.now() + turn.think_s
                    await asyncio.sleep(turn.think_s)
                    sent_s = self.now()
                    self.lags_s.append(sent_s - due_s)
        except asyncio.CancelledError:
            pass  # during the think time, when no request was in flight
        finally:
            self._finish_task()

    async def _run_turn(self, request: LoadRequest, due_s: float, sent_s: float) -> RequestTrace:
        record = Recorder(self.now)
        try:
            await _send_one(self._target, request, record, self._options.timeout_s)
        except asyncio.CancelledError:
            record.record_failure(f"{CANCELLED}: {self._stop}", reason="abort")
        except OpenFilesError as error:
            self._failure, self._stop = error, error.what
        trace = record.to_trace(request, due_s, sent_s)
        self.traces.append(trace)
        if self._on_finish is not None and self._stop is None:
            self._stop = self._on_finish(trace)
        self._changed.set()
        return trace

    def _finish_task(self) -> None:
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
        await asyncio.sleep(0)  # a task that has not started would leave no trace
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
