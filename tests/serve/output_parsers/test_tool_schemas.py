"""Schemas of tools inside the schema of a call, and grammars of calls or an answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from ridgeline.config.server import ServerOptions
from ridgeline.engine.engine import Engine
from ridgeline.records import OutputGrammar
from ridgeline.serve.errors import ApiError
from ridgeline.serve.output_parsers import TOOL_CALL_FORMATS, tool_call_format
from ridgeline.serve.output_parsers.base import Content, ParsedToolCall
from ridgeline.serve.output_parsers.call_list import CallListParser
from ridgeline.serve.output_parsers.composed import answer_or_calls
from ridgeline.serve.output_parsers.select import ForcedTool, json_grammar, select_output_format
from ridgeline.serve.output_parsers.tool_schemas import OfferedTool, call_schema, object_schema
from tests.serve.output_parsers.test_dialects import WRITERS, parse

POINT = {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}
NESTED: dict[str, Any] = {
    "$defs": {"P": POINT},
    "type": "object",
    "properties": {"p": {"$ref": "#/$defs/P"}, "default": {"$ref": "#/$defs/P"}},
    "required": ["p"],
}
OTHER = {
    "definitions": {"P": {"type": "string", "maxLength": 3}},
    "properties": {"p": {"$ref": "#/definitions/P"}, "again": {"$ref": "#"}},
    "required": ["p"],
}
NAMED = {
    "$id": "https://example.org/tree",
    "type": "object",
    "properties": {"next": {"$ref": "https://example.org/tree#/$defs/N"}},
    "$defs": {"N": {"type": "null"}},
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.open("demo", max_num_seqs=2, kv_cache_memory_bytes=16 << 20) as opened:
        yield opened


def accepts(engine: Engine, grammar: OutputGrammar, text: str) -> bool:
    """Whether the whole text is an output that the grammar allows."""
    engine._masks.prepare(grammar)
    matcher = engine._masks._compiled[grammar].matcher.deep_copy()  # type: ignore[attr-defined]
    tokens = engine.tokenizer.encode(text)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def test_required_calls_keep_the_definitions_of_each_tool(engine: Engine) -> None:
    tools = [OfferedTool("f", NESTED), OfferedTool("g", OTHER), OfferedTool("h", NAMED)]
    output_format = select_output_format(tools, "required", ServerOptions())
    grammar = output_format.grammar
    assert grammar is not None

    def call(name: str, arguments: object) -> str:
        return json.dumps([{"name": name, "parameters": arguments}])

    assert accepts(engine, grammar, call("f", {"p": {"x": True}, "default": {"x": False}}))
    assert accepts(engine, grammar, call("g", {"p": "abc", "again": {"p": "x"}}))
    assert accepts(engine, grammar, call("h", {"next": None}))
    assert not accepts(engine, grammar, call("f", {"p": "abc"}))
    assert not accepts(engine, grammar, call("g", {"p": {"x": True}}))
    assert not accepts(engine, grammar, call("f", {"p": {"x": True}, "default": 1}))


def test_values_that_look_like_references_are_left_alone() -> None:
    value = {"$ref": "#/x"}
    schema = {"properties": {"$ref": {"const": value}, "e": {"enum": [value]}}}
    hoisted = call_schema([OfferedTool("f", schema)], "parameters")["$defs"]["tool0"]
    assert hoisted["properties"] == schema["properties"]


@pytest.mark.parametrize(
    "parameters",
    [
        None,
        {},
        {"properties": {"a": {"type": "integer"}}},
        {"additionalProperties": True},
        {"anyOf": [{"properties": {"a": {}}}, {"required": ["b"]}]},
        {"type": ["object", "null"]},
        {"$defs": {"A": {"type": "object"}}, "$ref": "#/$defs/A"},
        {"title": "Empty"},
    ],
)
def test_arguments_are_an_object_whatever_the_schema_says(
    engine: Engine, parameters: dict[str, Any] | None
) -> None:
    tool = OfferedTool("f", parameters)
    assert object_schema(tool)["type"] == "object"
    for choice in (ForcedTool("f"), "required"):
        grammar = select_output_format([tool], choice, ServerOptions()).grammar  # type: ignore[arg-type]
        assert grammar is not None
        for wrong in ("-1", '"a"', "[]", "null"):
            text = wrong if choice != "required" else f'[{{"name":"f","parameters":{wrong}}}]'
            assert not accepts(engine, grammar, text)


def test_parameters_that_are_no_object_are_refused() -> None:
    with pytest.raises(ApiError, match="parameters of f must be of type object"):
        object_schema(OfferedTool("f", {"type": "string"}))


@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
@pytest.mark.parametrize(
    ("answer", "good"),
    [
        (json_grammar({"type": "object", "properties": {"zz": {"type": "integer"}},
                       "required": ["zz"], "additionalProperties": False}), '{"zz": 3}'),
        (OutputGrammar("regex", r"[a-z]+/[0-9]{2}"), "ab/12"),
        (OutputGrammar("regex", r"[a-z]+\/[0-9]{2}"), "ab/12"),
        (OutputGrammar("choice", '["yes", "n\\"o"]'), 'n"o'),
    ],
)  # fmt: skip
def test_grammar_of_tools_and_answer_allows_either(
    engine: Engine, name: str, answer: OutputGrammar, good: str
) -> None:
    tools = [OfferedTool("f", NESTED), OfferedTool("look", None)]
    call_format = tool_call_format(name)
    grammar = answer_or_calls(answer, call_format, tools, engine.tokenizer)
    arguments: dict[str, Any] = {"p": {"x": True}}
    written = WRITERS[name]("f", arguments)
    assert accepts(engine, grammar, good)
    assert accepts(engine, grammar, written)
    assert accepts(engine, grammar, written + "\n" + WRITERS[name]("look", {}))
    assert not accepts(engine, grammar, "Sure. " + written)
    assert not accepts(engine, grammar, WRITERS[name]("unknown", arguments))
    single = answer_or_calls(answer, call_format, tools, engine.tokenizer, max_calls=1)
    assert not accepts(engine, single, written + "\n" + written)


def test_grammar_as_answer_next_to_tools_is_refused(engine: Engine) -> None:
    lark = OutputGrammar("grammar", 'start: "a"')
    with pytest.raises(ApiError, match="cannot be combined with tools"):
        answer_or_calls(lark, tool_call_format("hermes"), [OfferedTool("f")], engine.tokenizer)


def test_list_of_calls_is_read_call_by_call() -> None:
    parser = CallListParser()
    text = '[{"name": "f", "parameters": {"a": "]}\\"["}}, {"name": "g", "parameters": {}}]'
    seen = [(at, part) for at in range(len(text)) for part in parser.feed(text[at])]
    assert [part for _, part in seen] == [
        ParsedToolCall("f", '{"a": "]}\\"["}'),
        ParsedToolCall("g", "{}"),
    ]
    assert seen[0][0] < text.index("g") and parser.finish() == []


def test_calls_that_were_complete_when_the_list_was_cut_are_calls() -> None:
    text = '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {"b": "x'
    assert parse(CallListParser(), text) == [
        ParsedToolCall("f", '{"a": 1}'),
        ParsedToolCall("g", '{"b": "x'),
    ]
    assert parse(CallListParser(), '[{"name": "f", "parameters": {}}, {"na') == [
        ParsedToolCall("f", "{}")
    ]
    assert parse(CallListParser(), '[{"na') == [Content('[{"na')]
