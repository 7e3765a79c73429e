"""Choose the parser that a response needs, and the grammar that its tools require."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from ridgeline.config.server import ServerOptions
from ridgeline.records import OutputGrammar
from ridgeline.serve.config import LIMITS
from ridgeline.serve.errors import ApiError
from ridgeline.serve.output_parsers import tool_call_format
from ridgeline.serve.output_parsers.base import (
    CallListParser,
    NamedCallParser,
    OutputParser,
    PlainTextParser,
    ToolSchemas,
)
from ridgeline.serve.output_parsers.reasoning import ReasoningParser

_ANY_OBJECT: dict[str, Any] = {"type": "object"}
ParserFactory = Callable[[], OutputParser]


class OfferedTool(msgspec.Struct, frozen=True):
    """A tool that the model may call; `parameters` is a JSON schema, None for any object."""

    name: str
    parameters: dict[str, Any] | None = None


class ForcedTool(msgspec.Struct, frozen=True):
    """The tool that the model must call."""

    name: str


ToolChoice = Literal["none", "auto", "required"] | ForcedTool


class OutputFormat(msgspec.Struct, frozen=True):
    """How to parse a response: `new_parser` makes one parser per choice.

    `grammar`: what the tools require of the output. `max_calls`: further calls are dropped.
    `calls_end_response`: whether a call is reported as the reason why the response ended.
    """

    new_parser: ParserFactory
    grammar: OutputGrammar | None = None
    max_calls: int | None = None
    calls_end_response: bool = True


def select_output_format(
    tools: Sequence[OfferedTool],
    choice: ToolChoice,
    options: ServerOptions,
    *,
    parallel_calls: bool = True,
    include_reasoning: bool = True,
) -> OutputFormat:
    """The format of a response; ApiError 400 if the tools cannot be served as requested."""
    if not tools and choice not in ("auto", "none"):
        raise ApiError(400, "tool_choice needs tools", param="tool_choice")
    _check_tools(tools)
    if not tools or choice == "none":
        plain = _after_reasoning(PlainTextParser, options, include_reasoning)
        return OutputFormat(plain)
    if isinstance(choice, ForcedTool):
        return _forced(tools, choice.name)
    max_calls = None if parallel_calls else 1
    if choice == "required":
        return OutputFormat(CallListParser, _call_list_grammar(tools, max_calls), max_calls)
    parser = _after_reasoning(_automatic(tools, options), options, include_reasoning)
    return OutputFormat(parser, max_calls=max_calls)


def json_grammar(schema: object) -> OutputGrammar:
    """The grammar of a JSON schema given as a value."""
    return OutputGrammar("json", json.dumps(schema, separators=(",", ":")))


def call_grammar(schema: object) -> OutputGrammar:
    """As `json_grammar`, for the arguments of a tool call."""
    return OutputGrammar("call", json_grammar(schema).text)


def check_grammar_size(name: str, grammar: OutputGrammar) -> None:
    """ApiError 400 for a grammar that is too large."""
    size, max_bytes = len(grammar.text.encode("utf-8", "replace")), LIMITS.max_grammar_bytes
    if size > max_bytes:
        raise ApiError(400, f"{name} is too large: {size} bytes; limit: {max_bytes}", param=name)


def _automatic(tools: Sequence[OfferedTool], options: ServerOptions) -> ParserFactory:
    """The model decides, and writes calls in the server's format."""
    if not options.enable_auto_tool_choice or options.tool_call_parser is None:
        raise ApiError(
            400,
            'tool_choice "auto" needs a server that knows how its model writes calls '
            "(--enable-auto-tool-choice --tool-call-parser NAME); "
            'fix: name a tool, or send "required" or "none"',
            param="tool_choice",
        )
    call_format = tool_call_format(options.tool_call_parser)
    schemas: ToolSchemas = {tool.name: tool.parameters or {} for tool in tools}
    return lambda: call_format.parser(schemas)


def _forced(tools: Sequence[OfferedTool], name: str) -> OutputFormat:
    for tool in tools:
        if tool.name == name:
            grammar = call_grammar(tool.parameters or _ANY_OBJECT)
            return OutputFormat(lambda: NamedCallParser(name), grammar, calls_end_response=False)
    raise ApiError(400, f"tool_choice names an unknown tool: {name}", param="tool_choice")


def _call_list_grammar(tools: Sequence[OfferedTool], max_calls: int | None) -> OutputGrammar:
    """At least one call, each of one of the tools."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.name},
                "parameters": tool.parameters or _ANY_OBJECT,
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    return call_grammar(schema if max_calls is None else {**schema, "maxItems": max_calls})


def _after_reasoning(
    answer_parser: ParserFactory, options: ServerOptions, include_reasoning: bool
) -> ParserFactory:
    if options.reasoning_parser is None:
        return answer_parser
    inside = options.reasoning_parser == "think_open"
    return lambda: ReasoningParser(answer_parser(), inside=inside, keep=include_reasoning)


def _check_tools(tools: Sequence[OfferedTool]) -> None:
    max_tools = LIMITS.max_tools
    if len(tools) > max_tools:
        raise ApiError(400, f"tools: too many: {len(tools)}; limit: {max_tools}", param="tools")
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise ApiError(400, "tools: two have the same name", param="tools")
    for tool in tools:
        check_grammar_size("tools", json_grammar(tool.parameters))
