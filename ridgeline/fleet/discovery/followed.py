"""Keeps a gateway's backends as its sources have them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from ridgeline.fleet.backends import Backends
from ridgeline.fleet.upstream import BackendAddress

_POLL_S = 0.25


class Source(Protocol):
    """Backends that may change."""

    addresses: list[BackendAddress]

    async def refresh(self, now_s: float) -> None:
        """Bring `addresses` up to date, if it is time to. Raises nothing."""


class FollowedBackends:
    """The backends of all sources, next to `static` ones."""

    def __init__(self, static: Sequence[BackendAddress], sources: Sequence[Source]) -> None:
        self._static, self._sources = static, sources

    @property
    def addresses(self) -> list[BackendAddress]:
        """Each once, in their order."""
        found = [address for source in self._sources for address in source.addresses]
        return list(dict.fromkeys((*self._static, *found)))

    async def watch(self, backends: Backends) -> None:
        """Until cancelled. One source that is slow does not hold up another one."""
        await asyncio.gather(*(self._follow(source, backends) for source in self._sources))

    async def _follow(self, source: Source, backends: Backends) -> None:
        now_s = asyncio.get_running_loop().time
        while True:
            before = source.addresses
            await source.refresh(now_s())
            if source.addresses != before:
                backends.replace(self.addresses)
            await asyncio.sleep(_POLL_S)
