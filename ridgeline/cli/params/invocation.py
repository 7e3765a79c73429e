"""One call of a command: its options from all sources, validated before any work begins."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ridgeline.cli.params.fetch_model import fetch_model
from ridgeline.config.commands import Command
from ridgeline.config.option import Section, options_of
from ridgeline.config.settings import Settings
from ridgeline.config.sources import read_config, read_environment
from ridgeline.errors import BadInput
from ridgeline.workflows.device_check import check_device

S = TypeVar("S", bound=Section)


class Invocation:
    """The options of one call: what was typed, over the environment, over the file, over defaults.

    `typed` holds the options on the command line, by name. Raises BadInput for an option that is
    missing, malformed or out of range, whatever its source.
    """

    def __init__(
        self, command: Command, typed: Mapping[str, Any], environ: Mapping[str, str]
    ) -> None:
        self.command, self.typed = command, dict(typed)
        self.config: Path | None = self.typed.get("config")
        self._given: dict[str, Any] = {}
        self._sections: dict[type[Section], Section] = {}
        tables = read_config(self.config) if self.config is not None else {}
        for section in command.all_sections:
            self._sections[section] = self._build(section, tables, environ)

    def read(self, section: type[S]) -> S:
        """The options of a section of this command."""
        found = self._sections[section]
        assert isinstance(found, section)
        return found

    def engine_settings(self, model: str | None) -> Settings:
        """The engine settings, for `model` if one was named."""
        settings = self.read(Settings)
        return settings if model is None else msgspec.structs.replace(settings, model=model)

    def settings(self, model: str | None) -> Settings:
        """The engine settings, for `model` if one was named, with its files downloaded.

        Raises BadModel, DownloadFailed, and BadInput or CannotRun for a device that is not here.
        """
        settings = self.engine_settings(model)
        check_device(settings.device)
        fetch_model(settings.model)
        if settings.speculative_config is not None and settings.speculative_config.model:
            fetch_model(settings.speculative_config.model)
        return settings

    def is_given(self, name: str) -> bool:
        """Whether any source sets the option."""
        return name in self._given

    @property
    def values(self) -> dict[str, Any]:
        """Every option's value, by name."""
        return {
            name: getattr(section, name)
            for kind, section in self._sections.items()
            for name, option in options_of(kind).items()
            if option.on_command_line
        }

    def _build(
        self,
        section: type[Section],
        tables: Mapping[str, Mapping[str, Any]],
        environ: Mapping[str, str],
    ) -> Section:
        options = options_of(section)
        values = {
            **tables.get(section.table, {}),
            **read_environment(section, environ),
            **{
                name: value
                for name, value in self.typed.items()
                if name in options and options[name].on_command_line
            },
        }
        for name, option in options.items():
            if option.about.required and name not in values:
                shown = (
                    option.flag if option.about.positional else f"{option.flag} {option.metavar}"
                )
                raise BadInput(
                    f"{self.command.name} needs {shown}: {option.about.help.rstrip('.')}",
                    fix=f"ridgeline {self.command.name} --help shows how to use it",
                )
        self._given |= values
        return section(**values)
