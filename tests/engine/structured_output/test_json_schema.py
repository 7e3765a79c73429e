"""Schemas as their generators write them compile; keywords that constrain are served or refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from ridgeline.engine.engine import Engine
from ridgeline.engine.structured_output.json_schema import supported_schema
from ridgeline.errors import BadInput
from ridgeline.records import OutputGrammar


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.open("demo", max_num_seqs=2, kv_cache_memory_bytes=16 << 20) as opened:
        yield opened


def prepare(engine: Engine, schema: object) -> None:
    engine._masks.prepare(OutputGrammar("json", json.dumps(schema)))


FORMATS = [
    "path", "file-path", "directory-path", "password", "binary", "byte", "uri-reference", "regex",
    "json-pointer", "iri", "base64", "color", "decimal", "int32", "int64", "uri-template",
]  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_unknown_formats_are_annotations(engine: Engine, name: str) -> None:
    field = {"type": "string", "format": name}
    prepare(engine, field)
    prepare(engine, {"type": "object", "properties": {"a": {"anyOf": [field, {"type": "null"}]}}})
    prepare(engine, {"$defs": {"D": field}, "type": "array", "items": {"$ref": "#/$defs/D"}})


def test_known_formats_still_constrain() -> None:
    text = json.dumps({"type": "string", "format": "date"})
    assert supported_schema(text) is text


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "object", "propertyNames": {"type": "string"}},
        {"type": "object", "propertyNames": True, "additionalProperties": {"type": "integer"}},
        {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}},
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "required": ["a"]},
        {"type": "array", "uniqueItems": False},
        {"type": "object", "additionalProperties": False, "unevaluatedProperties": False},
        {"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False},
        {"type": "array", "prefixItems": [{}], "unevaluatedItems": False},
        {"type": "object", "unevaluatedProperties": True},
        {"type": "object", "dependentRequired": {}, "dependentSchemas": {}, "dependencies": {}},
        {"type": "array", "minContains": 2},
        {"type": "array", "contains": {"type": "integer"}, "minContains": 0},
        {"type": "string", "if": {"minLength": 2}},
        {"type": "string", "then": {"minLength": 2}},
        {"type": "string", "not": False},
        {"type": "object", "$dynamicAnchor": "node"},
        {"type": "object", "properties": {"uniqueItems": {"type": "array", "uniqueItems": False}}},
    ],
)
def test_keywords_that_constrain_nothing_are_accepted(engine: Engine, schema: object) -> None:
    prepare(engine, schema)
    prepare(engine, {"anyOf": [{"type": "object", "properties": {"x": schema}}]})


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"type": "array", "uniqueItems": True},
        {"not": {"type": "string"}},
        {"if": {"type": "string"}, "then": {"minLength": 2}},
        {"type": "array", "contains": {"type": "integer"}},
        {"type": "object", "dependentRequired": {"a": ["b"]}},
        {"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False},
        {"type": "object", "propertyNames": {"minLength": 3}},
    ],
)
def test_keywords_that_constrain_are_refused_with_a_reason(engine: Engine, schema: object) -> None:
    with pytest.raises(BadInput) as caught:
        prepare(engine, schema)
    keyword = "false" if schema is False else next(reversed(dict(schema)))  # type: ignore[call-overload]
    assert keyword in str(caught.value) or "then" in str(caught.value)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ({"pattern": "^a"}, {"patternProperties": {"^a": {"type": "integer"}}}),
        ({"enum": ["a"]}, {"properties": {"a": {"type": "integer"}}}),
        ({"const": "a", "type": "string"}, {"properties": {"a": {"type": "integer"}}}),
    ],
)
def test_property_names_of_a_record_become_its_properties(
    names: dict[str, Any], expected: dict[str, Any]
) -> None:
    schema = {"propertyNames": names, "additionalProperties": {"type": "integer"}}
    simplified = json.loads(supported_schema(json.dumps(schema)))
    assert simplified == {**expected, "additionalProperties": False}


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(?=a)b", "look-ahead"),
        ("(?<!a)b", "look-behind"),
        ("(", "unclosed group"),
        (r"(a)\1", "backreferences"),
        ("[z-a]", "range"),
    ],
)
def test_reason_of_a_regular_expression_is_reported(
    engine: Engine, pattern: str, reason: str
) -> None:
    for grammar in (
        OutputGrammar("regex", pattern),
        OutputGrammar("json", json.dumps({"type": "string", "pattern": pattern})),
    ):
        with pytest.raises(BadInput, match=reason):
            engine._masks.prepare(grammar)
