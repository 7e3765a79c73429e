"""The batch worker: leases batch requests, runs them concurrently, and settles their results.

It holds no state that matters: if it is killed, the next one continues from the store. Results that
arrive together are settled in one transaction (one wait for the disk). Once per `poll_s` it renews
its leases, and cancels requests whose lease it has lost: their batch has expired or was cancelled.

Outside the off-peak window it leases nothing; running requests are finished.

It knows how many servers the open requests need to end by their deadlines
(`ridgeline.routing.batch_demand`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime

import msgspec

from ridgeline.errors import BadInput
from ridgeline.routing.batch_demand import BatchPace, wanted_servers
from ridgeline.serve.batch.records import BatchJob, BatchResult, Lease
from ridgeline.serve.batch.store import BatchStore
from ridgeline.serve.batch.validate import ValidatedFile, validate_file

_LOG = logging.getLogger("ridgeline.serve")
Executor = Callable[[Lease], Awaitable[BatchResult]]
"""Runs one leased request. Raises EngineBusy if it should be retried later."""


class EngineBusy(Exception):
    """The engine accepts no more requests right now."""


class DailyWindow(msgspec.Struct, frozen=True):
    """Hours of the day (local time) in which batch requests are started, e.g. `22:00-06:00`.

    `start` and `end` are minutes of the day.
    """

    start: int
    end: int

    @staticmethod
    def parse(text: str) -> DailyWindow:
        start, dash, end = text.partition("-")
        window = DailyWindow(_minutes(start, text), _minutes(end if dash else "", text))
        if window.start == window.end:
            raise _bad_window(text)
        return window

    def contains(self, at: datetime) -> bool:
        minute = at.hour * 60 + at.minute
        if self.start < self.end:
            return self.start <= minute < self.end
        return minute >= self.start or minute < self.end

    def __str__(self) -> str:
        return "-".join(f"{at // 60:02}:{at % 60:02}" for at in (self.start, self.end))


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`max_concurrency`: requests at once; `poll_s`: how often the worker looks for new batches and
    renews its leases."""

    max_concurrency: int
    poll_s: float = 1.0
    window: DailyWindow | None = None


class BatchWorker:
    """Runs until `stop`; `wake` makes it look for work at once."""

    def __init__(
        self,
        store: BatchStore,
        execute: Executor,
        options: WorkerOptions,
        *,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock`: the time of day; `timer`: what intervals are measured with, in seconds."""
        self._store, self._execute, self._options, self._clock = store, execute, options, clock
        self._timer, self._num_failures = timer, 0
        self._running: dict[str, tuple[Lease, asyncio.Task[None]]] = {}
        self._results: list[BatchResult] = []
        self._wake_event = asyncio.Event()
        self._is_stopped = self._has_ended = False
        self._paused_until_s = -math.inf
        self._pace, self._wanted_servers = BatchPace(), 0.0

    @property
    def wanted_servers(self) -> float:
        """Servers like this one that the open requests need to end in time; 0 before the first
        result of this process."""
        return self._wanted_servers

    @property
    def num_running(self) -> int:
        """Batch requests that are running."""
        return len(self._running)

    @property
    def num_failures(self) -> int:
        """Consecutive rounds that failed; 0 while the worker makes progress."""
        return self._num_failures

    @property
    def has_died(self) -> bool:
        """Whether `run` has ended without a call of `stop`."""
        return self._has_ended and not self._is_stopped

    def wake(self) -> None:
        """Look for work without waiting for the next poll."""
        self._wake_event.set()

    def stop(self) -> None:
        """End `run` soon; running requests are released."""
        self._is_stopped = True
        self.wake()

    async def run(self) -> None:
        """Work until `stop`."""
        next_poll_s, is_recovered = -math.inf, False
        try:
            while not self._is_stopped:
                try:
                    if not is_recovered:
                        await asyncio.to_thread(self._store.recover)
                        is_recovered = True
                    if self._timer() >= next_poll_s:
                        await self._poll()
                        next_poll_s = self._timer() + self._options.poll_s
                    await self._settle()
                    await self._start_requests()
                    self._num_failures = 0
                except Exception:  # e.g. a full disk, a damaged file: what is settled is not lost
                    self._num_failures += 1
                    _LOG.exception("the batch store failed; retrying")
                await self._wait()
        finally:
            self._has_ended = True
            await self._release_running()

    async def run_until_idle(self) -> None:
        """Work until every batch has ended."""
        task = asyncio.ensure_future(self.run())
        try:
            while not task.done() and await asyncio.to_thread(self._has_unfinished_batches):
                await asyncio.wait([task], timeout=0.02)
        finally:
            self.stop()
            await task

    def _has_unfinished_batches(self) -> bool:
        unfinished = self._store.with_status(
            "validating", "in_progress", "finalizing", "cancelling"
        )
        return bool(unfinished)

    async def _poll(self) -> None:
        """Renew leases, validate new batches, and end those that are due."""
        leases = [lease for lease, _ in self._running.values()]
        valid = await asyncio.to_thread(self._store.renew, leases) if leases else set()
        for lease in leases:
            if lease.token not in valid and lease.token in self._running:
                self._running[lease.token][1].cancel()
        for batch in await asyncio.to_thread(self._store.with_status, "validating"):
            validated = await asyncio.to_thread(self._validate, batch)
            if validated.errors:
                await asyncio.to_thread(self._store.reject, batch.id, validated.errors)
            else:
                lines, model = validated.lines, validated.model
                await asyncio.to_thread(self._store.accept, batch.id, lines, model)
        await asyncio.to_thread(self._store.sweep)
        self._wanted_servers = await asyncio.to_thread(self._count_wanted_servers)

    def _count_wanted_servers(self) -> float:
        seconds = self._pace.seconds_per_request
        if seconds is None:
            return 0.0
        batches = self._store.with_status("in_progress")
        open_until = [(b.total - b.completed - b.failed, b.expires_at) for b in batches]
        return wanted_servers(open_until, seconds, self._clock())

    def _validate(self, batch: BatchJob) -> ValidatedFile:
        file = self._store.files.get(batch.input_file_id)
        pieces = iter(()) if file is None else self._store.files.content(file)
        return validate_file(pieces, batch.endpoint)

    async def _start_requests(self) -> None:
        num_free = self._options.max_concurrency - len(self._running)
        window = self._options.window
        if num_free <= 0 or self._timer() < self._paused_until_s:
            return
        if window is not None and not window.contains(datetime.fromtimestamp(self._clock())):
            return
        if await asyncio.to_thread(lambda: self._store.is_full):
            return
        leases = await asyncio.to_thread(self._store.lease, num_free)
        for lease in leases:
            self._running[lease.token] = (lease, asyncio.ensure_future(self._run_one(lease)))
        self._note_pace(0)

    async def _run_one(self, lease: Lease) -> None:
        """Run one request; whatever happens, its place becomes free."""
        try:
            self._results.append(await self._execute(lease))
        except EngineBusy:
            self._paused_until_s = self._timer() + self._options.poll_s
            await asyncio.to_thread(self._store.release, [lease])
        except Exception as error:
            _LOG.exception("a batch request failed")
            self._results.append(failed_result(lease, "server_error", type(error).__name__))
        finally:
            self._running.pop(lease.token, None)
            self.wake()

    async def _settle(self) -> None:
        results = list(self._results)
        if results:
            await asyncio.to_thread(self._store.settle, results)
            del self._results[: len(results)]
        self._note_pace(len(results))
        if results:
            await asyncio.to_thread(self._complete_batches, results)

    def _note_pace(self, num_results: int) -> None:
        share = len(self._running) / self._options.max_concurrency
        self._pace.note(self._timer(), num_results, share)

    def _complete_batches(self, results: Sequence[BatchResult]) -> None:
        """Complete a batch with its last request, and not at the next poll."""
        finalizing = {batch.id for batch in self._store.with_status("finalizing")}
        if finalizing & {result.lease.batch_id for result in results}:
            self._store.sweep()

    async def _wait(self) -> None:
        """Wait for something to happen, at most until the next poll.

        One more iteration of the event loop gathers results that arrive together.
        """
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake_event.wait(), self._options.poll_s)
            await asyncio.sleep(0)
        self._wake_event.clear()

    async def _release_running(self) -> None:
        """Settle what has a result; cancel and release the rest."""
        running = list(self._running.values())
        for _, task in running:
            task.cancel()
        await asyncio.gather(*(task for _, task in running), return_exceptions=True)
        await self._settle()
        await asyncio.to_thread(self._store.release, [lease for lease, _ in running])


def failed_result(lease: Lease, code: str, message: str) -> BatchResult:
    """The result of a request that got no response."""
    line = {
        "id": lease.request_id,
        "custom_id": lease.custom_id,
        "response": None,
        "error": {"code": code, "message": message},
    }
    return BatchResult(lease=lease, succeeded=False, line=msgspec.json.encode(line))


def _minutes(text: str, window: str) -> int:
    hours, colon, minutes = text.strip().partition(":")
    if not (colon and hours.isdecimal() and minutes.isdecimal()):
        raise _bad_window(window)
    if int(hours) > 23 or int(minutes) > 59:
        raise _bad_window(window)
    return int(hours) * 60 + int(minutes)


def _bad_window(text: str) -> BadInput:
    return BadInput("not a window of the day", value=text, fix="write e.g. 22:00-06:00")
