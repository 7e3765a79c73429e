"""How each server spells the ladder's settings; the rows are in server_flags.toml.

The search changes the same named settings on an external server as on this engine. A rung whose
setting has no flag on the server is left out, with that reason.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.resources import files
from pathlib import PurePath
from typing import Any

import msgspec

from ridgeline.config.settings import MAX_DRAFT_TOKENS, Settings, Speculative
from ridgeline.config.units import parse_count
from ridgeline.errors import DECODE_ERRORS, BadInput, CannotRun
from ridgeline.optimize.server_settings import REMOVE, REPLACE, flags_of

DEPTH = "{num_speculative_tokens}"
"""Where a flag of server_flags.toml takes the number of draft tokens."""

_WORD = re.compile(r"""(?:[^\s'"\\]|\\.|'[^']*'|"(?:\\.|[^"\\])*"|['"\\])+""", re.DOTALL)
"""A word of a shell command with its quotes; one that does not end is read as a character."""
_FLAG = re.compile(r"--?[\w-]+")
NOTHING = "none"
"""Key of server_flags.toml for a setting that is taken back."""


class ServerFlags(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The flags of one server; the fields are described at the top of server_flags.toml."""

    name: str
    programs: tuple[str, ...]
    defaults: dict[str, Any]
    flags: dict[str, str | dict[str, str]]
    reads: dict[str, str] = {}
    restores: dict[str, str] = {}
    compile_cache: dict[str, str] = {}
    aliases: dict[str, str] = {}
    draft_tokens: int | None = None
    underscores: bool = False

    def spell_out(self, command: str) -> str:
        """The command line with the flags after the program's name in their long spelling.

        `-tp 8`, `-np=1` and `--max_num_seqs` become the flags that the ladder changes; other words
        stay.
        """
        place = min(
            (
                found.end()
                for name in {*self.programs, self.name}
                if (found := _program(name).search(command))
            ),
            default=len(command),
        )
        return command[:place] + _WORD.sub(lambda word: self._long(word[0]), command[place:])

    def _long(self, word: str) -> str:
        """A word of the command line with a flag in its long spelling."""
        found = _FLAG.match(word)
        if found is None or word[found.end() :][:1] not in ("", "=", "."):
            return word
        flag = found[0]
        if self.underscores and flag.startswith("--"):
            flag = flag.replace("_", "-")
        return self.aliases.get(flag, flag) + word[found.end() :]

    def given(self, command: str) -> dict[str, object]:
        """Settings already on a command line, read back from the server's flags."""
        words = shlex.split(command)
        compact = [_compact(word) for word in words]
        settings: dict[str, object] = {}
        for name, flag in self.flags.items():
            if isinstance(flag, str):
                number = _number(_after(words, flag.split()[0]))
                if number is not None and number > 0:  # -1 switches something off
                    settings[name] = number
                continue
            for value, text in flag.items():
                if value == NOTHING:
                    continue
                for depth in range(1, MAX_DRAFT_TOKENS + 1) if DEPTH in text else (None,):
                    filled = text if depth is None else text.replace(DEPTH, str(depth))
                    if filled and _contains(compact, shlex.split(filled)):
                        settings[name] = _setting(name, value, depth)
        return settings

    def words(self, settings: Settings, start: Settings) -> list[str]:
        """The flags that turn the server's `start` settings into `settings`.

        Raises CannotRun, naming the setting, if the server has no flag for it.
        """
        differing = [
            name
            for name in Settings.__struct_fields__
            if getattr(settings, name) != getattr(start, name)
        ]
        words = [
            word
            for name in differing
            for word in shlex.split(self._flag(name, getattr(settings, name)))
        ]
        present = flags_of(start)
        for flag, value in flags_of(settings):
            if (flag, value) not in present:
                words += [flag, value] if value else [flag]
        return _last_of_each(words)

    def own_flags(self, command: str, known: Iterable[str]) -> tuple[tuple[str, str], ...]:
        """The `known` flags that a command line has, with their values ("" for a switch)."""
        words = shlex.split(command)
        found: dict[str, str] = {}
        for flag in known:
            if flag in words or any(word.startswith(f"{flag}=") for word in words):
                value = _after(words, flag) or ""
                found[flag] = "" if value.startswith(("-", "{flags}")) else value
        return tuple(sorted(found.items()))

    def restored(self, command: str) -> dict[str, str]:
        """The flags that undo, with the server's defaults, what a command line switches off."""
        words = shlex.split(command)
        found = {}
        for flag, opposite in self.restores.items():
            if flag in words or any(word.startswith(f"{flag}=") for word in words):
                name, _, value = opposite.partition(" ")
                found[name] = value
        return found

    def _flag(self, name: str, value: object) -> str:
        flag = self.flags.get(name)
        if isinstance(flag, dict):
            flag = flag.get(NOTHING if value is None else _key(value))
            if isinstance(value, Speculative) and flag is not None:
                depth = value.num_speculative_tokens or self.draft_tokens
                flag = flag.replace(DEPTH, str(depth))
        if flag is None or (value is None and not isinstance(self.flags[name], dict)):
            raise CannotRun(
                f"{self.name} has no flag for this setting",
                value=f"{name}={_key(value)}",
                limit=", ".join(sorted(self.flags)),
            )
        return flag.replace("{value}", str(value))


def _program(name: str) -> re.Pattern[str]:
    """A program as a word of a command line, or the last part of its path."""
    return re.compile(rf"(?<![\w.-]){re.escape(name)}(?=\s|$)")


def spell_out(command: str, server: str | None) -> str:
    """The command line with long flags, if it is that of a known server."""
    try:
        return server_flags_for(command, server).spell_out(command)
    except BadInput:
        return command


def _compact(word: str) -> str:
    """A JSON object without spaces and in the order of its keys; any other word as it is."""
    if not word.startswith("{"):
        return word
    try:
        return json.dumps(json.loads(word), sort_keys=True, separators=(",", ":"))
    except DECODE_ERRORS:
        return word


def _last_of_each(words: list[str]) -> list[str]:
    """The words without the earlier ones of a flag that two settings give."""
    groups: dict[str, list[str]] = {}
    for word in words:
        if word.startswith(("--", REMOVE, REPLACE)) or not groups:
            groups.pop(word, None)
            groups[word] = []
        else:
            groups[next(reversed(groups))].append(word)
    return [word for flag, values in groups.items() for word in (flag, *values)]


def _key(value: object) -> str:
    """How server_flags.toml spells a value; for speculation, its method."""
    if isinstance(value, Speculative):
        return value.method
    return str(value).lower() if isinstance(value, bool) else str(value)


def _setting(name: str, key: str, num_drafts: int | None) -> object:
    """The setting value that a key of server_flags.toml stands for."""
    if name == "speculative_config":
        return {"method": key, "num_speculative_tokens": num_drafts}
    return {"true": True, "false": False}.get(key, key)


def load_server_flags() -> dict[str, ServerFlags]:
    """Flags of every known server, by name."""
    path = files("ridgeline.optimize.external") / "server_flags.toml"
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    return {
        name: msgspec.convert({"name": name, **row}, ServerFlags) for name, row in document.items()
    }


def server_flags_for(command: str, name: str | None = None) -> ServerFlags:
    """The server of that name, or the one whose program the command line runs."""
    known = load_server_flags()
    if name is not None:
        if name not in known:
            raise BadInput("unknown server", value=name, limit=", ".join(known))
        return known[name]
    names = [PurePath(word).name for word in shlex.split(command)]
    # `ridgeline twin vllm serve …` takes vLLM's flags; twins also go by short names, as `tgi`.
    twins = [i for i in range(len(names) - 1) if names[i : i + 2] == ["ridgeline", "twin"]]
    words = set(names[twins[0] + 2 :] if twins else names)
    for dialect in known.values():
        if words & {*dialect.programs, *([dialect.name] if twins else [])}:
            return dialect
    raise BadInput(
        "the command line does not name a known server",
        value=command,
        limit=", ".join(known),
        fix="name it with --server",
    )


def _after(words: list[str], flag: str) -> str | None:
    """The value of a flag on a command line (`--flag value` or `--flag=value`); the last one
    counts.
    """
    pairs = zip(words, [*words[1:], ""], strict=True)
    values = [following for word, following in pairs if word == flag]
    values += [word.partition("=")[2] for word in words if word.startswith(f"{flag}=")]
    return values[-1] if values else None


def _number(text: str | None) -> int | float | None:
    """The number, also as `8k` of vLLM; None for any other text."""
    if text is None:
        return None
    readers: tuple[Callable[[str], int | float], ...] = (int, float, parse_count)
    for read in readers:
        with suppress(ValueError):
            return read(text)
    return None


def _contains(words: list[str], part: list[str]) -> bool:
    """Whether compact words have the others in this order; their JSON may be spaced otherwise."""
    part = [_compact(word) for word in part]
    return any(words[i : i + len(part)] == part for i in range(len(words)))
