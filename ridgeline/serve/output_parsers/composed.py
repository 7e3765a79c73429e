"""Grammars made of several: calls of the tools or the answer, thinking and then the answer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from ridgeline.records import OutputGrammar
from ridgeline.serve.engine_protocol import ServedTokenizer
from ridgeline.serve.errors import ApiError
from ridgeline.serve.output_parsers.base import ToolCallFormat
from ridgeline.serve.output_parsers.reasoning import CLOSE, OPEN
from ridgeline.serve.output_parsers.tool_schemas import OfferedTool

_ESCAPED_OR_SLASH = re.compile(r"\\.|/", re.DOTALL)


def answer_or_calls(
    answer: OutputGrammar,
    call_format: ToolCallFormat,
    tools: Sequence[OfferedTool],
    tokenizer: ServedTokenizer,
    *,
    max_calls: int | None = None,
) -> OutputGrammar:
    """A grammar of which the whole output is either the answer, or calls and nothing else.

    ApiError 400 for an answer that is itself a Lark grammar, and for schemas that are not JSON.
    """
    calls = "call" if max_calls == 1 else "call (SPACE? call)*"
    try:
        rules = call_format.call_rules(tools, _mark_writer(tokenizer))
        written = _answer(answer)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the response format cannot be used: {error}") from None
    return OutputGrammar(
        "answer_or_calls",
        f"start: answer | {calls}\n{rules}answer: {written}\nSPACE: /[ \\n]{{1,2}}/\n",
    )


def after_thinking(
    grammar: OutputGrammar, tokenizer: ServedTokenizer, *, is_open: bool
) -> OutputGrammar | None:
    """The grammar for a model that may think before the output that `grammar` describes.

    `is_open`: the prompt has opened the thinking, so that it must be closed first; otherwise the
    output may begin with it. None if the grammar is written in Lark, which takes no rules next to
    its own.
    """
    if grammar.kind == "answer_or_calls":
        rules = "rest_start: " + grammar.text.removeprefix("start: ")
    elif grammar.kind == "grammar":
        return None
    else:
        try:
            rules = f"rest_start: {_answer(grammar)}\n"
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the response format cannot be used: {error}") from None
    write = _mark_writer(tokenizer)
    if tokenizer.special_token_id(CLOSE) is None:  # text: the shortest that ends with the mark
        thought, definition = "thought", r"thought[lazy]: /(.|\n)*<\/think>/"
    else:
        thought, definition = f"THOUGHT {write(CLOSE)}", r"THOUGHT: /(.|\n)*/"
    begin = thought if is_open else f"({write(OPEN)} {thought})?"
    return OutputGrammar(
        "answer_or_calls",
        f"start: {begin} BLANKS? rest_start\n{rules}{definition}\nBLANKS: /\\n{{1,2}}/\n",
    )


def _mark_writer(tokenizer: ServedTokenizer) -> Callable[[str], str]:
    """A mark as the model writes it: a special token, or text."""

    def write(mark: str) -> str:
        token = tokenizer.special_token_id(mark)
        return json.dumps(mark, ensure_ascii=False) if token is None else f"<[{token}]>"

    return write


def _answer(answer: OutputGrammar) -> str:
    """The right side of a rule for the answer."""
    if answer.kind in ("json", "call"):
        return f"%{answer.kind} {json.dumps(json.loads(answer.text))}"
    if answer.kind == "choice":
        options = [json.dumps(option, ensure_ascii=False) for option in json.loads(answer.text)]
        return " | ".join(options).replace("\x7f", r"\u007f")
    if answer.kind == "regex":
        escaped = _ESCAPED_OR_SLASH.sub(
            lambda match: r"\/" if match[0] == "/" else match[0], answer.text
        )
        return "/" + escaped.replace("\n", r"\n") + "/"
    raise ApiError(
        400,
        "a grammar for the answer cannot be combined with tools that the model may call; "
        'fix: send a JSON schema, or tool_choice "none"',
        param="tool_choice",
    )
