"""Output that is JSON from its first character, `{"name": …, "parameters": {…}}`: Llama 3.1 to 3.3.

`<|python_tag|>` may precede it, and `;` may separate several. Whether the output is a call is known
at its first character that is not whitespace; from there on it is held back until the end.
Source: Meta's prompt formats (2024).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from ridgeline.serve.output_parsers.base import (
    Content,
    OutputParser,
    OutputPart,
    ParsedToolCall,
    ToolSchemas,
    to_call,
)
from ridgeline.serve.output_parsers.tool_schemas import OfferedTool, call_schema

PYTHON_TAG = "<|python_tag|>"


class LlamaJsonParser:
    """Holds back output that begins like a call."""

    def __init__(self, tools: ToolSchemas) -> None:
        self._tools, self._text, self._is_content = tools, "", False

    def feed(self, text: str) -> list[OutputPart]:
        if self._is_content:
            return [Content(text)] if text else []
        self._text += text
        head = self._text.lstrip()
        may_be_tag = head.startswith(PYTHON_TAG) or PYTHON_TAG.startswith(head)
        if not head or may_be_tag or head[0] == "{" or _may_be_list(head):
            return []
        self._is_content = True
        return [Content(self._text)]

    def finish(self) -> list[OutputPart]:
        if self._is_content or not self._text:
            return []
        calls = _parse(self._text.strip().removeprefix(PYTHON_TAG), self._tools)
        return calls or [Content(self._text)]


def _may_be_list(head: str) -> bool:
    """Whether the text may be a list of objects; a link in Markdown begins with a bracket, too."""
    return head[0] == "[" and head[1:].lstrip()[:1] in ("", "{")


def _parse(text: str, tools: ToolSchemas) -> list[OutputPart]:
    """Consecutive calls, or lists of them; empty if there is anything else between them."""
    decoder, position, calls = json.JSONDecoder(), 0, list[OutputPart]()
    while position < len(text):
        if text[position] in "; \n\t\r":
            position += 1
            continue
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            return []
        found = [_to_call(item, tools) for item in (value if isinstance(value, list) else [value])]
        if not found or None in found:
            return []
        calls += [call for call in found if call is not None]
    return calls


def _to_call(value: object, tools: ToolSchemas) -> ParsedToolCall | None:
    """An object without arguments calls known tools only: `{"name": "Ada"}` is an answer."""
    call = to_call(value)
    if call is None or not isinstance(value, dict):
        return None
    has_arguments = "parameters" in value or "arguments" in value
    return call if has_arguments or call.name in tools else None


class LlamaJsonFormat:
    """Calls as bare JSON objects."""

    marks = (PYTHON_TAG,)

    def parser(self, tools: ToolSchemas) -> OutputParser:
        return LlamaJsonParser(tools)

    def call_rules(self, tools: Sequence[OfferedTool], mark: Callable[[str], str]) -> str:
        body = "%call " + json.dumps(call_schema(tools, "parameters"))
        return f'call: {mark(PYTHON_TAG)}? call_body ";"?\ncall_body: {body}\n'
