"""The engine as batch lines see it: the same one, but everything asked of it may wait.

An app built over this wrapper (`create_app(background(engine))`) answers a line exactly as the
online one would: same checks, same defaults, same fields. It keeps meters of its own, so that the
latencies of lines never mix with those that were promised to people.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from ridgeline.records import Sampling
from ridgeline.serve.engine_protocol import ServedEngine, Sink


class _Background:
    """Delegates everything; `listen` asks in the background class."""

    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def listen(
        self, prompt: str | Sequence[int], sampling: Sampling, sink: Sink, **terms: Any
    ) -> Callable[[], None]:
        return await self._engine.listen(prompt, sampling, sink, **{**terms, "background": True})


def background(engine: ServedEngine) -> ServedEngine:
    """`engine`, asked in the background class."""
    return cast("ServedEngine", _Background(engine))
