"""How events reach those who wait for them: a blocking queue, or an asyncio loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from queue import SimpleQueue

from ridgeline.engine.validate import id_in_use
from ridgeline.records import Event


class BlockingInbox:
    """For a thread that waits: the events of all asks submitted with it, in order."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Sequence[Event]] = SimpleQueue()

    def deliver(self, events: Sequence[Event]) -> None:
        self._queue.put(events)

    def __iter__(self) -> Iterator[Event]:
        """Without end: the reader knows when it has seen enough."""
        while True:
            yield from self._queue.get()


class AsyncInboxes:
    """For the coroutines of one asyncio loop: one queue per ask, one wake-up per engine step.

    Waking a loop from another thread costs a system call; with one call per token, 64 streams would
    cost the engine thread more than planning the step.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queues: dict[str, asyncio.Queue[Event]] = {}

    def open(self, ask_id: str) -> asyncio.Queue[Event]:
        """On the loop: where the ask's events will come. BadInput where its id is in use."""
        if ask_id in self._queues:
            raise id_in_use(ask_id)
        queue = self._queues[ask_id] = asyncio.Queue()
        return queue

    def close(self, ask_id: str) -> None:
        """On the loop: nobody reads them any more."""
        self._queues.pop(ask_id, None)

    def deliver(self, events: Sequence[Event]) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(self._spread, events)

    def _spread(self, events: Sequence[Event]) -> None:
        for event in events:
            queue = self._queues.get(event.ask_id)
            if queue is not None:
                queue.put_nowait(event)

    def __bool__(self) -> bool:
        """Whether anybody still reads."""
        return bool(self._queues)
