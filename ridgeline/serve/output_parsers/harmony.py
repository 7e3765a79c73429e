"""OpenAI's harmony format: gpt-oss writes its reasoning, calls and answer in channels.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>
    <|channel|>final<|message|>…<|return|>

The prompt ends with `<|start|>assistant`. `analysis` is reasoning; `commentary` with a recipient is
a call, and without one a preamble for the user; `final` is the answer. The last mark of a response
ends it and is not part of its text. Source: OpenAI's harmony response format (August 2025).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from enum import Enum

from ridgeline.serve.output_parsers.base import (
    Content,
    OutputParser,
    OutputPart,
    Reasoning,
    ToolSchemas,
    partial_marker_length,
    to_call,
)
from ridgeline.serve.output_parsers.tool_schemas import OfferedTool, object_schema

CHANNEL, MESSAGE, START = "<|channel|>", "<|message|>", "<|start|>"
_CONSTRAIN, _CALL = "<|constrain|>", "<|call|>"
ENDS = ("<|end|>", _CALL, "<|return|>")
MARKS = (CHANNEL, MESSAGE, START, _CONSTRAIN, *ENDS)
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_NAME = re.compile(re.escape(CHANNEL) + r"(\w+)")
_OPENINGS = (CHANNEL, START, " to=")
"""How a message begins; any other output is text without channels, such as JSON by a grammar."""


class _Place(Enum):
    BETWEEN = "between messages"
    HEADER = "header"
    BODY = "body"
    PLAIN = "plain"


class _Kind(Enum):
    CONTENT = "content"
    REASONING = "reasoning"
    CALL = "call"


class HarmonyParser:
    """Channels to reasoning, calls and content. Without `reads_calls`, calls are content."""

    def __init__(self, *, reads_calls: bool, keeps_reasoning: bool = True) -> None:
        self._reads_calls, self._keeps_reasoning = reads_calls, keeps_reasoning
        self._place, self._kind = _Place.BETWEEN, _Kind.CONTENT
        self._held, self._header, self._body, self._recipient = "", "", "", ""
        self._is_later = False

    def feed(self, text: str) -> list[OutputPart]:
        self._held += text
        parts: list[OutputPart] = []
        while self._step(parts):
            pass
        return parts

    def finish(self) -> list[OutputPart]:
        """The end of the response ends its last message; a header without one is content."""
        held, self._held = self._held, ""
        if self._place is _Place.BODY:
            return [*self._text(held), *self._end_message(is_cut=True)]
        written = self._header + held
        return [Content(written)] if written.strip() else []

    def _step(self, parts: list[OutputPart]) -> bool:
        """Read as far as one mark; False where more text is needed."""
        if self._place is _Place.PLAIN:
            parts += [Content(self._held)] if self._held else []
            self._held = ""
            return False
        if self._place is _Place.BETWEEN:
            return self._begin_message()
        marks = (MESSAGE,) if self._place is _Place.HEADER else (*ENDS, START)
        found = [(at, mark) for mark in marks if (at := self._held.find(mark)) >= 0]
        if not found:
            cut = len(self._held) - partial_marker_length(self._held, marks)
            parts += self._read(self._held[:cut])
            self._held = self._held[cut:]
            return False
        at, mark = min(found)
        parts += self._read(self._held[:at])
        self._held = self._held[at + len(mark) :]
        if self._place is _Place.HEADER:
            self._begin_body()
            return True
        parts += self._end_message()
        if mark == START:
            self._held = START + self._held
        return True

    def _begin_message(self) -> bool:
        if self._is_later:
            self._held = self._held.lstrip()  # belongs to the format
        if any(self._held.startswith(opening) for opening in _OPENINGS):
            self._place = _Place.HEADER
            return True
        if not any(opening.startswith(self._held) for opening in _OPENINGS):
            self._place = _Place.PLAIN
            return True
        return False

    def _begin_body(self) -> None:
        name, recipient = _NAME.search(self._header), _RECIPIENT.search(self._header)
        self._recipient = "" if recipient is None else recipient[1]
        self._place, self._kind = _Place.BODY, _Kind.CONTENT
        if name is not None and name[1] == "analysis":
            self._kind = _Kind.REASONING
        elif self._recipient and self._reads_calls:
            self._kind = _Kind.CALL

    def _read(self, text: str) -> list[OutputPart]:
        if self._place is _Place.HEADER:
            self._header += text
            return []
        return self._text(text)

    def _text(self, text: str) -> list[OutputPart]:
        if not text:
            return []
        if self._kind is _Kind.CALL:
            self._body += text
            return []
        if self._kind is _Kind.REASONING:
            return [Reasoning(text)] if self._keeps_reasoning else []
        return [Content(text)]

    def _end_message(self, *, is_cut: bool = False) -> list[OutputPart]:
        written = self._header + MESSAGE + self._body
        body, self._body, self._header = self._body, "", ""
        self._place, self._is_later = _Place.BETWEEN, True
        if self._kind is not _Kind.CALL:
            return []
        call = to_call(
            {"name": self._recipient, "arguments": body.strip() or ("" if is_cut else "{}")}
        )
        return [Content(written)] if call is None else [call]


class HarmonyFormat:
    """Calls in the commentary channel."""

    marks = MARKS

    def parser(self, tools: ToolSchemas) -> OutputParser:
        return HarmonyParser(reads_calls=True)

    def call_rules(self, tools: Sequence[OfferedTool], mark: Callable[[str], str]) -> str:
        names = " | ".join(f"call{index}" for index in range(len(tools)))
        header = f'SPACE? ({mark(_CONSTRAIN)} "json")? {mark(MESSAGE)}'
        rules = [f"call: {names}"]
        for index, tool in enumerate(tools):
            start = json.dumps(f"commentary to=functions.{tool.name}")
            end = f"{header} body{index} {mark(_CALL)}?"
            rules.append(f"call{index}: {mark(CHANNEL)} {start} {end}")
            rules.append(f"body{index}: %call {json.dumps(object_schema(tool))}")
        return "\n".join([*rules, ""])
