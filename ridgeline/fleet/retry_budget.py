"""How many requests may be sent again: a share of the recent ones.

Without a budget, a fleet whose every backend fails gets each request as many times as there are
attempts, just when it can bear that least. Streams that broke off are not counted: what they lost
was already computed once, and their number is bounded by that of the requests in flight.
"""

from __future__ import annotations

from collections import deque

_WINDOW_S = 60.0
_ALWAYS = 10  # retries that are granted whatever the traffic


class RetryBudget:
    """Grants retries up to `share` of the requests of the last minute. Instants in seconds."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._requests: deque[float] = deque()
        self._retries: deque[float] = deque()

    def note_request(self, now_s: float) -> None:
        self._requests.append(now_s)
        self._forget(now_s)

    def grant(self, now_s: float) -> bool:
        """Whether one more request may be sent again; counts it."""
        self._forget(now_s)
        if len(self._retries) >= _ALWAYS + self._share * len(self._requests):
            return False
        self._retries.append(now_s)
        return True

    def _forget(self, now_s: float) -> None:
        for instants in (self._requests, self._retries):
            while instants and instants[0] < now_s - _WINDOW_S:
                instants.popleft()
