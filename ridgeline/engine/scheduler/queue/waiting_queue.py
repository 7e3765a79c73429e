"""The order in which requests are served, and a queue that maintains it in O(log n).

Lower priority values go first, and waiting counts as well: every `aging_s` seconds of it are worth
one priority level. The request with the smallest

    priority - waited_s / aging_s      =  priority - (now - arrival_s) / aging_s

goes first. `now` is the same on both sides of every comparison, so the order is that of arrival_s +
priority * aging_s, which never changes: the key is static, and no queue ever needs re-sorting. In
other words, one priority level is a head start of `aging_s` seconds. A request that is k levels
behind can only be overtaken by requests that arrive within k * aging_s after it, however many
arrive later. So no request starves.

A TTFT SLO shifts the key too: a request whose first token is due T seconds after its arrival is
placed T seconds further back than one without an SLO (T = 0). Among requests with SLOs this is
earliest deadline first (Liu and Layland, JACM 1973), and it starves no one for the same reason.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from operator import attrgetter

from ridgeline.engine.scheduler.sequence import OrderKey, Sequence, SortKey
from ridgeline.records import Request

_KEY = attrgetter("key")
_SLACK = 64  # dead heap entries to tolerate before the heap is rebuilt


def order_key(request: Request, aging_s: float, serial: int, index: int) -> OrderKey:
    """The static key of choice `index` of a request; `serial` breaks ties in order of arrival."""
    ttft_s = (request.slo.ttft_s or 0.0) if request.slo is not None else 0.0
    return (request.arrival_s + ttft_s + request.priority * aging_s, serial, index)


class WaitingQueue:
    """A priority queue of sequences.

    Removal from the middle is lazy: the heap keeps a dead entry until it surfaces.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[SortKey, Sequence]] = []
        self._live: OrderedDict[int, Sequence] = OrderedDict()  # by id, in push order

    def __len__(self) -> int:
        return len(self._live)

    @property
    def oldest_arrival_s(self) -> float | None:
        """Arrival time of the sequence that was pushed first; None if the queue is empty."""
        for seq in self._live.values():
            return seq.request.arrival_s
        return None

    def push(self, seq: Sequence) -> None:
        """Add a sequence."""
        self._live[seq.id] = seq
        heapq.heappush(self._heap, (seq.key, seq))

    def peek(self) -> Sequence | None:
        """The first sequence in order; None if the queue is empty."""
        while self._heap and self._heap[0][1].id not in self._live:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def in_order(self) -> list[Sequence]:
        """All sequences, in the order in which `pop` would return them."""
        return sorted(self._live.values(), key=_KEY)

    def pop(self) -> Sequence:
        """Remove and return the first sequence in order."""
        seq = self.peek()
        assert seq is not None, "pop from an empty queue"
        heapq.heappop(self._heap)
        del self._live[seq.id]
        return seq

    def discard(self, seq: Sequence) -> bool:
        """Remove a sequence, wherever it is in the queue; False if it is not in it."""
        if self._live.pop(seq.id, None) is None:
            return False
        if len(self._heap) > 2 * len(self._live) + _SLACK:  # mostly dead entries
            self._heap = [(live.key, live) for live in self._live.values()]
            heapq.heapify(self._heap)
        return True
