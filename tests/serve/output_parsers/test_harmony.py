"""gpt-oss's channels: reasoning, calls and answer, whole and cut at every position."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ridgeline.config.server import ServerOptions
from ridgeline.serve.errors import ApiError
from ridgeline.serve.output_parsers.base import Content, OutputPart, ParsedToolCall, Reasoning
from ridgeline.serve.output_parsers.harmony import MARKS, HarmonyParser
from ridgeline.serve.output_parsers.select import select_output_format
from ridgeline.serve.output_parsers.tool_schemas import OfferedTool

CALL = (
    '<|channel|>commentary to=functions.forecast <|constrain|>json<|message|>{"city": "Ulm <|x|>"}'
)
PARSED = ParsedToolCall("forecast", '{"city": "Ulm <|x|>"}')
THOUGHT = "<|channel|>analysis<|message|>2 < 3 <| so<|end|><|start|>assistant"
CASES: list[tuple[str, list[OutputPart]]] = [
    ("<|channel|>final<|message|>Hi there<|return|>", [Content("Hi there")]),
    ("<|channel|>final<|message|>Hi", [Content("Hi")]),
    (
        THOUGHT + "<|channel|>final<|message|>4",
        [Reasoning("2 < 3 <| so"), Content("4")],
    ),
    (THOUGHT + CALL + "<|call|>", [Reasoning("2 < 3 <| so"), PARSED]),
    (THOUGHT + CALL, [Reasoning("2 < 3 <| so"), PARSED]),  # the mark that ended it is not text
    (
        "<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant" + CALL,
        [Content("Let me look."), PARSED],
    ),
    (
        " to=functions.forecast<|channel|>commentary json<|message|>" + '{"city": "Ulm <|x|>"}',
        [PARSED],
    ),
    (CALL + "<|call|><|start|>assistant" + CALL + "<|call|>", [PARSED, PARSED]),
    (
        "<|channel|>commentary to=functions.now <|constrain|>json<|message|><|call|>",
        [ParsedToolCall("now", "{}")],
    ),
    (
        "<|channel|>commentary to=functions.f<|message|>no JSON<|call|>",
        [Content("<|channel|>commentary to=functions.f<|message|>no JSON")],
    ),
    ("<|channel|>analysis<|message|>cut", [Reasoning("cut")]),
    ("<|channel|>fin", [Content("<|channel|>fin")]),
    ('{"plain": "JSON"}', [Content('{"plain": "JSON"}')]),
    ("", []),
]


def joined(parts: Sequence[OutputPart]) -> list[OutputPart]:
    """Neighbouring texts of a kind as one."""
    out: list[OutputPart] = []
    for part in parts:
        last = out[-1] if out else None
        if isinstance(part, Content) and isinstance(last, Content):
            out[-1] = Content(last.text + part.text)
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            out[-1] = Reasoning(last.text + part.text)
        else:
            out.append(part)
    return out


def parse(*pieces: str, **options: bool) -> list[OutputPart]:
    parser = HarmonyParser(**{"reads_calls": True, **options})
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return joined([*parts, *parser.finish()])


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_channels_are_separated_however_the_text_is_cut(
    text: str, expected: list[OutputPart]
) -> None:
    assert parse(text) == expected
    assert parse(*text) == expected
    for at in range(len(text)):
        assert parse(text[:at], text[at:]) == expected, at


def test_reasoning_may_be_dropped_and_calls_left_as_content() -> None:
    assert parse(THOUGHT + CALL, keeps_reasoning=False) == [PARSED]
    found = parse(THOUGHT + CALL, reads_calls=False)
    assert found == [Reasoning("2 < 3 <| so"), Content('{"city": "Ulm <|x|>"}')]


def test_text_is_streamed_before_its_message_ends() -> None:
    parser = HarmonyParser(reads_calls=True)
    assert parser.feed("<|channel|>final<|message|>Hel") == [Content("Hel")]
    assert parser.feed("lo<|ret") == [Content("lo")]
    assert parser.feed("urn|>") == []


def test_server_options_choose_the_parser() -> None:
    options = ServerOptions(
        tool_call_parser="openai", enable_auto_tool_choice=True, reasoning_parser="openai_gptoss"
    )
    tools = [OfferedTool("forecast", {"type": "object"})]
    chosen = select_output_format(tools, "auto", options)
    assert chosen.marks == MARKS
    parser = chosen.new_parser()
    assert joined([*parser.feed(THOUGHT + CALL), *parser.finish()])[-1] == PARSED
    plain = select_output_format([], "auto", ServerOptions(reasoning_parser="openai_gptoss"))
    assert isinstance(plain.new_parser(), HarmonyParser) and plain.marks == MARKS
    with pytest.raises(ApiError, match="tool-call-parser"):
        select_output_format(tools, "auto", ServerOptions(reasoning_parser="openai_gptoss"))
