"""Settings of another server: the common ones, and flags that only that server has."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from ridgeline.config.settings import Settings, changed, settings_from
from ridgeline.errors import BadInput

FLAGS = "server_flags"
"""Key of a rung's changes that holds flags: a table of flag → value ("" for a switch)."""

REMOVE = "!"
"""Before a flag: it is taken out of the command line, where the server has no opposite of it."""

ANY_VALUE = "*"
"""The value of a flag that is taken out of the command line together with its value."""

REPLACE = "@"
"""Before a word of the command line, such as the model: the value takes its place."""

WHOLE_COMMAND = f"{REPLACE}the command"
"""In place of a word: the value is another command line, which starts the model in another way."""

FlagPairs = tuple[tuple[str, str], ...]


class ServerSettings(Settings, frozen=True, kw_only=True):
    """`server_flags`: flags of the server itself, with their values ("" for a switch)."""

    server_flags: FlagPairs = ()


def settings_like(settings: Settings, values: Mapping[str, Any]) -> Settings:
    """Settings of the same kind with these values. Raises BadInput."""
    try:
        return msgspec.convert(dict(values), type(settings))
    except msgspec.ValidationError as error:
        raise BadInput(f"settings: {error}") from None


def flags_of(settings: Settings) -> FlagPairs:
    """The server's own flags; none for settings of Ridgeline's engine."""
    return settings.server_flags if isinstance(settings, ServerSettings) else ()


def changed_settings(settings: Settings) -> dict[str, Any]:
    """What differs from the defaults of Ridgeline's engine, and the server's own flags."""
    flags = flags_of(settings)
    return {**changed(settings), FLAGS: flags} if flags else changed(settings)


def recorded_settings(values: Mapping[str, Any]) -> Settings:
    """The settings that `changed_settings` wrote. Raises BadInput."""
    plain = {name: value for name, value in values.items() if name != FLAGS}
    settings = settings_from(plain, where="result")
    if FLAGS not in values:
        return settings
    return msgspec.convert({**msgspec.to_builtins(settings), FLAGS: values[FLAGS]}, ServerSettings)


def merge_flags(present: FlagPairs, changes: Mapping[str, str]) -> FlagPairs:
    """The flags after a change, sorted by name, so that equal sets are equal."""
    return tuple(sorted({**dict(present), **changes}.items()))


def flag_text(changes: Iterable[tuple[str, str]]) -> str:
    """`--tensor-parallel-size 2 --async-scheduling without --disable-radix-cache`."""
    return " ".join(_change_text(flag, value) for flag, value in changes)


def shown_flags(words: Sequence[str]) -> str:
    """Flags as one would type them; those that are taken out as `without --flag`."""
    shown = [
        f"without {word.removeprefix(REMOVE)}" if word.startswith(REMOVE) else shlex.quote(word)
        for word in words
        if word != ANY_VALUE
    ]
    return " ".join(shown)


def _change_text(flag: str, value: str) -> str:
    if flag.startswith(REMOVE):
        return f"without {flag[1:]}"
    if flag.startswith(REPLACE):
        return f"{value} in place of {flag[1:]}"
    return f"{flag} {value}".rstrip()
