"""YAML of plain values, readable and without surprises: every string is quoted as in JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence


class Unquoted(str):
    """Text that is written as it is: an expression of a template that yields a whole value."""


class TemplateLines(str):
    """Lines of a template that yield items of a sequence, or entries of a mapping, whose own keys
    then stand in them."""


def to_yaml(value: object, indent: int = 0) -> str:
    """Mappings and sequences in block style, scalars as JSON, which is YAML."""
    pad = "  " * indent
    if isinstance(value, Mapping) and value:
        return "".join(
            _lines(item, pad)
            if isinstance(item, TemplateLines)
            else f"{pad}{key}:{_inner(item, indent)}"
            for key, item in value.items()
        )
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        lines = []
        for item in value:
            if isinstance(item, TemplateLines):
                lines.append(_lines(item, pad))
                continue
            text = to_yaml(item, indent + 1)
            lines.append(f"{pad}- {text[len(pad) + 2 :]}" if _is_block(item) else f"{pad}- {text}")
        return "".join(lines)
    if isinstance(value, Unquoted):
        return f"{value}\n"
    return json.dumps(value, ensure_ascii=False) + "\n"


def literal_block(text: str) -> Unquoted:
    """A text of several lines, as a literal block of a mapping at the top or one level below."""
    return Unquoted("|\n" + "".join(f"    {line}\n" for line in text.splitlines()).rstrip("\n"))


def _lines(text: TemplateLines, pad: str) -> str:
    return "".join(f"{pad}{line}\n" for line in text.splitlines())


def _inner(value: object, indent: int) -> str:
    if _is_block(value):
        return "\n" + to_yaml(value, indent + 1)
    return " " + to_yaml(value)


def _is_block(value: object) -> bool:
    return isinstance(value, Mapping | list | tuple) and bool(value)
