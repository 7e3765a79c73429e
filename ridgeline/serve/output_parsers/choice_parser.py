"""Parses one choice of a response, and counts its tool calls."""

from __future__ import annotations

from typing import Literal

from ridgeline.records import FinishReason
from ridgeline.serve.output_parsers.base import OutputPart, ParsedToolCall
from ridgeline.serve.output_parsers.select import OutputFormat

ChoiceFinishReason = FinishReason | Literal["tool_calls"]


class ChoiceParser:
    """The parser of a format for one choice; drops calls beyond the format's maximum."""

    def __init__(self, output_format: OutputFormat) -> None:
        self._format, self._parser = output_format, output_format.new_parser()
        self.num_calls = 0

    def feed(self, text: str) -> list[OutputPart]:
        return self._limit_calls(self._parser.feed(text)) if text else []

    def finish(self) -> list[OutputPart]:
        return self._limit_calls(self._parser.finish())

    def finish_reason(self, reason: FinishReason | None) -> ChoiceFinishReason | None:
        """`tool_calls` instead of `stop` for a choice that ends with calls."""
        ends_with_calls = self.num_calls and self._format.calls_end_response
        return "tool_calls" if ends_with_calls and reason == "stop" else reason

    def _limit_calls(self, parts: list[OutputPart]) -> list[OutputPart]:
        limited, max_calls = [], self._format.max_calls
        for part in parts:
            if isinstance(part, ParsedToolCall):
                if max_calls is not None and self.num_calls >= max_calls:
                    continue
                self.num_calls += 1
            limited.append(part)
        return limited
