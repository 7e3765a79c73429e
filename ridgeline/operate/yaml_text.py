"""YAML of plain values, readable and without surprises: every string is quoted as in JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence


def to_yaml(value: object, indent: int = 0) -> str:
    """Mappings and sequences in block style, scalars as JSON, which is YAML."""
    pad = "  " * indent
    if isinstance(value, Mapping) and value:
        return "".join(f"{pad}{key}:{_inner(item, indent)}" for key, item in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        lines = []
        for item in value:
            text = to_yaml(item, indent + 1)
            lines.append(f"{pad}- {text[len(pad) + 2 :]}" if _is_block(item) else f"{pad}- {text}")
        return "".join(lines)
    return json.dumps(value, ensure_ascii=False) + "\n"


def _inner(value: object, indent: int) -> str:
    if _is_block(value):
        return "\n" + to_yaml(value, indent + 1)
    return " " + to_yaml(value)


def _is_block(value: object) -> bool:
    return isinstance(value, Mapping | list | tuple) and bool(value)
