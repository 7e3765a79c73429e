"""Stop strings in text that arrives in pieces.

What: text that may be the beginning of a stop string is held back until it is one, or can no longer
be. Only as much is held as really matches the head of some stop string, so that streams stay
smooth.

Invariant: the result does not depend on where the pieces end: it is that of text arriving one
character at a time. Of several matches the one that ends first wins, and among those the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Stops(Protocol):
    """`push` text; get what may be shown, and the stop string once it is found."""

    def push(self, text: str) -> tuple[str, str | None]: ...

    def flush(self) -> str:
        """What was held back for a stop string that did not come."""
        ...


class NoStops:
    """Nobody waits for a string."""

    def push(self, text: str) -> tuple[str, str | None]:
        return text, None

    def flush(self) -> str:
        return ""


class StopStrings:
    """Waits for any of `stops`; `include` leaves the one that was found in the text."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops, self._include = tuple(stops), include
        self._longest = max(map(len, self._stops))
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        self._held += text
        found = self._first_match()
        if found is not None:
            end, start, stop = found
            shown, self._held = self._held[: end if self._include else start], ""
            return shown, stop
        cut = len(self._held) - self._num_undecided()
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, None

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _first_match(self) -> tuple[int, int, str] | None:
        starts = ((self._held.find(stop), stop) for stop in self._stops)
        return min(((at + len(stop), at, stop) for at, stop in starts if at >= 0), default=None)

    def _num_undecided(self) -> int:
        """Length of the longest tail that is the head of a stop string."""
        for length in range(min(len(self._held), self._longest - 1), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0


def make_stops(stops: Sequence[str], *, include: bool) -> Stops:
    """Stop strings, or the object for none."""
    return StopStrings(stops, include=include) if stops else NoStops()
