"""Delivers events from the engine thread to a waiting thread or to an asyncio event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue

from ridgeline.engine.validate import id_in_use
from ridgeline.records import Event, Failed, Finished, Token

Sink = Callable[[Sequence[Event]], None]
"""Called on the event loop with a request's events; must neither block nor raise."""


class BlockingInbox:
    """For a blocking caller: yields the events of all requests submitted with it, in order."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Sequence[Event]] = SimpleQueue()

    def deliver(self, events: Sequence[Event]) -> None:
        self._queue.put(events)

    def __iter__(self) -> Iterator[Event]:
        """Never ends: the reader stops once all of its requests have ended."""
        while True:
            yield from self._queue.get()


class Inbox:
    """Passes the events of one request to its sink, and counts its unfinished choices."""

    __slots__ = ("num_unfinished", "sink")

    def __init__(self, sink: Sink, num_choices: int) -> None:
        self.sink, self.num_unfinished = sink, num_choices

    def take(self, events: Sequence[Event]) -> bool:
        """Pass events to the sink; returns True if none can follow."""
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
    """Delivers events to one event loop: one sink per request, one wake-up per engine step.

    Waking a loop from another thread costs a system call. With one per token, 64 streams would cost
    the engine thread more than planning the step. If the loop is behind, the events of several
    steps are delivered together, so that a stream writes to its socket only once.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._inboxes: dict[str, Inbox] = {}
        self._awaiting_first: dict[str, None] = {}  # requests without a token so far
        self._pending: deque[Sequence[Event]] = deque()

    def open(self, request_id: str, sink: Sink, num_choices: int) -> Inbox:
        """Register a request's sink. Call on the loop. Raises BadInput if the id is in use."""
        if request_id in self._inboxes:
            raise id_in_use(request_id)
        inbox = self._inboxes[request_id] = Inbox(sink, num_choices)
        self._awaiting_first[request_id] = None
        return inbox

    def close(self, request_id: str, inbox: Inbox) -> bool:
        """Unregister a sink. Call on the loop. Returns True if events could still have followed."""
        if self._inboxes.get(request_id) is not inbox:
            return False  # the request has ended, and its id may have been reused
        del self._inboxes[request_id]
        self._awaiting_first.pop(request_id, None)
        return True

    def deliver(self, events: Sequence[Event]) -> None:
        self._pending.append(events)
        if len(self._pending) == 1:  # otherwise a wake-up is pending and will deliver these too
            try:
                self._loop.call_soon_threadsafe(self._dispatch)
            except RuntimeError:  # the loop is closed: no receiver is left
                self._pending.clear()

    def _dispatch(self) -> None:
        """Deliver pending events by request; requests that await their first token go first."""
        by_request: dict[str, list[Event]] = {}
        while self._pending:
            for event in self._pending.popleft():
                if (own_events := by_request.get(event.request_id)) is not None:
                    own_events.append(event)
                else:
                    by_request[event.request_id] = [event]
        # A copy: dispatching removes entries.
        for request_id in [name for name in self._awaiting_first if name in by_request]:
            self._dispatch_to(request_id, by_request.pop(request_id))
        for request_id, events in by_request.items():
            self._dispatch_to(request_id, events)

    def _dispatch_to(self, request_id: str, events: Sequence[Event]) -> None:
        inbox = self._inboxes.get(request_id)
        if inbox is None:
            return
        if request_id in self._awaiting_first and any(isinstance(event, Token) for event in events):
            del self._awaiting_first[request_id]
        if inbox.take(events):
            self.close(request_id, inbox)

    def __bool__(self) -> bool:
        """True while a sink is registered."""
        return bool(self._inboxes)
