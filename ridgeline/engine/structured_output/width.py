"""How wide and how deep a JSON schema is: bounds that are checked before an answer begins.

The parser keeps an item for everything that may come next. Where many properties are optional, each
of them may, and every mask walks through all of them. Limits on this work would otherwise be
noticed in the middle of an answer, at the first place that exceeds them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

MAX_WIDTH = 800
"""Properties that may come next at one place: masks of 800 take 5 to 20 ms."""
MAX_PATTERNS = 100
"""Patterns of property names in one object: 300 took 5 s to compile, 100 take 0.1 s."""
MAX_DEPTH = 120
"""Levels of a schema as JSON; the library's parser ends at 128."""

_Schema = dict[str, Any]
_NOT_NESTING = re.compile(r'"(?:[^"\\]|\\.)*"|[^\[\]{}"]+', re.DOTALL)


class Widest(NamedTuple):
    """The largest number of properties that may come next at one place, and the schema there."""

    width: int
    schema: _Schema


def check_depth(text: str) -> None:
    """Raises ValueError if the JSON `text` is nested too deeply."""
    depth = most = 0
    for mark in _NOT_NESTING.sub("", text):
        depth += 1 if mark in "[{" else -1
        most = max(most, depth)
    if most > MAX_DEPTH:
        raise ValueError(f"it is nested {most} levels deep; {MAX_DEPTH} are allowed")


def check_width(schema: Any) -> Widest:
    """The widest place of a schema.

    Raises ValueError if it is too wide, or if an object has too many patterns.
    """
    widths = _Widths(schema)
    widest = max((widths.of(node) for node in schemas_in(schema)), key=lambda own: own.width)
    if widest.width > MAX_WIDTH:
        raise ValueError(
            f"{widest.width} optional properties may come next at one place;"
            f" {MAX_WIDTH} are allowed"
        )
    return widest


def schemas_in(schema: Any) -> Iterator[_Schema]:
    """Every object in a schema, the schema first; also those that are no schemas."""
    yield schema if isinstance(schema, dict) else {}
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        parts = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        for part in parts:
            if isinstance(part, dict):
                yield part
            waiting.append(part)


class _Widths:
    """The widths of the schemas in a document."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._of_node: dict[int, int] = {}

    def of(self, schema: _Schema) -> Widest:
        return Widest(self._width(schema), schema)

    def _width(self, schema: Any) -> int:
        """The most properties that may come next right inside a value of this schema."""
        if not isinstance(schema, dict):
            return 0
        if (known := self._of_node.get(id(schema))) is None:
            self._of_node[id(schema)] = 0  # of a schema that refers to itself
            known = self._of_node[id(schema)] = self._compute(schema)
        return known

    def _compute(self, schema: _Schema) -> int:
        total = _longest_optional_run(schema)
        if isinstance(reference := schema.get("$ref"), str):
            total += self._width(self._resolve(reference))
        if isinstance(parts := schema.get("allOf"), list):
            total += sum(map(self._width, parts))
        for keyword in ("anyOf", "oneOf"):
            if isinstance(branches := schema.get(keyword), list):
                total += self._width_of_union(branches)
        return total

    def _width_of_union(self, branches: Sequence[Any]) -> int:
        """Branches that a first property of their own tells apart are not open at the same time."""
        by_tag: dict[Any, int] = defaultdict(int)
        for branch in branches:
            by_tag[self._tag(branch)] += self._width(branch)
        untagged = by_tag.pop(None, 0)
        return untagged + max(by_tag.values(), default=0)

    def _tag(self, branch: Any) -> tuple[str, str] | None:
        """Name and value of the first property, if it is required and has one text as its value."""
        if not isinstance(branch, dict):
            return None
        if isinstance(reference := branch.get("$ref"), str):
            branch = self._resolve(reference)
        properties, required = _properties(branch), _required(branch)
        name = next(iter(properties), None)
        if name is None or name not in required or not isinstance(properties[name], dict):
            return None
        values = [properties[name].get("const"), *(properties[name].get("enum") or ())]
        texts = [value for value in values if isinstance(value, str)]
        return (name, texts[0]) if len(texts) == 1 else None

    def _resolve(self, reference: str) -> _Schema:
        """The schema in this document to which a reference points; an empty one if there is none.

        The library refuses what does not exist.
        """
        if not reference.startswith("#"):
            return {}
        node = self._root
        for step in reference[1:].split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(node, list) and name.isdecimal() and int(name) < len(node):
                node = node[int(name)]
            elif isinstance(node, Mapping) and name in node:
                node = node[name]
            else:
                return {}
        return node if isinstance(node, dict) else {}


def _properties(schema: Any) -> Mapping[str, Any]:
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return properties if isinstance(properties, dict) else {}


def _required(schema: _Schema) -> frozenset[str]:
    names = schema.get("required")
    return frozenset(map(str, names)) if isinstance(names, list) else frozenset()


def _longest_optional_run(schema: _Schema) -> int:
    """Optional properties in a row, of which any may come next, and the patterns of others."""
    required, run, longest = _required(schema), 0, 0
    for name in _properties(schema):
        run = 0 if name in required else run + 1
        longest = max(longest, run)
    patterns = schema.get("patternProperties")
    num_patterns = len(patterns) if isinstance(patterns, dict) else 0
    if num_patterns > MAX_PATTERNS:
        raise ValueError(
            f"{num_patterns} patterns of property names in one object; {MAX_PATTERNS} are allowed"
        )
    return longest + num_patterns
