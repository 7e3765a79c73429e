"""Reasoning and tool calls in every format: the same parts however the text is cut."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.serve.output_parsers import TOOL_CALL_FORMATS, tool_call_format
from ridgeline.serve.output_parsers.base import (
    Content,
    OutputParser,
    OutputPart,
    ParsedToolCall,
    PlainTextParser,
    Reasoning,
)
from ridgeline.serve.output_parsers.reasoning import ReasoningParser

TOOLS: dict[str, Any] = {
    "look": {"properties": {"place": {"type": "string"}, "days": {"type": "integer"}}},
    "noop": {},
}
PARIS = {"place": 'Paris, "là"', "days": 3}


def hermes(name: str, arguments: dict[str, Any]) -> str:
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def qwen(name: str, arguments: dict[str, Any]) -> str:
    inside = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


def llama(name: str, arguments: dict[str, Any]) -> str:
    return json.dumps({"name": name, "parameters": arguments})


def harmony(name: str, arguments: dict[str, Any]) -> str:
    start = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return f"{start}{json.dumps(arguments)}<|call|>"


WRITERS = {"hermes": hermes, "qwen3_xml": qwen, "llama3_json": llama, "openai": harmony}


def merged(parts: list[OutputPart]) -> list[OutputPart]:
    """Consecutive texts of one kind, joined."""
    out: list[OutputPart] = []
    for part in parts:
        if out and not isinstance(part, ParsedToolCall) and type(out[-1]) is type(part):
            out[-1] = type(part)(out[-1].text + part.text)  # type: ignore[union-attr]
        else:
            out.append(part)
    return out


def parse(parser: OutputParser, text: str, rng: random.Random | None = None) -> list[OutputPart]:
    parts: list[OutputPart] = []
    while text:
        size = len(text) if rng is None else rng.randint(1, 5)
        parts += parser.feed(text[:size])
        text = text[size:]
    return merged(parts + parser.finish())


def call(name: str, arguments: dict[str, Any]) -> ParsedToolCall:
    return ParsedToolCall(name, json.dumps(arguments, ensure_ascii=False))


@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
@pytest.mark.parametrize("seed", range(5))
def test_calls_are_found_however_the_text_is_cut(name: str, seed: int) -> None:
    rng, write = random.Random(seed), WRITERS[name]
    two = "; " if name == "llama3_json" else "\n"
    text = write("look", PARIS) + two + write("noop", {})
    parts = parse(tool_call_format(name).parser(TOOLS), text, rng)
    assert parts == [call("look", PARIS), call("noop", {})]


@pytest.mark.parametrize("name", ["hermes", "qwen3_xml"])
def test_text_around_calls_is_content(name: str) -> None:
    write = WRITERS[name]
    text = f"Let me look.\n{write('look', PARIS)}\nDone."
    parts = parse(tool_call_format(name).parser(TOOLS), text, random.Random(1))
    assert parts == [Content("Let me look."), call("look", PARIS), Content("\n\nDone.")]


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
@pytest.mark.parametrize("name", ["hermes", "qwen3_xml"])
@pytest.mark.parametrize(
    ("before", "after", "content"),
    [
        ("", "\nIt is sunny, and warm.\n", "It is sunny, and warm.\n"),
        ("Sure.  ", "", "Sure."),
        ("Sure. ", " It is  sunny .", "Sure.  It is  sunny ."),
        ("Sure.", "It is.", "Sure.It is."),
        (" \n", "\n ", ""),
        ("See: ", " or <tool_call>{} </tool_call> .", "See:  or <tool_call>{} </tool_call> ."),
        ("See: ", "\n<tool_call>{ \n", "See: \n<tool_call>{ \n"),
    ],
)
def test_whitespace_of_text_around_a_call_is_kept(
    name: str, before: str, after: str, content: str, seed: int | None
) -> None:
    """All but whitespace without text on both sides, which belongs to the format."""
    text = before + WRITERS[name]("look", PARIS) + after
    rng = None if seed is None else random.Random(seed)
    parts = parse(tool_call_format(name).parser(TOOLS), text, rng)
    assert "".join(part.text for part in parts if isinstance(part, Content)) == content
    assert [part for part in parts if isinstance(part, ParsedToolCall)] == [call("look", PARIS)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>not json</tool_call>"),
        ("hermes", '<tool_call>{"name": 3}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", "<tool_call>{"),
        ("hermes", "a < b and <tool_cal"),
        ("hermes", "see: <tool_call>nothing</tool_call> \n"),
        ("hermes", "see:\n<tool_call>{ "),
        ("hermes", " said and done. \n"),
        ("qwen3_xml", "<tool_call>nothing</tool_call>"),
        ("qwen3_xml", "<tool_call><function=look>"),
        ("qwen3_xml", "<tool_call>\n<function=look>\n<parameter=place>\nParis\n</parameter>\n"),
        ("qwen3_xml", "<tool_call>\n<function=look>\n<parameter=place>\nPar"),
        ("qwen3_xml", "<tool_call><function=look><parameter=place>P</parameter></tool_call>"),
        ("qwen3_xml", "<tool_call><function=look><parameter=place>Paris</function></tool_call>"),
        ("llama3_json", '{"name": "f"'),
        ("llama3_json", '{"other": 1}'),
        ("llama3_json", "plain text { with braces }"),
        ("hermes", "<tool_call>" + "[" * 5000 + "</tool_call>"),
        ("llama3_json", "{" + '"a":{' * 3000),
    ],
)
def test_malformed_calls_are_content(name: str, text: str) -> None:
    for seed in (None, 1, 2):
        rng = None if seed is None else random.Random(seed)
        assert parse(tool_call_format(name).parser(TOOLS), text, rng) == [Content(text)]


@pytest.mark.parametrize("name", ["hermes", "qwen3_xml"])
def test_complete_call_without_closing_tag_is_a_call(name: str) -> None:
    """A stop string or an end-of-sequence token may have removed the tag."""
    text = WRITERS[name]("look", PARIS).removesuffix("</tool_call>")
    assert parse(tool_call_format(name).parser(TOOLS), text) == [call("look", PARIS)]


@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
def test_truncated_call_is_content_or_complete(name: str) -> None:
    """Wherever max_tokens cuts it."""
    text = WRITERS[name]("look", PARIS)
    for size in range(1, len(text)):
        parts = parse(tool_call_format(name).parser(TOOLS), text[:size])
        assert parts in ([Content(text[:size])], [call("look", PARIS)])


def test_values_have_the_type_of_the_schema() -> None:
    text = qwen("look", {"place": "75001", "days": 2})
    (call,) = parse(tool_call_format("qwen3_xml").parser(TOOLS), text)
    assert isinstance(call, ParsedToolCall)
    assert json.loads(call.arguments) == {"place": "75001", "days": 2}


UNION: dict[str, Any] = {
    "f": {
        "$defs": {"S": {"type": "string"}, "Loop": {"$ref": "#/$defs/Loop"}},
        "properties": {
            "text": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "listed": {"type": ["string", "null"]},
            "digit": {"enum": ["7", "8"]},
            "ref": {"$ref": "#/$defs/S"},
            "loop": {"$ref": "#/$defs/Loop"},
            "flag": {"type": "boolean"},
            "maybe": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
            "nothing": {"type": "null"},
            "items": {"type": "array", "items": {"type": "string"}},
            "record": {"type": "object"},
            "count": {"type": "integer"},
            "ratio": {"type": "number"},
            "number": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
            "implied": {"properties": {"a": {}}},
            "both": {"allOf": [{"$ref": "#/$defs/S"}], "description": "d"},
            "any": {},
        },
        "allOf": [{"properties": {"inherited": {"type": "integer"}}}],
        "additionalProperties": {"type": "integer"},
    }
}


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("text", "12345", "12345"),
        ("text", "null", None),
        ("text", "true", "true"),
        ("listed", "12345", "12345"),
        ("listed", '{"a": 1}', '{"a": 1}'),
        ("digit", "7", "7"),
        ("ref", "true", "true"),
        ("loop", "x", "x"),
        ("flag", "True", True),
        ("flag", "false", False),
        ("flag", "FALSE", False),
        ("flag", "maybe", "maybe"),
        ("maybe", "None", None),
        ("nothing", "None", None),
        ("nothing", "null", None),
        ("items", "['a', 'b']", ["a", "b"]),
        ("items", '["a"]', ["a"]),
        ("record", "{'k': 1, 'on': True}", {"k": 1, "on": True}),
        ("record", "__import__('os')", "__import__('os')"),
        ("record", "{" * 5000, "{" * 5000),
        ("count", "5", 5),
        ("count", "5.0", 5),
        ("count", "five", "five"),
        ("ratio", "5", 5),
        ("ratio", "0.5", 0.5),
        ("ratio", "NaN", "NaN"),
        ("number", "12", 12),
        ("number", "twelve", "twelve"),
        ("implied", '{"a": 1}', {"a": 1}),
        ("both", "12", "12"),
        ("any", "12", 12),
        ("any", "word", "word"),
        ("inherited", "3", 3),
        ("further", "3", 3),
    ],
)
def test_values_have_a_type_that_the_whole_schema_allows(key: str, text: str, value: Any) -> None:
    written = qwen("f", {key: text})
    (call,) = parse(tool_call_format("qwen3_xml").parser(UNION), written)
    assert isinstance(call, ParsedToolCall)
    read = json.loads(call.arguments)[key]
    assert read == value and type(read) is type(value)


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("hermes", {"y": "</tool_call> in text", "z": 'say "</tool_call>" \\'}),
        ("hermes", {"y": "<tool_call>{}</tool_call>"}),
        ("qwen3_xml", {"place": "a </tool_call> b"}),
    ],
)
def test_closing_mark_inside_a_value_does_not_end_the_call(
    name: str, arguments: dict[str, Any], seed: int | None
) -> None:
    rng = None if seed is None else random.Random(seed)
    text = "Now: " + WRITERS[name]("look", arguments) + "done"
    parts = parse(tool_call_format(name).parser(TOOLS), text, rng)
    assert parts == [Content("Now:"), call("look", arguments), Content(" done")]


@pytest.mark.parametrize("name", ["hermes", "qwen3_xml"])
def test_malformed_call_does_not_swallow_the_next_one(name: str) -> None:
    broken = {
        "hermes": '<tool_call>{"name": "lo}</tool_call>',
        "qwen3_xml": "<tool_call><function=look><parameter=place>P</tool_call>",
    }[name]
    text = broken + WRITERS[name]("look", PARIS)
    for seed in (None, 1, 2):
        rng = None if seed is None else random.Random(seed)
        parts = parse(tool_call_format(name).parser(TOOLS), text, rng)
        assert parts == [Content(broken), call("look", PARIS)]


def test_call_with_null_as_arguments_has_none() -> None:
    text = '<tool_call>{"name": "noop", "arguments": null}</tool_call>'
    assert parse(tool_call_format("hermes").parser(TOOLS), text) == [call("noop", {})]


def test_bare_json_answer_with_a_name_is_no_call_of_llama() -> None:
    text = '{"name": "Ada", "born": 1815}'
    parser = tool_call_format("llama3_json").parser
    assert parse(parser(TOOLS), text) == [Content(text)]
    assert parse(parser(TOOLS), "[1, 2]") == [Content("[1, 2]")]
    assert parse(parser(TOOLS), "[see](here)") == [Content("[see](here)")]
    listed = f"[{llama('look', PARIS)}, {llama('noop', {})}]"
    assert parse(parser(TOOLS), listed) == [call("look", PARIS), call("noop", {})]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("inside", "text", "reasoning", "content"),
    [
        (False, "<think>\nhm\n</think>\n\nyes", "hm\n", "yes"),
        (False, "  <think>hm</think>yes", "hm", "yes"),
        (False, "yes <think>no</think>", "", "yes <think>no</think>"),
        (False, "<think>cut", "cut", ""),
        (False, "<thin ice", "", "<thin ice"),
        (False, "<thi", "", "<thi"),
        (True, "hm</think>yes </think>", "hm", "yes </think>"),
        (True, "<think>\nhm</think>yes", "hm", "yes"),
        (True, "hm </thin", "hm </thin", ""),
    ],
)
def test_reasoning_is_separated_from_the_answer(
    inside: bool, text: str, reasoning: str, content: str, seed: int
) -> None:
    expected: list[OutputPart] = [Reasoning(reasoning)] if reasoning else []
    expected += [Content(content)] if content else []
    rng = random.Random(seed)
    assert parse(ReasoningParser(PlainTextParser(), inside=inside), text, rng) == expected
    without = parse(ReasoningParser(PlainTextParser(), inside=inside, keep=False), text, rng)
    assert without == [part for part in expected if isinstance(part, Content)]


def test_reasoning_then_a_call() -> None:
    parser = ReasoningParser(tool_call_format("hermes").parser(TOOLS), inside=False)
    text = "<think>I should look</think>\n" + hermes("look", PARIS)
    parts = parse(parser, text, random.Random(3))
    assert parts == [Reasoning("I should look"), call("look", PARIS)]


@pytest.mark.slow
@given(
    st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "<think>", "</think>", "{", "}", '"',
                              "<function=f>", "</function>", "x", " ", "\n", ";", "<", "é",
                              hermes("noop", {}), qwen("look", {"days": 1})])),
    st.sampled_from(sorted(TOOL_CALL_FORMATS)),
    st.integers(0, 10),
)  # fmt: skip
def test_parsers_never_raise_and_do_not_depend_on_cuts(
    pieces: list[str], name: str, seed: int
) -> None:
    text = "".join(pieces)

    def parser() -> OutputParser:
        return ReasoningParser(tool_call_format(name).parser(TOOLS), inside=False)

    assert parse(parser(), text, random.Random(seed)) == parse(parser(), text)
