"""Graceful shutdown.

    running ──SIGTERM──▶ draining ──no request left, or timeout──▶ stopped
                             └──a second signal──▶ stopped at once

A draining server still listens: `/ready` is 503 so that a load balancer looks elsewhere, new
requests get 503 with a Retry-After, and running requests continue. Requests that are cut off end
with the same 503: as a response if none has started, else as the last event of the stream.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from ridgeline.serve.errors import ApiError


class ServerStopping(ApiError):
    """A request was refused or cut off by a server that stops: another one may take it."""


class DrainState:
    """Whether the server is shutting down, and how many requests are in progress."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._deadline_s: float | None = None
        self.num_in_progress = 0

    @property
    def is_draining(self) -> bool:
        return self._deadline_s is not None

    @property
    def is_over(self) -> bool:
        """Whether no request is in progress any more, or the time is up."""
        if self._deadline_s is None:
            return False
        return not self.num_in_progress or self._now() >= self._deadline_s

    def start(self, timeout_s: float) -> None:
        """Refuse new requests; a second call changes nothing."""
        if self._deadline_s is None:
            self._deadline_s = self._now() + timeout_s

    def refusal(self) -> ServerStopping:
        """503 with the time after which a replacement may be listening."""
        left_s = 0.0 if self._deadline_s is None else self._deadline_s - self._now()
        headers = {"retry-after": str(max(1, math.ceil(left_s))), "connection": "close"}
        return ServerStopping(503, "the server is stopping", headers=headers)

    def __enter__(self) -> None:
        """Count a request as in progress until the block ends."""
        self.num_in_progress += 1

    def __exit__(self, *_raised: object) -> None:
        self.num_in_progress -= 1
