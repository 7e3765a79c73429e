"""Requests for which no backend is ready wait, within bounds, until one is."""

from __future__ import annotations

import asyncio
import math

from ridgeline.serve.errors import ApiError


class Parking:
    """Holds up to `max_parked` requests for `timeout_s` each."""

    def __init__(self, max_parked: int, timeout_s: float) -> None:
        self._max_parked, self.timeout_s = max_parked, timeout_s
        self.num_parked = 0
        self._opened = asyncio.Event()

    def release(self) -> None:
        """A backend has become ready: everyone looks again."""
        self._opened.set()
        self._opened = asyncio.Event()

    async def wait(self, deadline_s: float) -> None:
        """Wait for a backend; ApiError 503 if too many wait or the deadline, on the event loop's
        clock, passes."""
        now_s = asyncio.get_running_loop().time()
        if self.num_parked >= self._max_parked:
            raise self._refusal(f"no backend is ready, and {self.num_parked} requests wait for one")
        if now_s >= deadline_s:
            raise self._refusal(f"no backend was ready within {self.timeout_s:g} s")
        self.num_parked += 1
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._opened.wait()
        except TimeoutError:
            raise self._refusal(f"no backend was ready within {self.timeout_s:g} s") from None
        finally:
            self.num_parked -= 1

    def _refusal(self, message: str) -> ApiError:
        retry_after = {"retry-after": str(max(1, math.ceil(self.timeout_s / 4)))}
        return ApiError(503, message, headers=retry_after)
