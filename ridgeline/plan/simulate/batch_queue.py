"""The open batch requests of a simulated fleet, as servers with one batch store share them.

    arrival ─▶ waiting ──take──▶ running on a replica ──end──▶ served
                  ▲                   │
                  └──── put back ─────┘ the replica failed

A replica takes the oldest request whenever it runs fewer than it has slots, within the off-peak
window if there is one; the scheduler's background lane lets it use what interactive requests leave.
At its deadline an open request has failed. The servers needed are those of the real batch worker
(`ridgeline.routing.batch_demand`), each of which measures the pace of its own requests.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

from ridgeline.plan.simulate.off_peak import OffPeak
from ridgeline.routing.batch_demand import BatchPace, wanted_servers


class BatchQueue:
    """Requests are indices; replicas are ids. No clock: instants are arguments, in seconds."""

    def __init__(self, off_peak: OffPeak | None) -> None:
        self._off_peak = off_peak
        self._waiting: deque[int] = deque()
        self._deadline_s: dict[int, float] = {}  # of the open requests
        self._open: dict[float, set[int]] = {}  # requests by deadline
        self._running: dict[int, set[int]] = {}  # by replica
        self._paces: dict[int, BatchPace] = {}

    def add(self, index: int, deadline_s: float) -> bool:
        """A request has arrived; True if it is the first one with that deadline."""
        self._waiting.append(index)
        self._deadline_s[index] = deadline_s
        is_first = deadline_s not in self._open
        self._open.setdefault(deadline_s, set()).add(index)
        return is_first

    def opens_s(self, now_s: float) -> float:
        """When requests may start: now, or when the off-peak window opens."""
        return now_s if self._off_peak is None else self._off_peak.opens_s(now_s)

    @property
    def first(self) -> int | None:
        """The oldest request that waits; None if none does."""
        while self._waiting and self._waiting[0] not in self._deadline_s:  # its deadline passed
            self._waiting.popleft()
        return self._waiting[0] if self._waiting else None

    def num_running(self, replica: int) -> int:
        return len(self._running.get(replica, ()))

    def take(self, replica: int, num_slots: int, now_s: float) -> int:
        """Start the oldest request that waits on the replica, which has that many slots."""
        index = self.first
        assert index is not None
        self._waiting.popleft()
        self._running.setdefault(replica, set()).add(index)
        self._note_pace(replica, num_slots, 0, now_s)
        return index

    def end(self, index: int, replica: int, num_slots: int, now_s: float) -> bool:
        """The replica has answered a request; False if that was too late."""
        self._running[replica].remove(index)
        is_open = index in self._deadline_s
        self._note_pace(replica, num_slots, int(is_open), now_s)
        if is_open:
            self._open[self._deadline_s.pop(index)].discard(index)
        return is_open

    def is_running(self, index: int, replica: int) -> bool:
        """Whether the request runs on the replica, as a batch request."""
        return index in self._running.get(replica, ())

    def put_back(self, replica: int) -> None:
        """The replica failed: its requests wait again, before the others; so does its pace."""
        running = self._running.pop(replica, set())
        self._paces.pop(replica, None)
        self._waiting.extendleft(sorted(running & self._deadline_s.keys(), reverse=True))

    def expire(self, deadline_s: float) -> Sequence[int]:
        """The deadline has passed: its open requests, which are open no longer."""
        expired = sorted(self._open.pop(deadline_s, ()))
        for index in expired:
            del self._deadline_s[index]
        return expired

    def demand(self, replicas: Iterable[int], now_s: float) -> float:
        """Servers that the open requests need to end in time, as the replicas in service say: the
        largest number counts, since all work on the same requests."""
        open_until = [(len(open_), due_s) for due_s, open_ in self._open.items()]
        paces = [self._paces[i].seconds_per_request for i in replicas if i in self._paces]
        slowest = max((seconds for seconds in paces if seconds is not None), default=math.nan)
        return 0.0 if math.isnan(slowest) else wanted_servers(open_until, slowest, now_s)

    def _note_pace(self, replica: int, num_slots: int, num_results: int, now_s: float) -> None:
        pace = self._paces.setdefault(replica, BatchPace())
        pace.note(now_s, num_results, self.num_running(replica) / num_slots)
