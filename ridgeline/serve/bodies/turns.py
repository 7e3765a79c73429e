"""Large bodies take turns, so that many at once hold up other requests no longer than one.

Parsing a body holds the GIL, and validating it the event loop, for up to some tens of milliseconds.
Fifty bodies that are ready together would stand in the loop's queue before the next probe.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class BodyTurns:
    """One large body at a time is parsed and validated."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def parse(self, parse: Callable[[], T]) -> T:
        """The result of `parse`, which runs in a thread. The turn ends with the callback that gets
        it: what the caller does up to its next await belongs to the turn."""
        await self._lock.acquire()
        try:
            return await asyncio.to_thread(parse)
        finally:
            asyncio.get_running_loop().call_soon(self._lock.release)
