"""Stop strings in text that arrives in pieces.

What. Text that may be the beginning of a stop string is held back until the string is complete or
can no longer match. Only what really matches the beginning of a stop string is held back, so
streams stay smooth.

Invariant. The result does not depend on the boundaries of the pieces: it is that of text arriving
one character at a time. Of several matches the one that ends first wins, and among those the
longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class StopMatcher(Protocol):
    """Finds stop strings in text that arrives in pieces."""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that can be delivered, and the stop string once one is found."""
        ...

    def flush(self) -> str:
        """The text held back for a stop string that did not complete."""
        ...


class NoStops:
    """Passes all text through."""

    def push(self, text: str) -> tuple[str, str | None]:
        return text, None

    def flush(self) -> str:
        return ""


class StopStrings:
    """Finds any of `stops`; with `include` the string found stays in the text."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops, self._include = tuple(stops), include
        self._longest = max(map(len, self._stops))
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        self._held += text
        starts = ((self._held.find(stop), stop) for stop in self._stops)
        matches = ((start + len(stop), start, stop) for start, stop in starts if start >= 0)
        first = min(matches, default=None)
        if first is not None:
            end, start, stop = first
            shown, self._held = self._held[: end if self._include else start], ""
            return shown, stop
        cut = len(self._held) - self._num_undecided()
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, None

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _num_undecided(self) -> int:
        """Length of the longest suffix that is the beginning of a stop string."""
        for length in range(min(len(self._held), self._longest - 1), 0, -1):
            suffix = self._held[-length:]
            if any(stop.startswith(suffix) for stop in self._stops):
                return length
        return 0


def make_stops(stops: Sequence[str], *, include: bool) -> StopMatcher:
    """A matcher for `stops`, which may be empty."""
    return StopStrings(stops, include=include) if stops else NoStops()
