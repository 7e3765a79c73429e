"""The engine as batch lines see it: the same one, but everything asked of it may wait.

An app built over this wrapper (`create_app(background(engine))`) answers a line exactly as the
online one would: same checks, same defaults, same fields. It keeps meters of its own, so that the
latencies of lines never mix with those that were promised to people.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

from ridgeline.records import Event, Sampling
from ridgeline.serve.contract import ServedEngine


class _Background:
    """Delegates everything; `stream` asks in the background class."""

    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def stream(
        self, prompt: str | Sequence[int], sampling: Sampling, **terms: Any
    ) -> AsyncIterator[Event]:
        return self._engine.stream(prompt, sampling, **{**terms, "background": True})


def background(engine: ServedEngine) -> ServedEngine:
    """`engine`, asked in the background class."""
    return cast("ServedEngine", _Background(engine))
