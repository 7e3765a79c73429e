"""The engine of a twin: a request takes as long outside of steps as published engines need."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from ridgeline.engine.build import EngineParts
from ridgeline.engine.config import ResolvedSettings
from ridgeline.engine.engine import Engine
from ridgeline.records import Event, Sampling


class TwinEngine(Engine):
    """`overhead_s`: seconds of `clock` that pass before a request reaches the scheduler."""

    def __init__(
        self,
        settings: ResolvedSettings,
        parts: EngineParts,
        *,
        overhead_s: float,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(settings, parts, clock=clock)
        self._overhead_s = overhead_s

    async def listen(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling,
        sink: Callable[[Sequence[Event]], None],
        *,
        timeout_s: float | None = None,
        **options: Any,
    ) -> Callable[[], None]:
        """As `Engine.listen`, after the overhead, which counts towards `timeout_s`."""
        if self._overhead_s:
            await asyncio.sleep(self._overhead_s)
        left_s = None if timeout_s is None else max(0.0, timeout_s - self._overhead_s)
        return await super().listen(prompt, sampling, sink, timeout_s=left_s, **options)
