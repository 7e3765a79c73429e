"""Stopping without breaking a promise.

    running ──SIGTERM──▶ draining ──all answered, or out of time──▶ stopped
                             └──a second signal──▶ stopped at once

While it drains the server still listens: `/ready` says 503 so that a balancer looks elsewhere, new
requests get 503 with a time to retry (elsewhere), and running answers go on. What is stopped ends
with the same 503: as an answer where none has begun, else as the stream's last word.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from ridgeline.serve.errors import ApiError


class Drain:
    """Whether the server is stopping, and how many requests are under way."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._until_s: float | None = None
        self.num_under_way = 0

    @property
    def is_draining(self) -> bool:
        return self._until_s is not None

    @property
    def is_over(self) -> bool:
        """Nothing is under way any more, or the time is up."""
        if self._until_s is None:
            return False
        return not self.num_under_way or self._now() >= self._until_s

    def begin(self, timeout_s: float) -> None:
        """Begin nothing new; a second call changes nothing."""
        if self._until_s is None:
            self._until_s = self._now() + timeout_s

    def refusal(self) -> ApiError:
        """What nobody here answers any more, and when to come back: once whoever replaces this
        server may be listening."""
        left_s = 0.0 if self._until_s is None else self._until_s - self._now()
        headers = {"retry-after": str(max(1, math.ceil(left_s))), "connection": "close"}
        return ApiError(503, "the server is stopping", headers=headers)

    def __enter__(self) -> None:
        """One request more is under way, until its `with` ends."""
        self.num_under_way += 1

    def __exit__(self, *_raised: object) -> None:
        self.num_under_way -= 1
