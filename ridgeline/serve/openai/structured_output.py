"""What an answer must look like: the wire's many ways of saying it, as one `Structured`.

OpenAI's `response_format`, vLLM's `structured_outputs`, and the `guided_*` fields that came before
it. Saying it twice is a contradiction waiting to happen, and is refused.
"""

from __future__ import annotations

import json
from typing import Any

from ridgeline.records import Structured
from ridgeline.serve.errors import ApiError
from ridgeline.serve.openai.schemas import ResponseFormat, Sampled, StructuredOutputs

ANY_OBJECT = Structured("json", '{"type":"object"}')

_WAYS = {
    "response_format", "structured_outputs",
    "guided_json", "guided_regex", "guided_choice", "guided_grammar",
}  # fmt: skip


def structured_of(request: Sampled, max_bytes: int) -> Structured | None:
    """The grammar asked for; ApiError 400 for two of them, or one larger than `max_bytes`."""
    if not _WAYS & request.model_fields_set:
        return None
    found = {
        name: wanted
        for name, wanted in (
            ("response_format", _response_format(request.response_format)),
            ("structured_outputs", _structured_outputs(request.structured_outputs)),
            ("guided_json", _schema(request.guided_json)),
            ("guided_regex", _text("regex", request.guided_regex)),
            ("guided_choice", _choice(request.guided_choice)),
            ("guided_grammar", _text("grammar", request.guided_grammar)),
        )
        if wanted is not None
    }
    if len(found) > 1:
        names = " and ".join(found)
        raise ApiError(400, f"{names} contradict each other; fix: send one", param=names.split()[0])
    for name, wanted in found.items():
        check_size(name, wanted, max_bytes)
        return wanted
    return None


def schema_of(schema: object) -> Structured:
    """The grammar of a JSON schema given as a value."""
    return Structured("json", json.dumps(schema, separators=(",", ":")))


def call_of(schema: object) -> Structured:
    """The same, of a call: what a program reads."""
    return Structured("call", schema_of(schema).text)


def check_size(name: str, wanted: Structured, max_bytes: int) -> None:
    """ApiError 400 where a grammar is larger than `max_bytes`."""
    size = len(wanted.text.encode("utf-8", "replace"))
    if size > max_bytes:
        raise ApiError(400, f"{name} is too large: {size} bytes; limit: {max_bytes}", param=name)


def _response_format(asked: ResponseFormat | None) -> Structured | None:
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return ANY_OBJECT
    if asked.json_schema is None:
        raise ApiError(400, "response_format.json_schema is missing", param="response_format")
    return schema_of(asked.json_schema.schema_)


def _structured_outputs(asked: StructuredOutputs | None) -> Structured | None:
    if asked is None:
        return None
    ways = [
        _schema(asked.json_),
        _text("regex", asked.regex),
        _choice(asked.choice),
        _text("grammar", asked.grammar),
        ANY_OBJECT if asked.json_object else None,
    ]
    given = [way for way in ways if way is not None]
    if len(given) > 1:
        message = "structured_outputs takes one of json, regex, choice, grammar, json_object"
        raise ApiError(400, message, param="structured_outputs")
    return given[0] if given else None


def _schema(schema: dict[str, Any] | str | None) -> Structured | None:
    """A schema as a value, or as JSON text."""
    if schema is None:
        return None
    return Structured("json", schema) if isinstance(schema, str) else schema_of(schema)


def _text(kind: Any, text: str | None) -> Structured | None:
    return None if text is None else Structured(kind, text)


def _choice(options: list[str] | None) -> Structured | None:
    return None if options is None else Structured("choice", json.dumps(options))
