"""Splits the command line of another server into its flags as that server's own parser does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

import msgspec

from ridgeline.config.units import parse_count
from ridgeline.errors import DECODE_ERRORS
from ridgeline.twin.servers import refusal
from ridgeline.twin.servers.flag_numbers import read_number
from ridgeline.twin.servers.flag_table import FlagTable

_NEGATIVE = re.compile(r"-\d+|-\d*\.\d+")
_LEVEL = re.compile(r"-O=?(\w+)")
_DEEPEST = 32


class Given(msgspec.Struct, frozen=True):
    """A flag of a command line in the server's spelling, with its values; "" before other words."""

    flag: str
    values: tuple[str, ...] = ()


class SplitWords(msgspec.Struct, frozen=True):
    """`given`: what the server understands. `unrecognized`: words that it would refuse."""

    given: tuple[Given, ...]
    unrecognized: tuple[str, ...]


def split_words(table: FlagTable, words: Sequence[str]) -> SplitWords:
    """The flags of the words. Raises CommandRefused for a known flag that is used wrongly.

    A word after an unknown flag is taken as its value, and words after `--` as none of a flag.
    """
    rest = _respelt(table, words)
    given: list[Given] = []
    unrecognized: list[str] = []
    while rest:
        word = rest.pop(0)
        if word == "--" and table.parser != "llama.cpp":
            given += [Given("", (word,)) for word in rest]
            break
        if not _is_flag(table, word):
            given.append(Given("", (word,)))
            continue
        flag, value = _split_word(table, word)
        found = table.named(flag)
        if len(found) > 1:
            raise refusal.ambiguous(table, flag, found)
        if not found:
            unrecognized.append(word)
            if value is None and rest and not _is_flag(table, rest[0]):
                unrecognized.append(rest.pop(0))
            continue
        is_again = any(known.flag == found[0] for known in given)
        if is_again and table.parser == "clap" and found[0] not in table.repeatable:
            raise refusal.given_twice(table, found[0])
        given.append(Given(found[0], _take_values(table, found[0], value, rest)))
    return SplitWords(tuple(given), tuple(unrecognized))


def _is_flag(table: FlagTable, word: str) -> bool:
    if not word.startswith("-") or word == "-":
        return False
    if table.parser == "argparse" and " " in word and not table.named(_split_word(table, word)[0]):
        return False
    return table.parser == "llama.cpp" or _NEGATIVE.fullmatch(word) is None


def _split_word(table: FlagTable, word: str) -> tuple[str, str | None]:
    """The flag and the value in the same word; llama.cpp knows no such form."""
    if word in table.takes or table.parser == "llama.cpp":
        return word, None
    flag, equals, value = word.partition("=")
    if equals and table.named(flag):
        return flag, value
    attached = table.attached(word)
    if attached is not None:
        return attached
    return (flag, value) if equals else (word, None)


def _take_values(
    table: FlagTable, flag: str, value: str | None, rest: list[str]
) -> tuple[str, ...]:
    """The values of a flag, removed from the rest. Raises CommandRefused."""
    takes = table.takes[flag]
    if takes == "nothing":
        if value is not None:
            raise refusal.with_value(table, flag, value)
        return ()
    if value is not None:
        return (value,)
    wanted = {"one": 1, "two": 2, "at most one": 1}.get(takes, len(rest))
    blindly = table.parser in ("click", "llama.cpp")
    values: list[str] = []
    while rest and len(values) < wanted and (blindly or not _is_flag(table, rest[0])):
        values.append(rest.pop(0))
    least = {"at most one": 0, "two": 2}.get(takes, 1)
    if len(values) < least:
        raise refusal.without_value(table, flag)
    if flag in table.removed:
        read_number(table, flag, values[0], is_float=False)
        raise refusal.removed(table, flag)
    return tuple(values)


# ---- spellings -----------------------------------------------------------------------------------


def _respelt(table: FlagTable, words: Sequence[str]) -> list[str]:
    """The words after what a server does to them before it parses them."""
    if table.name == "vllm":
        return list(_joined(_of_vllm(words)))
    if table.name == "llama-server":
        return [word.replace("_", "-") if word.startswith("--") else word for word in words]
    return list(words)


def _of_vllm(words: Sequence[str]) -> Iterable[str]:
    """Dashes for underscores in the names of flags, and `-O3` as --optimization-level 3."""
    for word, following in zip_longest(words, words[1:]):
        level = _LEVEL.fullmatch(word)
        if level:
            yield from ("--optimization-level", level[1])
        elif word == "-O" and following in ("0", "1", "2", "3"):
            yield "--optimization-level"
        elif word.startswith("--"):
            name, equals, value = word.partition("=")
            head, dot, keys = name.partition(".")
            yield head.replace("_", "-") + dot + keys + equals + value
        else:
            yield word


def _joined(words: Iterable[str]) -> Iterable[str]:
    """`--config.key.inner value` as `--config '{"key": {"inner": value}}'`, after the others."""
    documents: dict[str, dict[str, Any]] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if not name.startswith("-") or "." not in name or _NEGATIVE.fullmatch(name):
            yield word
            continue
        if not equals:
            value = rest.pop(0) if rest else ""
        flag, *keys = name.removesuffix("+").split(".", _DEEPEST)
        inner: Any = value.split(",") if name.endswith("+") else _scalar(value)
        for key in reversed(keys):
            inner = {key: inner}
        _merge(documents.setdefault(flag, {}), inner)
    for flag, document in documents.items():
        yield from (flag, json.dumps(document))


def _scalar(text: str) -> Any:
    for read in (json.loads, parse_count):
        try:
            return read(text)
        except DECODE_ERRORS:
            continue
    return text


def _merge(document: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        known = document.get(key)
        if isinstance(known, dict) and isinstance(value, dict):
            _merge(known, value)
        elif isinstance(known, list) and isinstance(value, list):
            known += value
        else:
            document[key] = value
