"""JSON schemas as llguidance takes them: what constrains nothing is removed.

JSON Schema 2020-12 lets a validator ignore formats that it does not know (7.2.3, annotations), and
many keywords constrain nothing with the values that generators write (`uniqueItems: false`, Zod's
`propertyNames: {"type": "string"}`). llguidance refuses both. Keywords that do constrain are left
as they are, so that it refuses what it cannot honour.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ridgeline.engine.structured_output.repeats import check_group_copies, check_repeats
from ridgeline.engine.structured_output.width import Widest, check_depth, check_width, schemas_in

KNOWN_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)

# Whitespace in JSON as models write it: none (`{"a":1}`), one or two spaces (like Python's
# json.dumps and so most chat templates), or a newline and an indentation of up to 32 levels of two
# spaces. Anything more permissive lets a model write whitespace instead of an answer.
JSON_SPACE = r"[\x20\x09]{0,2}(\r?\n[\x20\x09]{0,64})?"
# The layout of a call is never shown, and a weak model would spend its tokens on indentation.
CALL_SPACE = r"\x20?"

_EMBEDDED = re.compile(r"(?<=: )%(json|call) ")
_Schema = dict[str, Any]

_ANNOTATIONS = frozenset(("title", "description", "default", "examples", "deprecated", "$comment"))
_IN_MAPPING = frozenset(
    ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
)
_IN_LIST = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
_NESTED = frozenset((
    "items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains",
    "propertyNames", "unevaluatedProperties", "unevaluatedItems",
))  # fmt: skip
_APPLICATORS = frozenset((
    "$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas",
    "dependencies", "contains", "not",
))  # fmt: skip
"""Keywords through which another schema may evaluate properties or items of the same value."""


def supported_schema(text: str) -> str:
    """The schema without keywords that constrain nothing; `text` itself if it has none.

    Raises ValueError for text that is not JSON, for the schema `false`, which allows no value, for
    a pattern with too many repetitions, and for a schema that is too wide or too deep.
    """
    check_depth(text)
    schema = json.loads(text)
    supported = _supported(schema)
    return text if supported == schema else json.dumps(supported)


def embed_schemas(grammar: str) -> str:
    """A grammar of kind "answer_or_calls" in llguidance's dialect of Lark."""
    pieces, begin = list[str](), 0
    for schema, kind, start, end in _embedded_schemas(grammar):
        space = CALL_SPACE if kind == "call" else JSON_SPACE
        pieces += [grammar[begin:start], _embedded(schema, space)]
        begin = end
    return "".join([*pieces, grammar[begin:]])


def _embedded_schemas(grammar: str) -> Iterator[tuple[Any, str, int, int]]:
    """The schemas in a grammar, with their kinds and the places where they begin and end."""
    decoder, begin = json.JSONDecoder(), 0
    for match in _EMBEDDED.finditer(grammar):
        if match.start() >= begin:  # else it is text inside a schema
            schema, begin = decoder.raw_decode(grammar, match.end())
            yield schema, match[1], match.start(), begin


def widest_schema(kind: str, text: str) -> Widest:
    """The widest place of the schemas in a grammar, as a separate schema.

    Its references to definitions hold; those to other places of the document do not.
    """
    is_document = kind in ("json", "call")
    schemas = [json.loads(text)] if is_document else [own[0] for own in _embedded_schemas(text)]
    places = [(check_width(schema), schema) for schema in schemas]
    widest, document = max(places, key=lambda own: own[0].width, default=(Widest(0, {}), {}))
    own: _Schema = {} if isinstance(document, bool) else document
    kept = {key: own[key] for key in ("$defs", "definitions") if key in own}
    return Widest(widest.width, {**kept, **widest.schema})


def _embedded(schema: Any, whitespace_pattern: str) -> str:
    supported = _supported(schema)
    if not isinstance(supported, dict):
        raise ValueError("the schema is not an object")
    options = {"whitespace_pattern": whitespace_pattern}
    return "%json " + json.dumps({**supported, "x-guidance": options})


def _supported(schema: Any) -> Any:
    if schema is False:
        raise ValueError("the schema false allows no value")
    check_width(schema)
    check_group_copies(pattern for node in schemas_in(schema) for pattern in _patterns(node))
    return {} if schema is True else _simplified(schema)


def _simplified(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    kept = {key: _part(key, value) for key, value in schema.items()}
    for pattern in _patterns(schema):
        check_repeats(pattern)
    for simplify in _SIMPLIFY:
        simplify(kept)
    return kept


def _patterns(schema: _Schema) -> list[str]:
    """The regular expressions of a schema, without those of the schemas in it."""
    by_pattern = schema.get("patternProperties")
    patterns = [schema.get("pattern"), *(by_pattern if isinstance(by_pattern, dict) else ())]
    return [pattern for pattern in patterns if isinstance(pattern, str)]


def _part(key: str, value: Any) -> Any:
    """The value of a keyword, with the schemas in it simplified."""
    if key in _IN_MAPPING and isinstance(value, dict):
        return {name: _simplified(part) for name, part in value.items()}
    if key in _IN_LIST and isinstance(value, list):
        return [_simplified(part) for part in value]
    return _simplified(value) if key in _NESTED else value


def _allows_all(schema: object) -> bool:
    return schema is True or (isinstance(schema, dict) and schema.keys() <= _ANNOTATIONS)


def _simplify_format(schema: _Schema) -> None:
    if isinstance(schema.get("format"), str) and schema["format"] not in KNOWN_FORMATS:
        del schema["format"]


def _simplify_conditions(schema: _Schema) -> None:
    if "if" not in schema or not ("then" in schema or "else" in schema):
        for key in ("if", "then", "else"):
            schema.pop(key, None)
    if schema.get("not") is False:
        del schema["not"]
    for key in ("dependentRequired", "dependentSchemas", "dependencies"):
        value = schema.get(key)
        if isinstance(value, Mapping) and not any(
            part != [] and not _allows_all(part) for part in value.values()
        ):
            del schema[key]


def _simplify_items(schema: _Schema) -> None:
    if schema.get("uniqueItems") is False:
        del schema["uniqueItems"]
    unbounded = schema.get("minContains") == 0 and "maxContains" not in schema
    if "contains" not in schema or unbounded:
        for key in ("contains", "minContains", "maxContains"):
            schema.pop(key, None)
    _simplify_unevaluated(schema, "unevaluatedItems", "items")


def _simplify_unevaluated(schema: _Schema, keyword: str, all_others: str) -> None:
    """`unevaluatedX` next to `X` has nothing left to apply to; alone, it is `X`."""
    if keyword not in schema:
        return
    if _allows_all(schema[keyword]) or all_others in schema:
        del schema[keyword]
    elif not _APPLICATORS & schema.keys():
        schema[all_others] = schema.pop(keyword)


def _simplify_property_names(schema: _Schema) -> None:
    """Names of a string's every form are dropped; a pattern or a list of names of a record becomes
    the schemas of its properties."""
    _simplify_unevaluated(schema, "unevaluatedProperties", "additionalProperties")
    rules = {} if schema.get("propertyNames") is True else schema.get("propertyNames")
    if not isinstance(rules, dict):
        return
    constraints = set(rules) - _ANNOTATIONS
    if constraints <= {"type"} and rules.get("type", "string") in ("string", ["string"]):
        del schema["propertyNames"]
    elif "properties" not in schema and "patternProperties" not in schema:
        _split_properties(schema, constraints - {"type"})


def _split_properties(schema: _Schema, constraints: set[str]) -> None:
    names, value = schema["propertyNames"], schema.get("additionalProperties", True)
    if constraints == {"pattern"}:
        schema["patternProperties"] = {names["pattern"]: value}
    elif constraints == {"enum"} and all(isinstance(name, str) for name in names["enum"]):
        schema["properties"] = dict.fromkeys(names["enum"], value)
    elif constraints == {"const"} and isinstance(names["const"], str):
        schema["properties"] = {names["const"]: value}
    else:
        return
    schema["additionalProperties"] = False
    del schema["propertyNames"]


def _simplify_anchors(schema: _Schema) -> None:
    schema.pop("$dynamicAnchor", None)  # only a $dynamicRef, which is refused, needs it


_SIMPLIFY: tuple[Callable[[_Schema], None], ...] = (
    _simplify_format,
    _simplify_conditions,
    _simplify_items,
    _simplify_property_names,
    _simplify_anchors,
)
