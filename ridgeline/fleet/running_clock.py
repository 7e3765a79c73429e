"""Seconds in which the gateway itself ran.

A process that was stopped, or whose machine was suspended, finds a time on its clock in which no
backend could have reached it. Silence, and how long anything took, are measured without it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

TICK_S = 0.5
_MAX_GAP_S = 4 * TICK_S  # between two readings, of a process that runs


class RunningClock:
    """The event loop's clock, without the gaps between two readings that a running process, whose
    `tick` reads it every TICK_S, does not have."""

    def __init__(self) -> None:
        self._time: Callable[[], float] | None = None  # of the event loop that reads it first
        self._last_s = self._lost_s = 0.0

    def __call__(self) -> float:
        if self._time is None:
            self._time = asyncio.get_running_loop().time
            self._last_s = self._time()
        now_s = self._time()
        if now_s - self._last_s > _MAX_GAP_S:
            self._lost_s += now_s - self._last_s - TICK_S
        self._last_s = now_s
        return now_s - self._lost_s

    async def tick(self) -> None:
        """Read the clock as long as the gateway runs."""
        while True:
            self()
            await asyncio.sleep(TICK_S)
