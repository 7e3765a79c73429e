"""The grammar of a request with tools and a response format: calls of the tools, or the answer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from ridgeline.records import OutputGrammar
from ridgeline.serve.engine_protocol import ServedTokenizer
from ridgeline.serve.errors import ApiError
from ridgeline.serve.output_parsers.base import ToolCallFormat
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
