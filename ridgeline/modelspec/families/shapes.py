"""Published model shapes for `dummy:NAME`: speed-only work with random weights, and sizing."""

from __future__ import annotations

import difflib
import tomllib
from importlib.resources import files
from typing import Any

from ridgeline.errors import BadModel


def shape_table() -> dict[str, dict[str, Any]]:
    """Every row of shapes.toml: config.json fields, plus where the row comes from (`source`)."""
    text = files("ridgeline.modelspec.families").joinpath("shapes.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def shape_config(name: str) -> dict[str, Any]:
    """The config.json fields of a published shape; BadModel lists near names for an unknown one."""
    table = shape_table()
    if name not in table:
        near = difflib.get_close_matches(name.lower(), table, n=5, cutoff=0.4) or list(table)
        raise BadModel(
            "no published shape has this name",
            value=f"dummy:{name}",
            limit=f"near: {', '.join(f'dummy:{n}' for n in near)}",
            fix="choose one of these, or give a model directory",
        )
    row = {key: value for key, value in table[name].items() if key != "source"}
    return {key: None if value == "none" else value for key, value in row.items()}
