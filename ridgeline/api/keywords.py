"""From the keywords of a function to checked options of the table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from ridgeline.config.commands import COMMANDS
from ridgeline.config.option import Section
from ridgeline.config.rules import RULES, unused
from ridgeline.config.settings import EngineSettings, Settings
from ridgeline.config.sources import section_from
from ridgeline.errors import BadInput
from ridgeline.records.progress import Observer
from ridgeline.workflows.models.fetch_models import fetch_models

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


def command_options(command: str, section: type[S], keywords: Mapping[str, Any]) -> S:
    """As `options_from`; raises BadInput also for a keyword without an effect."""
    check_effective(command, keywords)
    return options_from(section, keywords)


def check_effective(command: str, keywords: Mapping[str, Any]) -> None:
    """BadInput for the first keyword of a call that the others make meaningless.

    By the rules of the command of the same name; keywords with their default value do not count.
    """
    options = COMMANDS[command].options
    settings = keywords.get("settings", {})
    given = {
        name
        for name, value in {**keywords, **settings}.items()
        if name in options and value != options[name].default
    }
    for rule in RULES.get(command, ()):
        for name, relation, other in unused(rule, frozenset(given)):
            reason = f" {relation} {other}" if relation else f": {other}"
            raise BadInput(f"{name} has no effect{reason}", fix=f"leave {name} out")


def engine_settings(model: str | None, settings: EngineSettings) -> Settings:
    """The settings of an engine for `model` (None: the default one). Raises BadInput."""
    given: dict[str, Any] = dict(settings)
    unknown = given.keys() - set(Settings.__struct_fields__)
    if unknown:
        section_from(Settings, {name: given[name] for name in sorted(unknown)})
    if model is not None:
        given["model"] = model
    return options_from(Settings, given)


def download_models(settings: Settings, observer: Observer) -> Settings:
    """The settings, with the model and its draft model downloaded.

    Raises BadModel or DownloadFailed.
    """
    fetch_models(settings, observer)
    return settings
