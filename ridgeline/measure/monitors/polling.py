"""Readings before, periodically during, and after a run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

PERIOD_S = 0.5


class Polling:
    """Calls `read` before, in and after an `async with` block, unless it first returns False."""

    def __init__(self, read: Callable[[], Awaitable[bool]], period_s: float = PERIOD_S) -> None:
        self._read, self._period_s = read, period_s
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Polling:
        if await self._read():
            self._task = asyncio.get_running_loop().create_task(self._poll())
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._task is None:
            return
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        await self._read()

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            await self._read()
