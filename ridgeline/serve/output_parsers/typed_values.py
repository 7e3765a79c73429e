"""Values that a model wrote as plain text, read as the type that the tool's schema wants."""

from __future__ import annotations

import ast
import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

_MAX_REFS = 32
"""References that are followed from one schema; a cycle ends here."""

Schema = Mapping[str, Any]


def read_argument(text: str, name: str, parameters: Schema) -> Any:
    """The argument `name` of a tool with these `parameters`.

    Text that is JSON, or a Python literal (`True`, `{'a': 1}`), of a type that the schema allows
    becomes that value; other text stays a string. Without a schema for `name`, it is a string.
    """
    schemas = list(_schemas_of(name, parameters))
    if not schemas:
        return text
    types, constants = set[str](), list[Any]()
    for schema in schemas:
        types |= _types_of(schema, parameters)
        constants += [value for part in _branches(schema, parameters) for value in _constants(part)]
    if text in constants:
        return text
    return _read(text, types)


def _read(text: str, types: set[str]) -> Any:
    """`types` empty: any type."""
    for candidate in _candidates(text):
        kind = _type_of(candidate)
        if kind == "integer" and isinstance(candidate, float) and "number" not in types:
            candidate = int(candidate)
        if kind is not None and (
            not types or kind in types or (kind == "integer" and "number" in types)
        ):
            return candidate
    return text


def _candidates(text: str) -> Iterator[Any]:
    with contextlib.suppress(ValueError, RecursionError):
        yield json.loads(text, parse_constant=_refuse)
    if text.strip().lower() in ("true", "false"):
        yield text.strip().lower() == "true"
    with contextlib.suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        value = json.loads(json.dumps(ast.literal_eval(text.strip()), allow_nan=False))
        yield value


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _type_of(value: object) -> str | None:
    """The JSON type of a value, "integer" for whole numbers; None for a string and for others."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if float(value).is_integer() else "number"
    if isinstance(value, list):
        return "array"
    return "object" if isinstance(value, dict) else None


def _schemas_of(name: str, parameters: Schema) -> Iterator[Any]:
    """Every schema that the parameters give for a property, in whichever branch."""
    for part in _branches(parameters, parameters):
        properties = part.get("properties")
        if isinstance(properties, Mapping) and name in properties:
            yield properties[name]
        elif isinstance(part.get("additionalProperties"), Mapping):
            yield part["additionalProperties"]


def _branches(schema: Any, root: Schema) -> Iterator[Schema]:
    """The schema, and those that it refers to or combines."""
    waiting, num_refs, seen = [schema], 0, set[int]()
    while waiting:
        part = waiting.pop()
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        for keyword in ("anyOf", "oneOf", "allOf"):
            waiting += part[keyword] if isinstance(part.get(keyword), list) else []
        if isinstance(part.get("$ref"), str) and num_refs < _MAX_REFS:
            num_refs += 1
            waiting.append(_resolve(part["$ref"], root))


def _resolve(reference: str, root: Schema) -> Any:
    """The schema at a local JSON pointer; None if there is none."""
    at: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        at = at.get(key) if isinstance(at, Mapping) else None
    return at if reference.startswith("#") else None


def _types_of(schema: Any, root: Schema) -> set[str]:
    """The JSON types that a schema mentions; empty if it mentions none."""
    types: set[str] = set()
    for part in _branches(schema, root):
        given = part.get("type", ())
        types |= {given} if isinstance(given, str) else set(filter(_is_text, given or ()))
        types |= {_type_of(value) or "string" for value in _constants(part)}
        if "type" not in part:
            types |= {kind for keyword, kind in _IMPLIED.items() if keyword in part}
    return types


_IMPLIED = {"properties": "object", "items": "array", "pattern": "string", "format": "string"}
"""Keywords that say which type is meant where `type` is missing."""


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _constants(schema: Schema) -> list[Any]:
    values = schema.get("enum", [])
    constants = list(values) if isinstance(values, list) else []
    return [*constants, schema["const"]] if "const" in schema else constants
