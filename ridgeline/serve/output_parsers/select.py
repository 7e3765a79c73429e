"""Choose the parser that a response needs, and the grammar that its tools require."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from ridgeline.config.server import ServerOptions
from ridgeline.records import OutputGrammar, ThinkingMarks
from ridgeline.serve.config import LIMITS
from ridgeline.serve.errors import ApiError
from ridgeline.serve.output_parsers import tool_call_format
from ridgeline.serve.output_parsers.base import (
    NamedCallParser,
    OutputParser,
    PlainTextParser,
    ToolCallFormat,
)
from ridgeline.serve.output_parsers.call_list import CallListParser
from ridgeline.serve.output_parsers.harmony import MARKS as HARMONY_MARKS
from ridgeline.serve.output_parsers.harmony import HarmonyParser
from ridgeline.serve.output_parsers.reasoning import MARKS, ReasoningParser
from ridgeline.serve.output_parsers.tool_schemas import OfferedTool, call_schema, object_schema

ParserFactory = Callable[[], OutputParser]


class ForcedTool(msgspec.Struct, frozen=True):
    """The tool that the model must call."""

    name: str


ToolChoice = Literal["none", "auto", "required"] | ForcedTool


class OutputFormat(msgspec.Struct, frozen=True):
    """How to parse a response. `new_answer_parser` makes a parser of what follows the reasoning.

    `grammar`: what the tools require of the output. `call_format`: how the model writes calls
    where it decides on them. `max_calls`: further calls are dropped. `calls_end_response`:
    whether a call is reported as the reason why the response ended. `marks`: texts that the parser
    looks for, and that may be special tokens of the model. `thinking_marks`: the texts around its
    thinking, if the server knows them.
    """

    new_answer_parser: ParserFactory
    grammar: OutputGrammar | None = None
    call_format: ToolCallFormat | None = None
    max_calls: int | None = None
    calls_end_response: bool = True
    marks: tuple[str, ...] = ()
    reads_reasoning: bool = False
    keeps_reasoning: bool = True
    begins_in_reasoning: bool = False
    thinking_marks: ThinkingMarks | None = None

    def new_parser(self) -> OutputParser:
        """A parser for one choice."""
        parser = self.new_answer_parser()
        if not self.reads_reasoning:
            return parser
        return ReasoningParser(parser, inside=self.begins_in_reasoning, keep=self.keeps_reasoning)


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
    if isinstance(choice, ForcedTool):
        return _forced(tools, choice.name)
    max_calls = None if parallel_calls else 1
    if choice == "required":
        return OutputFormat(
            CallListParser, grammar=_call_list_grammar(tools, max_calls), max_calls=max_calls
        )
    if options.tool_call_parser == "openai" or options.reasoning_parser == "openai_gptoss":
        return _harmony(bool(tools) and choice != "none", options, max_calls, include_reasoning)
    reasoning = options.reasoning_parser is not None
    marks = MARKS if reasoning else ()
    if not tools or choice == "none":
        return OutputFormat(
            PlainTextParser,
            marks=marks,
            reads_reasoning=reasoning,
            keeps_reasoning=include_reasoning,
        )
    call_format = _call_format(options)
    schemas = {tool.name: tool.parameters or {} for tool in tools}
    return OutputFormat(
        lambda: call_format.parser(schemas),
        call_format=call_format,
        max_calls=max_calls,
        marks=(*marks, *call_format.marks),
        reads_reasoning=reasoning,
        keeps_reasoning=include_reasoning,
    )


def _harmony(
    has_tools: bool, options: ServerOptions, max_calls: int | None, include_reasoning: bool
) -> OutputFormat:
    """Harmony's channels hold reasoning, calls and answer; one parser reads all three."""
    call_format = _call_format(options) if has_tools else None
    keeps = include_reasoning and options.reasoning_parser is not None
    return OutputFormat(
        lambda: HarmonyParser(reads_calls=has_tools, keeps_reasoning=keeps),
        call_format=call_format,
        max_calls=max_calls,
        marks=HARMONY_MARKS,
    )


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


def _call_format(options: ServerOptions) -> ToolCallFormat:
    """How the model writes calls when it decides by itself."""
    if not options.enable_auto_tool_choice or options.tool_call_parser is None:
        raise ApiError(
            400,
            'tool_choice "auto" needs a server that knows how its model writes calls '
            "(--enable-auto-tool-choice --tool-call-parser NAME); "
            'fix: name a tool, or send "required" or "none"',
            param="tool_choice",
        )
    return tool_call_format(options.tool_call_parser)


def _forced(tools: Sequence[OfferedTool], name: str) -> OutputFormat:
    for tool in tools:
        if tool.name == name:
            grammar = call_grammar(object_schema(tool))
            return OutputFormat(
                lambda: NamedCallParser(name), grammar=grammar, calls_end_response=False
            )
    raise ApiError(400, f"tool_choice names an unknown tool: {name}", param="tool_choice")


def _call_list_grammar(tools: Sequence[OfferedTool], max_calls: int | None) -> OutputGrammar:
    """At least one call, each of one of the tools."""
    items = call_schema(tools, "parameters")
    schema: dict[str, Any] = {"$defs": items.pop("$defs"), "type": "array", "minItems": 1}
    schema["items"] = items
    return call_grammar(schema if max_calls is None else {**schema, "maxItems": max_calls})


def _check_tools(tools: Sequence[OfferedTool]) -> None:
    max_tools = LIMITS.max_tools
    if len(tools) > max_tools:
        raise ApiError(400, f"tools: too many: {len(tools)}; limit: {max_tools}", param="tools")
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise ApiError(400, "tools: two have the same name", param="tools")
    for tool in tools:
        check_grammar_size("tools", json_grammar(tool.parameters))
