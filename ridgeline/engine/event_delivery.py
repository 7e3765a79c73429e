"""How events reach those who wait for them: a blocking queue, or an asyncio loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue

from ridgeline.engine.validate import id_in_use
from ridgeline.records import Event, Failed, Finished, Token

Sink = Callable[[Sequence[Event]], None]


class BlockingInbox:
    """For a thread that waits: the events of all requests submitted with it, in order."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Sequence[Event]] = SimpleQueue()

    def deliver(self, events: Sequence[Event]) -> None:
        self._queue.put(events)

    def __iter__(self) -> Iterator[Event]:
        """Without end: the reader knows when it has seen enough."""
        while True:
            yield from self._queue.get()


class Inbox:
    """One request's place in an asyncio loop: its events of a step reach `sink` in one call.

    Called on the loop, so it must neither block nor raise.
    """

    __slots__ = ("num_unfinished", "sink")

    def __init__(self, sink: Sink, num_choices: int) -> None:
        self.sink, self.num_unfinished = sink, num_choices

    def take(self, events: Sequence[Event]) -> bool:
        """Hand them over; True where nothing can follow."""
        if len(events) > 1 or type(events[0]) is not Token:
            for event in events:
                kind = type(event)
                if kind is Finished:
                    self.num_unfinished -= 1
                elif kind is Failed:
                    self.num_unfinished = 0
        self.sink(events)
        return self.num_unfinished <= 0


class AsyncInboxes:
    """For one asyncio loop: one sink per request, one wake-up per engine step.

    Waking a loop from another thread costs a system call; with one call per token, 64 streams would
    cost the engine thread more than planning the step. Where the loop is behind, what several steps
    had to say is handed over at once: whoever writes it to a socket writes once.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._inboxes: dict[str, Inbox] = {}
        self._silent: dict[str, None] = {}  # requests without a token so far
        self._pending: deque[Sequence[Event]] = deque()

    def open(self, request_id: str, sink: Sink, num_choices: int) -> Inbox:
        """On the loop: where the request's events will go. BadInput where its id is in use."""
        if request_id in self._inboxes:
            raise id_in_use(request_id)
        inbox = self._inboxes[request_id] = Inbox(sink, num_choices)
        self._silent[request_id] = None
        return inbox

    def close(self, request_id: str, inbox: Inbox) -> bool:
        """On the loop: nobody hears them any more. Whether something could still have come."""
        if self._inboxes.get(request_id) is not inbox:
            return False  # it has ended, and the id may be another's by now
        del self._inboxes[request_id]
        self._silent.pop(request_id, None)
        return True

    def deliver(self, events: Sequence[Event]) -> None:
        self._pending.append(events)
        if len(self._pending) == 1:  # else the wake-up that is under way takes them along
            try:
                self._loop.call_soon_threadsafe(self._spread)
            except RuntimeError:  # the loop is closed: nobody is left to be told
                self._pending.clear()

    def _spread(self) -> None:
        """Ask by request; before all others those that wait for their first token, which would else
        stand behind every other stream's next one."""
        told: dict[str, list[Event]] = {}
        while self._pending:
            for event in self._pending.popleft():
                if (known := told.get(event.request_id)) is not None:
                    known.append(event)
                else:
                    told[event.request_id] = [event]
        for request_id in [request_id for request_id in self._silent if request_id in told]:
            self._hand(request_id, told.pop(request_id))
        for request_id, events in told.items():
            self._hand(request_id, events)

    def _hand(self, request_id: str, events: Sequence[Event]) -> None:
        inbox = self._inboxes.get(request_id)
        if inbox is None:
            return
        if request_id in self._silent and any(isinstance(event, Token) for event in events):
            del self._silent[request_id]
        if inbox.take(events):
            self.close(request_id, inbox)

    def __bool__(self) -> bool:
        """Whether anybody still hears."""
        return bool(self._inboxes)
