"""Structured output: the API's several ways to request it, as one grammar.

OpenAI's `response_format`, vLLM's `structured_outputs`, and the older `guided_*` fields. Sending
two of them is refused.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from ridgeline.records import OutputGrammar
from ridgeline.serve.errors import ApiError
from ridgeline.serve.openai.schemas import (
    CompletionRequestBase,
    ResponseFormat,
    StructuredOutputs,
)
from ridgeline.serve.output_parsers.select import check_grammar_size, json_grammar

ANY_OBJECT = OutputGrammar("json", '{"type":"object"}')

_FIELDS = (
    "response_format", "structured_outputs",
    "guided_json", "guided_regex", "guided_choice", "guided_grammar",
)  # fmt: skip


def grammar_field(body: CompletionRequestBase) -> str | None:
    """The field by which a body asks for structured output; tools are asked for with their own."""
    for name in _FIELDS:
        if getattr(body, name) is not None:
            return name
    return "tools" if getattr(body, "tools", None) else None


def requested_grammar(body: CompletionRequestBase) -> OutputGrammar | None:
    """The grammar of the output; ApiError 400 for two of them, or one that is too large."""
    if not body.model_fields_set.intersection(_FIELDS):
        return None
    candidates = {
        "response_format": _response_format(body.response_format),
        "structured_outputs": _structured_outputs(body.structured_outputs),
        "guided_json": _json(body.guided_json),
        "guided_regex": _text("regex", body.guided_regex),
        "guided_choice": _choice(body.guided_choice),
        "guided_grammar": _text("grammar", body.guided_grammar),
    }
    given = {name: grammar for name, grammar in candidates.items() if grammar is not None}
    if len(given) > 1:
        names = " and ".join(given)
        raise ApiError(
            400, f"{names} contradict each other; fix: send one", param=next(iter(given))
        )
    for name, grammar in given.items():
        check_grammar_size(name, grammar)
        return grammar
    return None


def _response_format(requested: ResponseFormat | None) -> OutputGrammar | None:
    if requested is None or requested.type == "text":
        return None
    if requested.type == "json_object":
        schema = requested.schema_
        return ANY_OBJECT if schema is None else json_grammar(_as_object(schema))
    if requested.json_schema is None:
        raise ApiError(400, "response_format.json_schema is missing", param="response_format")
    return json_grammar(requested.json_schema.schema_)


def _as_object(schema: dict[str, Any] | bool) -> object:
    """A schema whose values are objects, as `json_object` says."""
    return {"type": "object", **schema} if isinstance(schema, dict) else schema


def _structured_outputs(requested: StructuredOutputs | None) -> OutputGrammar | None:
    if requested is None:
        return None
    candidates = [
        _json(requested.json_),
        _text("regex", requested.regex),
        _choice(requested.choice),
        _text("grammar", requested.grammar),
        ANY_OBJECT if requested.json_object else None,
    ]
    given = [grammar for grammar in candidates if grammar is not None]
    if len(given) > 1:
        message = "structured_outputs takes one of json, regex, choice, grammar, json_object"
        raise ApiError(400, message, param="structured_outputs")
    return given[0] if given else None


def _json(schema: dict[str, Any] | bool | str | None) -> OutputGrammar | None:
    """A schema as a value, or as JSON text."""
    if schema is None:
        return None
    return OutputGrammar("json", schema) if isinstance(schema, str) else json_grammar(schema)


def _text(kind: Literal["regex", "grammar"], text: str | None) -> OutputGrammar | None:
    return None if text is None else OutputGrammar(kind, text)


def _choice(options: list[str] | None) -> OutputGrammar | None:
    return None if options is None else OutputGrammar("choice", json.dumps(options))
