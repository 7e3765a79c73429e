"""`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes 2 Pro, Qwen 2.5, Qwen 3.

Source: Nous Research's function-calling format (2024), adopted by Qwen's chat templates.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from ridgeline.serve.output_parsers.base import (
    Content,
    OutputParser,
    OutputPart,
    ToolSchemas,
    parse_calls,
)
from ridgeline.serve.output_parsers.call_list import JsonScanner
from ridgeline.serve.output_parsers.tagged import ClosingGuard, MarkerSplitter, Segment
from ridgeline.serve.output_parsers.tool_schemas import OfferedTool, call_schema

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class TaggedCallParser:
    """Calls between two markers; subclasses override `parse_body`.

    Text outside calls is content. Whitespace next to a call may belong to the format: it is held
    back, and emitted only between two texts, so that words on both sides of a call do not touch.
    """

    def __init__(
        self, opening: str = OPEN, closing: str = CLOSE, guard: ClosingGuard | None = None
    ) -> None:
        self._splitter = MarkerSplitter(opening, closing, guard=guard)
        self._opening, self._closing = opening, closing
        self._body, self._whitespace = "", ""
        self._has_text = False
        self._is_after_call = False  # only whitespace since the last call

    def feed(self, text: str) -> list[OutputPart]:
        return self._read(self._splitter.feed(text))

    def finish(self) -> list[OutputPart]:
        """A call that was never closed is content, unless its body is complete."""
        parts = self._read(self._splitter.finish())
        if self._splitter.inside:
            parts += self._end_call(self._opening + self._body)
        if self._whitespace and not self._is_after_call:
            parts.append(Content(self._whitespace))
        return parts

    def parse_body(self, body: str) -> list[OutputPart]:
        """The calls between two markers; empty if it is something else."""
        return [*parse_calls(body)]

    def _read(self, segments: Sequence[Segment]) -> list[OutputPart]:
        parts: list[OutputPart] = []
        for kind, piece in segments:
            if kind == "outside":
                parts += self._content(piece)
            elif kind == "inside":
                self._body += piece
            else:
                parts += self._end_call(self._opening + self._body + self._closing)
        return parts

    def _content(self, text: str) -> list[OutputPart]:
        """Trailing whitespace is held back until it is known what follows."""
        text = self._whitespace + text
        content = text.rstrip()
        self._whitespace = text[len(content) :]
        if not content:
            return []
        if self._is_after_call and not self._has_text:
            content = content.lstrip()
        self._has_text, self._is_after_call = True, False
        return [Content(content)]

    def _end_call(self, written: str) -> list[OutputPart]:
        """The calls of the body; content as it was `written` if there are none."""
        body, self._body = self._body, ""
        calls = self.parse_body(body)
        if calls:
            self._is_after_call = True
            return calls
        if self._closing in body:
            return self._read_unguarded(written)
        return self._content(written)

    def _read_unguarded(self, written: str) -> list[OutputPart]:
        """Read a malformed call again, up to its first closing marker: others may follow it."""
        splitter = MarkerSplitter(self._opening, self._closing)
        parts = self._read([*splitter.feed(written), *splitter.finish()])
        if splitter.inside:
            parts += self._end_call(self._opening + self._body)
        return parts


class JsonStringGuard:
    """Open inside a JSON string, where a closing marker is text like any other."""

    def __init__(self) -> None:
        self._scanner = JsonScanner()

    def feed(self, text: str) -> None:
        self._scanner.ends(text, depth=0)

    def is_open(self) -> bool:
        return self._scanner.is_in_string

    def reset(self) -> None:
        self._scanner = JsonScanner()


class HermesFormat:
    """Calls as JSON between `<tool_call>` tags."""

    marks = (OPEN, CLOSE)

    def parser(self, tools: ToolSchemas) -> OutputParser:
        return TaggedCallParser(guard=JsonStringGuard())

    def call_rules(self, tools: Sequence[OfferedTool], mark: Callable[[str], str]) -> str:
        body = "%call " + json.dumps(call_schema(tools, "arguments"))
        return f"call: {mark(OPEN)} SPACE? call_body SPACE? {mark(CLOSE)}\ncall_body: {body}\n"
