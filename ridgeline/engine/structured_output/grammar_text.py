"""Grammars of requests in llguidance's format, and its errors in the words of a request."""

from __future__ import annotations

import json
import re
from typing import Any

from ridgeline.engine.structured_output.json_schema import (
    CALL_SPACE,
    JSON_SPACE,
    embed_schemas,
    supported_schema,
)
from ridgeline.engine.structured_output.repeats import check_repeats
from ridgeline.engine.structured_output.width import MAX_DEPTH
from ridgeline.errors import BadGrammar
from ridgeline.records import OutputGrammar

MAX_CHOICES = 2048
_POSITION = re.compile(r"^at \d+\(\d+\): ")


def grammar_text(library: Any, structured: OutputGrammar) -> str:
    """The grammar in llguidance's format."""
    matcher, text = library.LLMatcher, structured.text
    try:
        if structured.kind in ("json", "call"):
            layout = {"whitespace_pattern": JSON_SPACE if structured.kind == "json" else CALL_SPACE}
            return str(matcher.grammar_from_json_schema(supported_schema(text), overrides=layout))
        if structured.kind in ("regex", "grammar"):
            check_repeats(text)
        if structured.kind == "regex":
            return str(matcher.grammar_from_regex(text))
        if structured.kind == "choice":
            return str(matcher.grammar_from_lark(_choices(text)))
        if structured.kind == "answer_or_calls":
            return str(matcher.grammar_from_lark(embed_schemas(text)))
        return str(matcher.grammar_from_lark(text))
    except RecursionError:
        raise unusable_error(
            structured, f"it is nested more than {MAX_DEPTH} levels deep"
        ) from None
    except ValueError as error:
        raise unusable_error(structured, str(error)) from None


def _choices(text: str) -> str:
    """A Lark grammar of alternatives in a single terminal; as rules, each would be a parser item.

    JSON strings are Lark strings, except for U+007F, which Lark wants escaped.
    """
    options = dict.fromkeys(json.loads(text))
    if not options or len(options) > MAX_CHOICES:
        raise ValueError(f"{len(options)} choices; 1 to {MAX_CHOICES} are allowed")
    written = (json.dumps(option, ensure_ascii=False) for option in options)
    return "start: CHOICE\nCHOICE: " + " | ".join(written).replace("\x7f", r"\u007f")


_KIND_NAMES = {
    "json": "JSON schema",
    "call": "JSON schema of a tool",
    "answer_or_calls": "response format",
}


def unusable_error(structured: OutputGrammar, why: str) -> BadGrammar:
    """The library's reason in the words of a request."""
    lines = why.strip().splitlines() or ["it cannot be compiled"]
    # A regular expression's reason is on a later line, below the place that it points to.
    first = " ".join([lines[0], *(line for line in lines[1:] if line.startswith("error:"))])
    if structured.kind == "regex":
        first = _POSITION.sub("", first)  # counted in a grammar that the client has not written
    fix = "correct it, or make it smaller"
    if "coerce_one_of" in first:  # names an option of the library that requests do not have
        first = "oneOf is only supported if no value matches two of its branches"
        fix = "use anyOf"
    if first.startswith("Unimplemented keys"):
        fix = "leave them out"
    if "optional properties" in first:
        fix = "list some of them under required, or divide the object into smaller ones"
    kind = _KIND_NAMES.get(structured.kind, structured.kind)
    return BadGrammar(f"the {kind} for structured output cannot be used: {first[:300]}", fix=fix)
