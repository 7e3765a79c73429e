"""`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>`.

The format of Qwen3-Coder. Values are text; the tool's schema says which of them are something else.
Source: the chat template of Qwen3-Coder (2025).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ridgeline.serve.output_parsers.base import Call, Part, Reader, Schemas
from ridgeline.serve.output_parsers.hermes import TaggedCalls

_OPEN = re.compile(r"\s*<function=([^>\s]{1,128})>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\s]{1,128})>\n?(.*?)\n?</parameter>", re.DOTALL)
_CLOSE = re.compile(r"\s*</function>\s*")


class _QwenReader(TaggedCalls):
    def __init__(self, tools: Schemas) -> None:
        super().__init__()
        self._tools = tools

    def _calls(self, body: str) -> list[Part]:
        """One call, or none: whole parameters between the function's two marks and nothing else.
        What max_tokens has cut off lacks the second mark, however many parameters are there."""
        found = _OPEN.match(body)
        if found is None:
            return []
        name, at = found[1], found.end()
        kinds = self._tools.get(name, {}).get("properties", {})
        arguments = {}
        while found := _PARAMETER.match(body, at):
            key, text = found.groups()
            arguments[key] = _value(text, kinds.get(key) if isinstance(kinds, Mapping) else None)
            at = found.end()
        if not _CLOSE.fullmatch(body, at):
            return []
        return [Call(name, json.dumps(arguments, ensure_ascii=False))]


def _value(text: str, schema: object) -> Any:
    """Text where the schema says so or says nothing that the text is; else the JSON it is."""
    if not isinstance(schema, Mapping) or schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


class QwenXml:
    """See `ridgeline.serve.output_parsers.base.CallFormat`."""

    def reader(self, tools: Schemas) -> Reader:
        return _QwenReader(tools)
