"""JSON schemas of tool calls: a tool's parameters inside a larger schema, and as an object.

A schema refers to its own parts from its root (`#/$defs/Point`). Inside a larger schema it is
hoisted into the root's `$defs` under a separate name, and its references follow it, so that two
tools may define parts of the same name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ridgeline.serve.errors import ApiError

_VALUES = frozenset(("const", "enum", "default", "examples", "example"))
"""Keywords whose contents are values, where `$ref` is a key like any other."""
_NAMED_SCHEMAS = frozenset(("properties", "patternProperties", "$defs", "definitions"))
"""Keywords whose keys are names, even if they read like keywords."""


class OfferedTool(msgspec.Struct, frozen=True):
    """A tool that the model may call; `parameters` is a JSON schema, None for any object."""

    name: str
    parameters: dict[str, Any] | None = None


def object_schema(tool: OfferedTool) -> dict[str, Any]:
    """The schema of a tool's arguments, which are an object whatever else the schema says.

    ApiError 400 for parameters of another type.
    """
    schema = tool.parameters or {}
    given = schema.get("type", "object")
    if given != "object" and not (isinstance(given, list) and "object" in given):
        message = f"tools: the parameters of {tool.name} must be of type object; got {given!r}"
        raise ApiError(400, message, param="tools")
    return {**schema, "type": "object"}


def call_schema(tools: Sequence[OfferedTool], arguments: str) -> dict[str, Any]:
    """The schema of a call of any tool: its name, and its arguments under the key `arguments`."""
    schemas = {f"tool{index}": object_schema(tool) for index, tool in enumerate(tools)}
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, arguments: {"$ref": f"#/$defs/{key}"}},
            "required": ["name", arguments],
            "additionalProperties": False,
        }
        for key, tool in zip(schemas, tools, strict=True)
    ]
    hoisted = {key: _hoisted(schema, f"#/$defs/{key}") for key, schema in schemas.items()}
    return {"$defs": hoisted, "anyOf": calls}


def _hoisted(schema: dict[str, Any], place: str) -> dict[str, Any]:
    """The schema with references to its root changed into references to `place`."""
    base = schema.get("$id")
    rest = {key: value for key, value in schema.items() if key not in ("$id", "$schema")}
    moved: dict[str, Any] = _moved(rest, base, place)
    return moved


def _moved(schema: Any, base: object, place: str) -> Any:
    if isinstance(schema, list):
        return [_moved(part, base, place) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str):
            local = value.removeprefix(base) if isinstance(base, str) else value
            is_local = local == "#" or local.startswith("#/")
            moved[key] = place + local[1:] if is_local else value
        elif key in _NAMED_SCHEMAS and isinstance(value, dict):
            moved[key] = {name: _moved(part, base, place) for name, part in value.items()}
        else:
            moved[key] = value if key in _VALUES else _moved(value, base, place)
    return moved
