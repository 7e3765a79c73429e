"""Output that is JSON from its first character, `{"name": …, "parameters": {…}}`: Llama 3.1 to 3.3.

`<|python_tag|>` may precede it, and `;` may separate several. Whether the output is a call is known
at its first character that is not whitespace; from there on it is held back until the end.
Source: Meta's prompt formats (2024).
"""

from __future__ import annotations

import json

from ridgeline.serve.output_parsers.base import (
    Content,
    OutputParser,
    OutputPart,
    ToolSchemas,
    to_call,
)

PYTHON_TAG = "<|python_tag|>"


class LlamaJsonParser:
    """Holds back output that begins like a call."""

    def __init__(self) -> None:
        self._text, self._is_content = "", False

    def feed(self, text: str) -> list[OutputPart]:
        if self._is_content:
            return [Content(text)] if text else []
        self._text += text
        head = self._text.lstrip()
        may_be_tag = head.startswith(PYTHON_TAG) or PYTHON_TAG.startswith(head)
        if not head or head[0] == "{" or may_be_tag:
            return []
        self._is_content = True
        return [Content(self._text)]

    def finish(self) -> list[OutputPart]:
        if self._is_content or not self._text:
            return []
        return _parse(self._text.strip().removeprefix(PYTHON_TAG)) or [Content(self._text)]


def _parse(text: str) -> list[OutputPart]:
    """Consecutive call objects; empty if there is anything else between them."""
    decoder, position, calls = json.JSONDecoder(), 0, list[OutputPart]()
    while position < len(text):
        if text[position] in "; \n\t\r":
            position += 1
            continue
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            return []
        call = to_call(value)
        if call is None:
            return []
        calls.append(call)
    return calls


class LlamaJsonFormat:
    """Calls as bare JSON objects."""

    def parser(self, tools: ToolSchemas) -> OutputParser:
        return LlamaJsonParser()
