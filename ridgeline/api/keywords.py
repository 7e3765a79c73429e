"""From the keywords of a function to checked options of the table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from ridgeline.config.option import Section
from ridgeline.config.settings import EngineSettings, Settings
from ridgeline.config.sources import section_from
from ridgeline.errors import BadInput

S = TypeVar("S", bound=Section)


def options_from(section: type[S], keywords: Mapping[str, Any]) -> S:
    """The section's options among the keywords of a function.

    Values may be written as in a configuration file ("5m", "8k"). Raises BadInput for a value that
    is missing, malformed or out of range.
    """
    given = {}
    for field in msgspec.structs.fields(section):
        if field.name not in keywords:
            continue
        value = keywords[field.name]
        if value is None and field.default is not None:
            raise BadInput(f"{field.name} must not be None", fix=f"leave {field.name} out")
        given[field.name] = value
    return section_from(section, given)


def engine_settings(model: str | None, settings: EngineSettings) -> Settings:
    """The settings of an engine for `model` (None: "demo"). Raises BadInput."""
    given: dict[str, Any] = dict(settings)
    unknown = given.keys() - set(Settings.__struct_fields__)
    if unknown:
        section_from(Settings, {name: given[name] for name in sorted(unknown)})
    if model is not None:
        given["model"] = model
    return options_from(Settings, given)
