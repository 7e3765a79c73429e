"""Applies a configuration by running the user's own command (`--apply-cmd`).

The command gets the configuration in its environment and in a JSON file, and exits with 0 once the
change is under way; it must not return while the former server could still answer. Then the
server's address decides. To restore, the same command runs with `RIDGELINE_ACTION=restore`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from ridgeline.errors import BadInput, CannotRun
from ridgeline.optimize.drivers.base import Change, Progress, Shell
from ridgeline.optimize.drivers.shell import run
from ridgeline.optimize.server_settings import REMOVE, REPLACE

CONFIG_FILE = "ridgeline-{action}.json"


class ApplyCommand:
    """A `ServerControl`. `server_command`: the command line that the server runs with now."""

    def __init__(
        self, command: str, server_command: str, url: str, timeout_s: float, folder: Path
    ) -> None:
        try:
            self._words = tuple(shlex.split(command))
            self._server = tuple(shlex.split(server_command))
        except ValueError as error:
            raise BadInput(
                "--apply-cmd or --server-cmd is not a command line", fix=str(error)
            ) from None
        if not self._words:
            raise BadInput("--apply-cmd is empty", fix="name a program")
        self._url, self._timeout_s = url, timeout_s
        self._folder = folder.absolute()
        self._output = ""

    @property
    def name(self) -> str:
        return f"the server behind {self._words[0]}"

    def read_command(self) -> tuple[str, ...]:
        return self._server

    def change(self, change: Change) -> None:
        self._write("restore", self._former)  # for the script that restores without Ridgeline
        self._run("apply", change)

    def restore(self) -> None:
        self._run("restore", self._former)

    def progress(self) -> Progress:
        return Progress(applied=True)  # the command has returned

    def logs(self) -> str:
        return self._output

    def change_commands(self, change: Change) -> list[Shell]:
        return [Shell(self._words, self._shown("apply", change))]

    def restore_commands(self) -> list[Shell]:
        return [Shell(self._words, self._shown("restore", self._former))]

    @property
    def _former(self) -> Change:
        return Change((), self._server)

    def _shown(self, action: str, change: Change) -> tuple[tuple[str, str], ...]:
        return (
            ("RIDGELINE_ACTION", action),
            ("RIDGELINE_FLAGS", shlex.join(change.flags)),
            ("RIDGELINE_COMMAND", shlex.join(change.words)),
            ("RIDGELINE_URL", self._url),
            ("RIDGELINE_CONFIG", str(self._folder / CONFIG_FILE.format(action=action))),
        )

    def _write(self, action: str, change: Change) -> None:
        document = {
            "action": action,
            "url": self._url,
            "flags": flag_values(change.flags),
            "command": list(change.words),
        }
        file = self._folder / CONFIG_FILE.format(action=action)
        file.write_text(json.dumps(document, indent=2), encoding="utf-8")

    def _run(self, action: str, change: Change) -> None:
        self._write(action, change)
        env = dict(self._shown(action, change))
        self._output = ""
        try:
            self._output = run(self._words, env=env, timeout_s=self._timeout_s, merged=True)
        except CannotRun as error:
            self._output = error.fix or ""
            raise


def flag_values(flags: Sequence[str]) -> dict[str, str | bool | list[str]]:
    """Flags as a document: `--flag value` → value, a switch → True, several values → a list.

    `!--flag` takes a switch away, and `@word` replaces a word of the command line.
    """
    values: dict[str, list[str]] = {}
    name = ""
    for word in flags:
        if word.startswith(("--", REMOVE, REPLACE)):
            name, equals, value = word.partition("=")
            values[name] = [value] if equals else []
        elif name:
            values[name].append(word)
    return {
        name: True if not given else given[0] if len(given) == 1 else given
        for name, given in values.items()
    }
