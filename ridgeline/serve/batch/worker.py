"""The worker: leases lines, has them answered side by side, and settles what comes of them.

It holds nothing that matters: killed at any instant, the next one goes on from the store. Results
that come in together are settled in one transaction (one wait for the disk). Once per beat it
renews its leases and stops working on lines that are no longer its own: their batch has expired or
was cancelled for too long.

Outside the off-peak window it leases nothing; lines that are being answered are finished.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta

import msgspec

from ridgeline.errors import BadInput
from ridgeline.serve.batch.records import Batch, Lease, Outcome
from ridgeline.serve.batch.store import Store
from ridgeline.serve.batch.validate import Checked, check

_LOG = logging.getLogger("ridgeline.serve")
Answer = Callable[[Lease], Awaitable[Outcome]]
"""Answers one leased line. Raises Busy where it should wait."""


class Busy(Exception):  # a state, not a fault
    """The engine takes no more just now: the line is given back and tried later."""


class Window(msgspec.Struct, frozen=True):
    """Hours of the day (local time) in which lines are begun: `22:00-06:00`. Minutes of the day."""

    first: int
    last: int

    @staticmethod
    def parse(text: str) -> Window:
        first, dash, last = text.partition("-")
        window = Window(_minutes(first, text), _minutes(last if dash else "", text))
        if window.first == window.last:
            raise _bad_window(text)
        return window

    def holds(self, at: datetime) -> bool:
        minute = at.hour * 60 + at.minute
        if self.first < self.last:
            return self.first <= minute < self.last
        return minute >= self.first or minute < self.last

    def __str__(self) -> str:
        hours = (f"{at // 60:02}:{at % 60:02}" for at in (self.first, self.last))
        return "-".join(hours)


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`most`: lines at once; `beat_s`: how often it looks for work and renews its leases."""

    most: int
    beat_s: float = 1.0
    window: Window | None = None


class Worker:
    """See the head of this file. `run` ends when `stop` is called; `wake` ends a pause early."""

    def __init__(
        self,
        store: Store,
        answer: Answer,
        options: WorkerOptions,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._answer, self._options, self._clock = store, answer, options, clock
        self._running: dict[str, tuple[Lease, asyncio.Task[None]]] = {}
        self._done: list[Outcome] = []
        self._event = asyncio.Event()
        self._open = True
        self._paused_until_s = 0.0

    @property
    def num_running(self) -> int:
        """Lines that are being answered."""
        return len(self._running)

    def wake(self) -> None:
        """There may be something to do."""
        self._event.set()

    def stop(self) -> None:
        """End `run` soon; lines that are not answered are given back."""
        self._open = False
        self.wake()

    async def run(self) -> None:
        """Work until `stop`."""
        await asyncio.to_thread(self._store.recover)
        beat_at_s = 0.0
        try:
            while self._open:
                try:
                    if self._clock() >= beat_at_s:
                        await self._beat()
                        beat_at_s = self._clock() + self._options.beat_s
                    await self._settle()
                    await self._fill()
                except sqlite3.OperationalError:  # e.g. the disk is full: nothing is lost, wait
                    _LOG.exception("the batch store refused; trying again")
                await self._pause()
        finally:
            await self._give_back()

    async def run_until_idle(self) -> None:
        """Work until every batch has ended (for the command line and for tests)."""
        task = asyncio.ensure_future(self.run())
        try:
            while not task.done() and await asyncio.to_thread(self._has_live):
                await asyncio.wait([task], timeout=0.02)
        finally:
            self.stop()
            await task

    def _has_live(self) -> bool:
        return bool(self._store.having("validating", "in_progress", "finalizing", "cancelling"))

    # -- the steps of the loop

    async def _beat(self) -> None:
        leases = [lease for lease, _ in self._running.values()]
        kept = await asyncio.to_thread(self._store.renew, leases) if leases else set()
        for lease in leases:
            if lease.token not in kept and lease.token in self._running:
                self._running[lease.token][1].cancel()
        for batch in await asyncio.to_thread(self._store.having, "validating"):
            await self._validate(batch)
        await asyncio.to_thread(self._store.sweep)

    async def _validate(self, batch: Batch) -> None:
        found = await asyncio.to_thread(self._check, batch)
        if found.errors:
            await asyncio.to_thread(self._store.refuse, batch.id, found.errors)
        else:
            await asyncio.to_thread(self._store.accept, batch.id, found.lines, found.model)

    def _check(self, batch: Batch) -> Checked:
        file = self._store.files.get(batch.input_file_id)
        pieces = iter(()) if file is None else self._store.files.content(file)
        return check(pieces, batch.endpoint)

    async def _fill(self) -> None:
        room = self._options.most - len(self._running)
        window = self._options.window
        if room <= 0 or self._clock() < self._paused_until_s:
            return
        if window is not None and not window.holds(datetime.fromtimestamp(self._clock())):
            return
        if await asyncio.to_thread(lambda: self._store.is_full):
            return
        leases = await asyncio.to_thread(self._store.lease, room)
        for lease in leases:
            self._running[lease.token] = (lease, asyncio.ensure_future(self._work(lease)))

    async def _work(self, lease: Lease) -> None:
        """Answer one line; whatever happens, its place becomes free."""
        try:
            self._done.append(await self._answer(lease))
        except Busy:
            self._paused_until_s = self._clock() + self._options.beat_s
            await asyncio.to_thread(self._store.release, [lease])
        except Exception as error:
            _LOG.exception("a batch line failed")
            self._done.append(failed(lease, "server_error", type(error).__name__))
        finally:
            self._running.pop(lease.token, None)
            self.wake()

    async def _settle(self) -> None:
        done = list(self._done)
        if done:
            await asyncio.to_thread(self._store.settle, done)
            del self._done[: len(done)]
            await asyncio.to_thread(self._finish, done)

    def _finish(self, done: Sequence[Outcome]) -> None:
        """A batch whose last line this was is completed at once, not at the next beat."""
        ended = {batch.id for batch in self._store.having("finalizing")}
        if ended & {outcome.lease.batch_id for outcome in done}:
            self._store.sweep()

    async def _pause(self) -> None:
        """Until something happens, at most a beat; a moment more gathers results that come
        together."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._event.wait(), self._options.beat_s)
            await asyncio.sleep(0)
        self._event.clear()

    async def _give_back(self) -> None:
        """Settle what is answered, stop the rest and give it back."""
        left = list(self._running.values())
        for _, task in left:
            task.cancel()
        await asyncio.gather(*(task for _, task in left), return_exceptions=True)
        await self._settle()
        await asyncio.to_thread(self._store.release, [lease for lease, _ in left])


def failed(lease: Lease, code: str, message: str) -> Outcome:
    """A line that got no response at all."""
    result = {
        "id": lease.request_id,
        "custom_id": lease.custom_id,
        "response": None,
        "error": {"code": code, "message": message},
    }
    return Outcome(lease=lease, succeeded=False, result=msgspec.json.encode(result))


def seconds_of(text: str) -> int | None:
    """`24h`, `90m`, `7d` in seconds; None where it is no such thing."""
    units = {"m": "minutes", "h": "hours", "d": "days"}
    if not text[:-1].isascii() or not text[:-1].isdecimal() or text[-1:] not in units:
        return None
    number = int(text[:-1]) if len(text) < 8 else 0
    return int(timedelta(**{units[text[-1]]: number}).total_seconds()) or None


def _minutes(text: str, whole: str) -> int:
    hours, colon, minutes = text.strip().partition(":")
    if not (colon and hours.isdecimal() and minutes.isdecimal()):
        raise _bad_window(whole)
    if int(hours) > 23 or int(minutes) > 59:
        raise _bad_window(whole)
    return int(hours) * 60 + int(minutes)


def _bad_window(text: str) -> BadInput:
    return BadInput("not a window of the day", value=text, fix="write e.g. 22:00-06:00")
