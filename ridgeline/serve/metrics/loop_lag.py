"""How late the event loop runs its callbacks, measured all the time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

INTERVAL_S = 0.1
LAG_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Buckets in seconds. No request should cause a lag of more than 0.05 s."""


async def watch_loop_lag(observe: Callable[[float], None], interval_s: float = INTERVAL_S) -> None:
    """Call `observe` every `interval_s` with the time by which a timer was late, in seconds.

    Whatever delays this timer delays every request: a long callback, a thread that holds the GIL, a
    busy machine. Runs until it is cancelled.
    """
    while True:
        due_s = time.perf_counter() + interval_s
        await asyncio.sleep(interval_s)
        observe(max(0.0, time.perf_counter() - due_s))
