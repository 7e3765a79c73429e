"""`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes 2 Pro, Qwen 2.5, Qwen 3.

Source: Nous Research's function-calling format (2024), which Qwen's chat templates adopted.
"""

from __future__ import annotations

from ridgeline.serve.output_parsers.base import Content, Part, Reader, Schemas, calls_in
from ridgeline.serve.output_parsers.tagged import Tagged

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class TaggedCalls:
    """Calls between two markers; `_calls` reads one body.

    What stands outside calls is content as it was written. Blanks next to a call may be the
    format's: they are held, and told only where there is text before and behind them, so that
    words on both sides of a call do not touch.
    """

    def __init__(self, opening: str = OPEN, closing: str = CLOSE) -> None:
        self._tags = Tagged(opening, closing)
        self._opening, self._closing = opening, closing
        self._body, self._blank = "", ""
        self._has_text = self._is_at_call = False  # some was told; nothing but blanks since a call

    def feed(self, text: str) -> list[Part]:
        parts: list[Part] = []
        for kind, piece in self._tags.feed(text):
            if kind == "outside":
                parts += self._outside(piece)
            elif kind == "inside":
                self._body += piece
            else:
                parts += self._close()
        return parts

    def end(self) -> list[Part]:
        """A call that was never closed is content as it stands, unless it is whole all the same."""
        parts: list[Part] = []
        for kind, piece in self._tags.end():
            if kind == "outside":
                parts += self._outside(piece)
            else:
                self._body += piece
        if self._tags.inside:
            parts += self._read(self._opening + self._body)
        return parts if self._is_at_call or not self._blank else [*parts, Content(self._blank)]

    def _outside(self, text: str) -> list[Part]:
        """Blanks at the end are held until it is known what follows them."""
        text = self._blank + text
        kept = text.rstrip()
        self._blank = text[len(kept) :]
        if not kept:
            return []
        if self._is_at_call and not self._has_text:
            kept = kept.lstrip()
        self._has_text, self._is_at_call = True, False
        return [Content(kept)]

    def _close(self) -> list[Part]:
        return self._read(self._opening + self._body + self._closing)

    def _read(self, written: str) -> list[Part]:
        """The calls of the body, or what was `written`."""
        body, self._body = self._body, ""
        calls = self._calls(body)
        if not calls:
            return self._outside(written)
        self._is_at_call = True
        return calls

    def _calls(self, body: str) -> list[Part]:
        return [*calls_in(body)]


class Hermes:
    """See `ridgeline.serve.output_parsers.base.CallFormat`."""

    def reader(self, tools: Schemas) -> Reader:
        return TaggedCalls()
