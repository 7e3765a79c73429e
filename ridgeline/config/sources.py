"""Where options come from: the command line, the environment, a `ridgeline.toml`, the defaults.

In this order of precedence: the first that sets an option wins.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from ridgeline.config.commands import TABLES
from ridgeline.config.option import Section, options_of
from ridgeline.errors import DECODE_ERRORS, BadInput

Values = dict[str, Any]
S = TypeVar("S", bound=Section)
PROVENANCE = "provenance"  # where `optimize` records how it made the file


def read_config(path: Path) -> dict[str, Values]:
    """The tables of a `ridgeline.toml`, every value checked. Raises BadInput."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(
            "cannot read the configuration file", value=str(path), fix=error.strerror
        ) from None
    except DECODE_ERRORS as error:
        raise BadInput(
            "the configuration file is not valid TOML", value=str(path), fix=str(error)
        ) from None
    tables = {}
    for name, values in document.items():
        if name == PROVENANCE:
            continue
        if name not in TABLES or not isinstance(values, dict):
            raise BadInput(f"unknown table in {path}", value=name, limit=", ".join(TABLES))
        tables[name] = read_values(TABLES[name], values, f"[{name}] of {path}")
    return tables


def read_values(section: type[Section], values: Mapping[str, Any], where: str) -> Values:
    """Every value read by its option. BadInput for an unknown name or a value that cannot be."""
    options = {option.key: option for option in options_of(section).values() if option.key}
    read: Values = {}
    for name, value in values.items():
        if name not in options:
            near = get_close_matches(name, options, n=1)
            raise BadInput(
                f"unknown option in {where}",
                value=name,
                limit=None if near else f"known options: {', '.join(options)}",
                fix=f"did you mean {near[0]}?" if near else None,
            )
        read[name] = options[name].read(value, f"{name} in {where}")
    return read


def read_environment(section: type[Section], environ: Mapping[str, str]) -> Values:
    """What the environment sets of the section's options; an empty variable sets nothing."""
    return {
        option.name: option.read(environ[option.env], option.env)
        for option in options_of(section).values()
        if option.env and environ.get(option.env)
    }


def section_from(section: type[S], values: Mapping[str, Any]) -> S:
    """A section from values as people write them: "8k", "5m", "ttft:200 tpot:50" or plain numbers.

    BadInput for an unknown name or a value that cannot be.
    """
    options = options_of(section)
    read: Values = {}
    for name, value in values.items():
        if name in options and value is not None:
            read[name] = options[name].read(value, name)
        elif name in section.__struct_fields__:
            read[name] = value
        else:
            known = ", ".join(section.__struct_fields__)
            raise BadInput("unknown option", value=name, limit=f"known options: {known}")
    try:
        return section(**read)
    except TypeError as error:  # a required option is missing
        raise BadInput(f"{section.__name__}: {error}") from None
