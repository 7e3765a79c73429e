"""Parts of a model's output, and the contract of the parsers that find them.

Invariants
- A parser is fed the text of one choice in pieces of any size, then `finish` is called once. The
  parts are the same however the text was cut, except for where text is split.
- Nothing is lost: what turns out not to be a tool call becomes content, as it was written.
  Whitespace next to a call belongs to the format and is kept only between two texts.
- A call is emitted once it is complete; its arguments are the JSON text of an object.
- A parser never raises, and never runs, fetches or evaluates what it reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from ridgeline.serve.output_parsers.tool_schemas import OfferedTool


class Content(msgspec.Struct, frozen=True):
    """Text for the user."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """Text that the model wrote before its answer, for itself."""

    text: str


class ParsedToolCall(msgspec.Struct, frozen=True):
    """One complete tool call; `arguments` is JSON text."""

    name: str
    arguments: str


OutputPart = Content | Reasoning | ParsedToolCall
ToolSchemas = Mapping[str, Mapping[str, Any]]
"""JSON schema of the parameters of every tool, by name."""


class OutputParser(Protocol):
    """Text of one choice to parts."""

    def feed(self, text: str) -> list[OutputPart]: ...

    def finish(self) -> list[OutputPart]:
        """Parts of the text that was held back."""
        ...


class ToolCallFormat(Protocol):
    """How a family of models writes tool calls. `marks` may be special tokens of the model."""

    marks: tuple[str, ...]

    def parser(self, tools: ToolSchemas) -> OutputParser: ...

    def call_rules(self, tools: Sequence[OfferedTool], mark: Callable[[str], str]) -> str:
        """The rules of one call, `call`, of a grammar of kind "answer_or_calls".

        `mark` writes a mark as a symbol of the grammar.
        """
        ...


class PlainTextParser:
    """Output that is text and nothing else."""

    def feed(self, text: str) -> list[OutputPart]:
        return [Content(text)] if text else []

    def finish(self) -> list[OutputPart]:
        return []


class NamedCallParser:
    """Output that is, by its grammar, the arguments of a call of the tool `name`."""

    def __init__(self, name: str) -> None:
        self._name, self._text = name, ""

    def feed(self, text: str) -> list[OutputPart]:
        self._text += text
        return []

    def finish(self) -> list[OutputPart]:
        return [ParsedToolCall(self._name, self._text)]


def parse_calls(text: str) -> list[ParsedToolCall]:
    """The calls in a JSON object or a list of them; empty if any of it is something else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    calls = [to_call(item) for item in (value if isinstance(value, list) else [value])]
    return [call for call in calls if call is not None] if all(calls) else []


def to_call(value: object) -> ParsedToolCall | None:
    """`{"name": …, "arguments" or "parameters": {…}}` as a call; None if it is not one."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    given = [value.get("arguments"), value.get("parameters")]
    arguments: object = next((each for each in given if each is not None), {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, dict):
        return None
    return ParsedToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))


def partial_marker_length(text: str, markers: Sequence[str]) -> int:
    """Length of the longest suffix of `text` that may be the beginning of a marker."""
    longest = max(map(len, markers)) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-size:]) for marker in markers):
            return size
    return 0
