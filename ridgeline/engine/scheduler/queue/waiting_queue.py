"""Who goes first: an order that cannot starve anybody, and a queue that keeps it in O(log n).

Lower priority goes first, and waiting counts too: every `aging_s` seconds of it are worth one
priority level. The request with the smaller

    priority - waited_s / aging_s      =  priority - (now - arrival_s) / aging_s

goes first. `now` is the same for both sides of every comparison, so the order is that of arrival_s
+ priority * aging_s, which never changes: a static key, and no queue ever needs re-sorting. In
words: a level of priority is a head start of `aging_s` seconds. A request that is k levels behind can
be overtaken only by requests that arrive within k * aging_s after it, however many come later.

A promise shifts the key too: a request whose first token is due T seconds after its arrival stands T
seconds further back than one that was promised nothing (T = 0). Among requests with promises that is
earliest deadline first (Liu and Layland, JACM 1973), and it starves nobody for the same reason.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict

from ridgeline.engine.scheduler.sequence import OrderKey, Sequence, SortKey
from ridgeline.records import Request

_SLACK = 64  # dead heap entries that are tolerated before the heap is rebuilt


def order_key(request: Request, aging_s: float, serial: int, index: int) -> OrderKey:
    """The static sort key of choice `index` of a request; `serial` breaks ties in order of arrival."""
    promised_s = (request.slo.ttft_s or 0.0) if request.slo is not None else 0.0
    return (request.arrival_s + promised_s + request.priority * aging_s, serial, index)


class WaitingQueue:
    """Sequences by key. `discard` is lazy: the heap keeps a dead entry until it surfaces."""

    def __init__(self) -> None:
        self._heap: list[tuple[SortKey, Sequence]] = []
        self._live: OrderedDict[int, Sequence] = OrderedDict()  # in order of being pushed

    def __len__(self) -> int:
        return len(self._live)

    @property
    def oldest_arrival_s(self) -> float | None:
        """Arrival of the sequence that was pushed first; None when the queue is empty."""
        for seq in self._live.values():
            return seq.request.arrival_s
        return None

    def push(self, seq: Sequence) -> None:
        self._live[seq.id] = seq
        heapq.heappush(self._heap, (seq.key, seq))

    def peek(self) -> Sequence | None:
        while self._heap and self._heap[0][1].id not in self._live:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Sequence:
        seq = self.peek()
        assert seq is not None, "pop from an empty queue"
        heapq.heappop(self._heap)
        del self._live[seq.id]
        return seq

    def discard(self, seq: Sequence) -> None:
        """Take a sequence out, wherever it stands; unknown ones are ignored."""
        if self._live.pop(seq.id, None) is not None and self._mostly_dead:
            self._heap = [(live.key, live) for live in self._live.values()]
            heapq.heapify(self._heap)

    @property
    def _mostly_dead(self) -> bool:
        return len(self._heap) > 2 * len(self._live) + _SLACK
