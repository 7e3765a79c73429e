"""`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>`:
Qwen3-Coder.

Values are text; the schema of the tool says which of them are JSON.
Source: the chat template of Qwen3-Coder (2025).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ridgeline.serve.output_parsers.base import (
    OutputParser,
    OutputPart,
    ParsedToolCall,
    ToolSchemas,
)
from ridgeline.serve.output_parsers.hermes import TaggedCallParser

_FUNCTION = re.compile(r"\s*<function=([^>\s]{1,128})>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\s]{1,128})>\n?(.*?)\n?</parameter>", re.DOTALL)
_END = re.compile(r"\s*</function>\s*")


class QwenXmlParser(TaggedCallParser):
    """Reads parameters as text, and as JSON where the tool's schema wants something else."""

    def __init__(self, tools: ToolSchemas) -> None:
        super().__init__()
        self._tools = tools

    def parse_body(self, body: str) -> list[OutputPart]:
        """One call: complete parameters between the function's two tags, and nothing else. A call
        that max_tokens cut off lacks the second tag, however many parameters are there."""
        match = _FUNCTION.match(body)
        if match is None:
            return []
        name, position = match[1], match.end()
        schemas = self._tools.get(name, {}).get("properties", {})
        arguments = {}
        while match := _PARAMETER.match(body, position):
            key, text = match.groups()
            schema = schemas.get(key) if isinstance(schemas, Mapping) else None
            arguments[key] = _value(text, schema)
            position = match.end()
        if not _END.fullmatch(body, position):
            return []
        return [ParsedToolCall(name, json.dumps(arguments, ensure_ascii=False))]


def _value(text: str, schema: object) -> Any:
    """The text, unless its schema is of another type and the text is JSON."""
    if not isinstance(schema, Mapping) or schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


class QwenXmlFormat:
    """Calls as tags with one tag per parameter."""

    def parser(self, tools: ToolSchemas) -> OutputParser:
        return QwenXmlParser(tools)
