"""Stop strings in text that arrives in pieces.

What. Text that may be the beginning of a stop string is held back until the string is complete or
can no longer match. Only what really matches the beginning of a stop string is held back, so
streams stay smooth.

Invariant. The result does not depend on the boundaries of the pieces: it is that of text arriving
one character at a time. Of several matches the one that ends first wins, and among those the
longest.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol


class StopMatcher(Protocol):
    """Finds stop strings in text that arrives in pieces."""

    def push(
        self, text: str, skipped: str = "", *, may_stop: bool = True
    ) -> tuple[str, str | None]:
        """The text that can be delivered, and the stop string once one is found.

        `skipped`: the special token that follows `text` and is not delivered. Only the stop
        strings that contain a special token are compared with it. Unless it `may_stop` the text, a
        stop string that ends in this piece is not found.
        """
        ...

    def flush(self) -> str:
        """The text held back for a stop string that did not complete."""
        ...


class NoStops:
    """Passes all text through."""

    def push(
        self, text: str, skipped: str = "", *, may_stop: bool = True
    ) -> tuple[str, str | None]:
        return text, None

    def flush(self) -> str:
        return ""


class StopStrings:
    """Finds any of `stops`; with `include` the string found stays in the text."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops, self._include = tuple(stops), include
        self._longest = max(map(len, self._stops))
        self._held = ""

    def push(
        self, text: str, skipped: str = "", *, may_stop: bool = True
    ) -> tuple[str, str | None]:
        num_known = len(self._held)
        self._held += text
        first = min(_matches(self._held, num_known, self._stops if may_stop else ()), default=None)
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
        return _num_undecided(self._held, self._stops, self._longest)


class StopsWithSpecialTokens:
    """Finds stop strings in text from which special tokens are skipped.

    The strings `over_special` contain special tokens and are compared with the text before special
    tokens are skipped; `stops` are compared with the text that is delivered. With `include` the
    string found stays in the text, special tokens and all.
    """

    def __init__(
        self, stops: Sequence[str], over_special: Sequence[str], *, include: bool = False
    ) -> None:
        self._stops, self._over_special, self._include = tuple(stops), tuple(over_special), include
        self._longest = max(map(len, (*self._stops, *self._over_special)))
        self._held = ""  # with special tokens
        self._places: list[int] = []  # in `_held`, of the characters that are delivered

    def push(
        self, text: str, skipped: str = "", *, may_stop: bool = True
    ) -> tuple[str, str | None]:
        num_known, num_visible = len(self._held), len(self._places)
        self._places += range(num_known, num_known + len(text))
        self._held += text + skipped
        matches = [
            *self._visible_matches(num_visible),
            *_matches(self._held, num_known, self._over_special),
        ]
        if matches and may_stop:
            _, start, stop = min(matches)
            shown = self._take(start)
            self._held, self._places = "", []
            return (shown + stop if self._include else shown), stop
        return self._take(len(self._held) - self._num_undecided()), None

    def flush(self) -> str:
        return self._take(len(self._held))

    @property
    def _visible(self) -> str:
        return "".join(self._held[place] for place in self._places)

    def _visible_matches(self, num_known: int) -> list[tuple[int, int, str]]:
        """As `_matches` in the delivered text, with places in `_held`."""
        places = self._places
        return [
            (places[end - 1] + 1, places[start], stop)
            for end, start, stop in _matches(self._visible, num_known, self._stops)
        ]

    def _num_undecided(self) -> int:
        """Length of the end of `_held` that may belong to a stop string."""
        over_special = _num_undecided(self._held, self._over_special, self._longest)
        visible = _num_undecided(self._visible, self._stops, self._longest)
        since = self._places[-visible] if visible else len(self._held)
        return max(over_special, len(self._held) - since)

    def _take(self, length: int) -> str:
        """Remove the first `length` characters; return those of them that are delivered."""
        num_shown = bisect_left(self._places, length)
        shown = "".join(self._held[place] for place in self._places[:num_shown])
        self._held = self._held[length:]
        self._places = [place - length for place in self._places[num_shown:]]
        return shown


def _matches(text: str, num_known: int, stops: Sequence[str]) -> list[tuple[int, int, str]]:
    """(end, start, stop) of the first match of each stop string that ends after the first
    `num_known` characters."""
    starts = ((text.find(stop, max(0, num_known - len(stop) + 1)), stop) for stop in stops)
    return [(start + len(stop), start, stop) for start, stop in starts if start >= 0]


def _num_undecided(text: str, stops: Sequence[str], longest: int) -> int:
    """Length of the longest end of `text` that is the beginning of a stop string."""
    for length in range(min(len(text), longest - 1), 0, -1):
        suffix = text[-length:]
        if any(stop.startswith(suffix) for stop in stops):
            return length
    return 0


def make_stops(
    stops: Sequence[str], *, include: bool, over_special: Sequence[str] = ()
) -> StopMatcher:
    """A matcher for `stops`, which may be empty, and for `over_special`, which contain special
    tokens that the text lacks."""
    if over_special:
        return StopsWithSpecialTokens(stops, over_special, include=include)
    return StopStrings(stops, include=include) if stops else NoStops()
