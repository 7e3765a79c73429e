"""An answer that is JSON from its first sign, `{"name": …, "parameters": {…}}`: Llama 3.1 to 3.3.

`<|python_tag|>` may stand before it, and `;` between several. Source: Meta's prompt formats (2024).
Whether the answer is a call is known at its first sign that is not blank; from then on it is held
until it ends.
"""

from __future__ import annotations

import json

from ridgeline.serve.output_parsers.base import Content, Part, Reader, Schemas, call_of

TAG = "<|python_tag|>"


class _LlamaReader:
    def __init__(self) -> None:
        self._text, self._is_text = "", False

    def feed(self, text: str) -> list[Part]:
        if self._is_text:
            return [Content(text)] if text else []
        self._text += text
        head = self._text.lstrip()
        if not head or head[0] == "{" or head.startswith(TAG) or TAG.startswith(head):
            return []
        self._is_text = True
        return [Content(self._text)]

    def end(self) -> list[Part]:
        if self._is_text or not self._text:
            return []
        return _calls(self._text.strip().removeprefix(TAG)) or [Content(self._text)]


def _calls(text: str) -> list[Part]:
    """Objects one after the other; none where anything else is between them."""
    decoder, at, parts = json.JSONDecoder(), 0, list[Part]()
    while at < len(text):
        if text[at] in "; \n\t\r":
            at += 1
            continue
        try:
            found, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return []
        call = call_of(found)
        if call is None:
            return []
        parts.append(call)
    return parts


class LlamaJson:
    """See `ridgeline.serve.output_parsers.base.CallFormat`."""

    def reader(self, tools: Schemas) -> Reader:
        return _LlamaReader()
