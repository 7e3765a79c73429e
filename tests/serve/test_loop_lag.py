"""The lag of the event loop."""

from __future__ import annotations

import asyncio
import time

from ridgeline.serve.metrics.loop_lag import watch_loop_lag


async def test_held_event_loop_is_measured() -> None:
    lags: list[float] = []
    watcher = asyncio.create_task(watch_loop_lag(lags.append, interval_s=0.01))
    await asyncio.sleep(0.03)
    time.sleep(0.2)
    await asyncio.sleep(0.03)
    watcher.cancel()
    assert max(lags) > 0.15
