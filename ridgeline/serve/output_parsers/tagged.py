"""Split a stream of text at an opening and a closing marker."""

from __future__ import annotations

from typing import Literal

from ridgeline.serve.output_parsers.base import partial_marker_length

SegmentKind = Literal["outside", "inside", "closed"]
Segment = tuple[SegmentKind, str]


class MarkerSplitter:
    """Yields (kind, text) segments; "closed", without text, follows what was inside.

    `inside`: the text begins behind an opening marker. A suffix that may be the beginning of the
    next marker is held back.
    """

    def __init__(self, opening: str, closing: str, *, inside: bool = False) -> None:
        self._opening, self._closing, self.inside = opening, closing, inside
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
            if self.inside:
                segments.append(("closed", ""))
            self.inside, self._held = not self.inside, tail
        cut = len(self._held) - partial_marker_length(self._held, [marker])
        segments += self._segment(self._held[:cut])
        self._held = self._held[cut:]
        return segments

    def finish(self) -> list[Segment]:
        """The text that was held back."""
        text, self._held = self._held, ""
        return self._segment(text)

    def _segment(self, text: str) -> list[Segment]:
        return [("inside" if self.inside else "outside", text)] if text else []
