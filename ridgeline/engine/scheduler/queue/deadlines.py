"""Requests by deadline: once `Request.deadline_s` has passed, the answer is of no use."""

from __future__ import annotations

import heapq

from ridgeline.engine.scheduler.sequence import SequenceGroup


class Deadlines:
    """A heap of deadlines in seconds on the caller's clock.

    Requests that end stay in the heap until their deadline; the caller checks for that.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, SequenceGroup]] = []

    @property
    def next_s(self) -> float | None:
        """The earliest deadline; None if there is none."""
        return self._heap[0][0] if self._heap else None

    def add(self, group: SequenceGroup) -> None:
        """Track the request's deadline, if it has one."""
        if group.request.deadline_s is not None:
            heapq.heappush(self._heap, (group.request.deadline_s, group.serial, group))

    def pop_passed(self, now_s: float) -> list[SequenceGroup]:
        """Remove and return the groups whose deadline is at most `now_s`, earliest first."""
        passed = []
        while self._heap and self._heap[0][0] <= now_s:
            passed.append(heapq.heappop(self._heap)[2])
        return passed
