"""Split a stream of text at an opening and a closing marker."""

from __future__ import annotations

from typing import Literal, Protocol

from ridgeline.serve.output_parsers.base import partial_marker_length

SegmentKind = Literal["outside", "inside", "closed"]
Segment = tuple[SegmentKind, str]


class ClosingGuard(Protocol):
    """Tells closing markers from text that looks like one. Fed everything that is inside."""

    def feed(self, text: str) -> None: ...

    def is_open(self) -> bool:
        """Whether a closing marker here would be a part of the text."""
        ...

    def reset(self) -> None:
        """Forget the text: it was closed."""
        ...


class EveryMarkerCloses:
    """The guard of formats whose text cannot contain the closing marker."""

    def feed(self, text: str) -> None:
        """Ignore the text."""

    def is_open(self) -> bool:
        return False

    def reset(self) -> None:
        """Has no state."""


class MarkerSplitter:
    """Yields (kind, text) segments; "closed", without text, follows what was inside.

    `inside`: the text begins behind an opening marker. A suffix that may be the beginning of the
    next marker is held back.
    """

    def __init__(
        self,
        opening: str,
        closing: str,
        *,
        inside: bool = False,
        guard: ClosingGuard | None = None,
    ) -> None:
        self._opening, self._closing, self.inside = opening, closing, inside
        self._guard: ClosingGuard = guard or EveryMarkerCloses()
        self._held = ""

    def feed(self, text: str) -> list[Segment]:
        self._held += text
        segments: list[Segment] = []
        while True:
            marker = self._closing if self.inside else self._opening
            head, is_found, tail = self._held.partition(marker)
            if not is_found:
                break
            segments += self._segment(head)
            self._held = tail
            if self.inside and self._guard.is_open():
                segments += self._segment(marker)
                continue
            if self.inside:
                self._guard.reset()
                segments.append(("closed", ""))
            self.inside = not self.inside
        cut = len(self._held) - partial_marker_length(self._held, [marker])
        segments += self._segment(self._held[:cut])
        self._held = self._held[cut:]
        return segments

    def finish(self) -> list[Segment]:
        """The text that was held back."""
        text, self._held = self._held, ""
        return self._segment(text)

    def _segment(self, text: str) -> list[Segment]:
        if self.inside:
            self._guard.feed(text)
        return [("inside" if self.inside else "outside", text)] if text else []
