"""Requests by deadline: after `Request.deadline_s` (an instant on the caller's clock) nobody wants the
answer."""

from __future__ import annotations

import heapq

from ridgeline.engine.scheduler.sequence import SequenceGroup


class Deadlines:
    """A heap of (instant, request). Requests that have ended stay until their deadline: the owner
    checks."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, SequenceGroup]] = []

    @property
    def next_s(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    def add(self, group: SequenceGroup) -> None:
        if group.request.deadline_s is not None:
            heapq.heappush(self._heap, (group.request.deadline_s, group.serial, group))

    def passed(self, now_s: float) -> list[SequenceGroup]:
        """Take out those whose deadline is `now_s` or earlier, earliest first."""
        found = []
        while self._heap and self._heap[0][0] <= now_s:
            found.append(heapq.heappop(self._heap)[2])
        return found
