"""Every flag that the imitated servers take, with how many values: the rows are in flags.toml."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import msgspec

Parser = Literal["argparse", "click", "clap", "llama.cpp"]
Takes = Literal["nothing", "one", "two", "at most one", "any number"]
"""How many values follow a flag."""

_COLUMNS: dict[str, Takes] = {
    "switches": "nothing",
    "opposites": "nothing",
    "values": "one",
    "pairs": "two",
    "optional": "at most one",
    "lists": "any number",
}


class FlagTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The flags of one server; the fields are described at the top of flags.toml."""

    name: str
    version: str
    source: str
    parser: Parser
    program: str
    usage: str
    takes: dict[str, Takes]
    root: str | None = None
    shorts: dict[str, str] = {}
    repeatable: frozenset[str] = frozenset()
    scaled: frozenset[str] = frozenset()
    removed: dict[str, str] = {}
    since: dict[str, str] = {}

    def named(self, flag: str) -> tuple[str, ...]:
        """The flags that a spelling stands for: one, none, or several if it is ambiguous.

        argparse also takes the beginning of a flag.
        """
        if flag in self.takes:
            return (self.shorts.get(flag, flag),)
        if self.parser != "argparse" or len(flag.lstrip("-")) == 0:
            return ()
        return tuple(known for known in self.takes if known.startswith(flag))

    def attached(self, word: str) -> tuple[str, str] | None:
        """`-p8080` as the flag `-p` and its value; None where a word is no such thing."""
        short, value = word[:2], word[2:]
        is_short = len(word) > 2 and word[0] == "-" != word[1] and short in self.takes
        if not is_short or self.parser == "llama.cpp" or self.takes[short] == "nothing":
            return None
        return short, value.removeprefix("=") if self.parser == "clap" else value


@cache
def flag_tables() -> dict[str, FlagTable]:
    """The tables of all servers by name."""
    text = files("ridgeline.twin.servers").joinpath("flags.toml").read_text(encoding="utf-8")
    return {name: _table(name, row) for name, row in tomllib.loads(text).items()}


def _table(name: str, row: dict[str, Any]) -> FlagTable:
    takes: dict[str, Takes] = {}
    for column, number in _COLUMNS.items():
        for flag in str(row.pop(column, "")).split():
            takes[flag] = number
            if column == "opposites":
                takes[flag.replace("--", "--no-", 1)] = number
    for column in ("repeatable", "scaled"):
        row[column] = str(row.get(column, "")).split()
    return msgspec.convert({"name": name, "takes": takes, **row}, FlagTable)
