"""How many servers the open batch requests need to end by their deadlines.

Of the batches that are due by an instant, every request takes the seconds that a request took of
late, at the pace that interactive requests leave; the servers needed until then are their sum over
the time that is left. The largest such number over all deadlines is the demand.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterable
from pathlib import Path

from ridgeline.serve.batch.records import BatchJob

HALF_LIFE_S = 600.0
MIN_LEFT_S = 1.0


class Pace:
    """Seconds of a server per batch request; older work counts half for every `HALF_LIFE_S`."""

    def __init__(self) -> None:
        self._busy_s = self._num_results = 0.0
        self._last_s: float | None = None

    def note(self, now_s: float, num_results: int, *, is_busy: bool) -> None:
        """`num_results` since the last call; `is_busy`: whether requests run from now on."""
        if self._last_s is not None:
            elapsed_s = max(0.0, now_s - self._last_s)
            kept = 0.5 ** (elapsed_s / HALF_LIFE_S)
            self._busy_s = kept * self._busy_s + elapsed_s
            self._num_results *= kept
        self._num_results += num_results
        self._last_s = now_s if is_busy else None

    @property
    def seconds_per_request(self) -> float | None:
        """None before the first result."""
        return self._busy_s / self._num_results if self._num_results > 0 else None


def wanted_servers(batches: Iterable[BatchJob], seconds_per_request: float, now_s: float) -> float:
    """Servers of this pace, all of their time, that end every batch by its deadline; at most one
    for each open request."""
    num_open, wanted = 0, 0.0
    for batch in sorted(batches, key=lambda batch: batch.expires_at):
        num_open += batch.total - batch.completed - batch.failed
        left_s = max(MIN_LEFT_S, batch.expires_at - now_s)
        wanted = max(wanted, min(num_open, num_open * seconds_per_request / left_s))
    return wanted


def store_name(path: Path) -> str:
    """Names a store, so that servers that share one are not counted twice."""
    place = f"{socket.gethostname()}:{path.resolve()}"
    return hashlib.sha256(place.encode()).hexdigest()[:12]
