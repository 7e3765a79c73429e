"""Which reader an answer of this request needs, and which grammar its tools call for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from ridgeline.records import Structured
from ridgeline.serve.config import Caps, ServerOptions
from ridgeline.serve.errors import ApiError
from ridgeline.serve.openai.schemas import ChatRequest, NamedFunction, Tool
from ridgeline.serve.openai.structured_output import call_of, check_size, schema_of
from ridgeline.serve.output_parsers import call_format
from ridgeline.serve.output_parsers.base import Listed, Named, Plain, Reader, Schemas
from ridgeline.serve.output_parsers.reasoning import ReasoningFirst

_ANY_OBJECT: dict[str, Any] = {"type": "object"}


class Dialect(msgspec.Struct, frozen=True):
    """How to read an answer: `reader` makes one per choice.

    `structured` is the grammar that the tools call for. `most_calls`: calls beyond are dropped.
    `calls_finish`: whether a call is told as the reason why the answer ended.
    """

    reader: Callable[[], Reader]
    structured: Structured | None = None
    most_calls: int | None = None
    calls_finish: bool = True


def dialect_of(request: ChatRequest, options: ServerOptions, caps: Caps) -> Dialect:
    """ApiError 400 where the request asks for tools in a way that cannot be served."""
    tools, choice = request.tools or [], request.tool_choice or "auto"
    if not tools:
        if choice not in ("auto", "none"):
            raise ApiError(400, "tool_choice needs tools", param="tool_choice")
        return Dialect(_with_reasoning(Plain, request, options))
    _check_tools(tools, caps)
    if choice == "none":
        return Dialect(_with_reasoning(Plain, request, options))
    if isinstance(choice, NamedFunction):
        return _named(tools, choice.function.name)
    most = 1 if request.parallel_tool_calls is False else None
    if choice == "required":
        return Dialect(Listed, _list_of_calls(tools, most), most)
    return _automatic(tools, request, options, most)


def _automatic(
    tools: list[Tool], request: ChatRequest, options: ServerOptions, most: int | None
) -> Dialect:
    if not options.enable_auto_tool_choice or options.tool_call_parser is None:
        raise ApiError(
            400,
            'tool_choice "auto" needs a server that knows how its model writes calls '
            "(--enable-auto-tool-choice --tool-call-parser NAME); "
            'fix: name a tool, or say "required" or "none"',
            param="tool_choice",
        )
    format_, schemas = call_format(options.tool_call_parser), _schemas(tools)
    return Dialect(
        _with_reasoning(lambda: format_.reader(schemas), request, options), most_calls=most
    )


def _named(tools: list[Tool], name: str) -> Dialect:
    for tool in tools:
        if tool.function.name == name:
            schema = call_of(tool.function.parameters or _ANY_OBJECT)
            return Dialect(lambda: Named(name), schema, calls_finish=False)
    raise ApiError(400, f"tool_choice names a tool that is not there: {name}", param="tool_choice")


def _list_of_calls(tools: list[Tool], most: int | None) -> Structured:
    """At least one call, each of one of the tools."""
    each = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                "parameters": tool.function.parameters or _ANY_OBJECT,
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": each}}
    return call_of(schema if most is None else {**schema, "maxItems": most})


def _with_reasoning(
    then: Callable[[], Reader], request: ChatRequest, options: ServerOptions
) -> Callable[[], Reader]:
    if options.reasoning_parser is None:
        return then
    inside, keep = options.reasoning_parser == "think_open", request.include_reasoning is not False
    return lambda: ReasoningFirst(then(), inside=inside, keep=keep)


def _check_tools(tools: list[Tool], caps: Caps) -> None:
    if len(tools) > caps.max_tools:
        raise ApiError(
            400, f"tools: too many: {len(tools)}; limit: {caps.max_tools}", param="tools"
        )
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise ApiError(400, "tools: two have the same name", param="tools")
    for tool in tools:
        check_size("tools", schema_of(tool.function.parameters), caps.max_grammar_bytes)


def _schemas(tools: list[Tool]) -> Schemas:
    return {tool.function.name: tool.function.parameters or {} for tool in tools}
