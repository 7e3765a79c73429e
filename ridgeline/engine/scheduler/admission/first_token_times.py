"""How long a batch may wait to fill, derived from the TTFT that its first request has to meet.

    start by = arrival + 0.95 SLO's TTFT - p95 of the time from a request's slot to its first token

The p95 is that of the last WINDOW requests, so that 95 % of those which waited to the end meet the
SLO, if the next batches are like the last; a twentieth of the TTFT is kept for larger ones. Before
MIN_MEASURED requests, and for requests without a TTFT, nothing is derived.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from ridgeline.records import Event, Failed, Finished, Request, Started, Token

SPENT = 0.95
WINDOW, MIN_MEASURED, MAX_OPEN = 200, 8, 4096


class FirstTokenTimes:
    """Seconds from the first slot of requests to their first token, of the last WINDOW."""

    def __init__(self) -> None:
        self._started_s: dict[str, float] = {}
        self._seconds: deque[float] = deque(maxlen=WINDOW)

    def observe(self, events: Iterable[Event]) -> None:
        """Take the events of a step."""
        for event in events:
            if isinstance(event, Started):
                self._started_s.setdefault(event.request_id, event.at_s)
                if len(self._started_s) > MAX_OPEN:  # requests that were cancelled without an event
                    del self._started_s[next(iter(self._started_s))]
            elif isinstance(event, Token | Finished | Failed):
                started_s = self._started_s.pop(event.request_id, None)
                if started_s is not None and isinstance(event, Token):
                    self._seconds.append(event.at_s - started_s)

    @property
    def p95_s(self) -> float | None:
        """None before MIN_MEASURED requests."""
        if len(self._seconds) < MIN_MEASURED:
            return None
        return sorted(self._seconds)[math.ceil(0.95 * len(self._seconds)) - 1]

    def latest_start_s(self, request: Request) -> float | None:
        """When a request has to get its slot to meet its TTFT, but not before it arrived; None
        where that is not known."""
        ttft_s = None if request.slo is None else request.slo.ttft_s
        p95_s = self.p95_s if ttft_s is not None else None
        if ttft_s is None or p95_s is None:
            return None
        return request.arrival_s + max(0.0, SPENT * ttft_s - p95_s)
