"""`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>`:
Qwen3-Coder.

Values are text; the schema of the tool says which of them are JSON.
Source: the chat template of Qwen3-Coder (2025).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from ridgeline.serve.output_parsers.base import (
    OutputParser,
    OutputPart,
    ParsedToolCall,
    ToolSchemas,
)
from ridgeline.serve.output_parsers.hermes import CLOSE, OPEN, TaggedCallParser
from ridgeline.serve.output_parsers.tool_schemas import OfferedTool
from ridgeline.serve.output_parsers.typed_values import read_argument

_FUNCTION = re.compile(r"\s*<function=([^>\s]{1,128})>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\s]{1,128})>\n?(.*?)\n?</parameter>", re.DOTALL)
_END = re.compile(r"\s*</function>\s*")


class QwenXmlParser(TaggedCallParser):
    """Reads parameters as text, and as JSON where the tool's schema wants something else."""

    def __init__(self, tools: ToolSchemas) -> None:
        super().__init__(guard=FunctionGuard())
        self._tools = tools

    def parse_body(self, body: str) -> list[OutputPart]:
        """One call: complete parameters between the function's two tags, and nothing else. A call
        that max_tokens cut off lacks the second tag, however many parameters are there."""
        match = _FUNCTION.match(body)
        if match is None:
            return []
        name, position = match[1], match.end()
        parameters = self._tools.get(name, {})
        arguments = {}
        while match := _PARAMETER.match(body, position):
            key, text = match.groups()
            if OPEN in text and "<function=" in text:
                return []  # the value of a call without an end ran on into the next call
            arguments[key] = read_argument(text, key, parameters)
            position = match.end()
        if not _END.fullmatch(body, position):
            return []
        return [ParsedToolCall(name, json.dumps(arguments, ensure_ascii=False))]


class FunctionGuard:
    """Open between `<function=` and `</function>`: a closing marker there belongs to a value."""

    _LONGEST = 256  # characters of the text's two ends that are kept

    def __init__(self) -> None:
        self._head = self._tail = ""

    def feed(self, text: str) -> None:
        self._head += text[: self._LONGEST - len(self._head)]
        self._tail = (self._tail + text)[-self._LONGEST :]

    def is_open(self) -> bool:
        is_function = _FUNCTION.match(self._head) is not None
        return is_function and not self._tail.rstrip().endswith("</function>")

    def reset(self) -> None:
        self._head = self._tail = ""


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


class QwenXmlFormat:
    """Calls as tags with one tag per parameter."""

    marks = (OPEN, CLOSE)

    def parser(self, tools: ToolSchemas) -> OutputParser:
        return QwenXmlParser(tools)

    def call_rules(self, tools: Sequence[OfferedTool], mark: Callable[[str], str]) -> str:
        """Names are checked; values are text, as this format writes them."""
        functions = " | ".join(f"function{index}" for index in range(len(tools)))
        rules = [f"call: {mark(OPEN)} SPACE? ({functions}) SPACE? {mark(CLOSE)}"]
        for index, tool in enumerate(tools):
            names = [*(tool.parameters or {}).get("properties", {})]
            opened = " | ".join(_quoted(f"<parameter={name}>") for name in names)
            parameters = f"(({opened}) value SPACE?)*" if names else ""
            rules.append(
                f"function{index}: {_quoted(f'<function={tool.name}>')} SPACE? "
                f'{parameters} "</function>"'
            )
        return "\n".join([*rules, r"value[lazy]: /(?s:.*)<\/parameter>/", ""])
