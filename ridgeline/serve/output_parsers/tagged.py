"""Text between two markers, told from the text around it while it streams."""

from __future__ import annotations

from typing import Literal

from ridgeline.serve.output_parsers.base import held_back

Kind = Literal["outside", "inside", "closed"]


class Tagged:
    """Splits a stream at `opening` and `closing`. `inside`: it begins between them.

    "closed" (with no text) follows what was inside. The end of the text is held back while it may
    be the beginning of the marker that is waited for.
    """

    def __init__(self, opening: str, closing: str, *, inside: bool = False) -> None:
        self._opening, self._closing, self.inside = opening, closing, inside
        self._rest = ""

    def feed(self, text: str) -> list[tuple[Kind, str]]:
        self._rest += text
        found: list[tuple[Kind, str]] = []
        while True:
            marker = self._closing if self.inside else self._opening
            head, hit, tail = self._rest.partition(marker)
            if not hit:
                break
            self._emit(found, head)
            if self.inside:
                found.append(("closed", ""))
            self.inside, self._rest = not self.inside, tail
        keep = held_back(self._rest, [marker])
        sure = len(self._rest) - keep
        self._emit(found, self._rest[:sure])
        self._rest = self._rest[sure:]
        return found

    def end(self) -> list[tuple[Kind, str]]:
        """What was held back."""
        found: list[tuple[Kind, str]] = []
        self._emit(found, self._rest)
        self._rest = ""
        return found

    def _emit(self, found: list[tuple[Kind, str]], text: str) -> None:
        if text:
            found.append(("inside" if self.inside else "outside", text))
