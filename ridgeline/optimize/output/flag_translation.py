"""A server's flags in the words of another server, as far as both have them (equal_flags.toml)."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files

from ridgeline.errors import DECODE_ERRORS
from ridgeline.optimize.external.drafter_rungs import drafter_table
from ridgeline.optimize.server_settings import REMOVE

Templates = Mapping[str, str]
"""Flag → value with placeholders, "" for a switch."""
_PLACEHOLDER = re.compile(r"\{(number|num|rows|model|tp)\}")
_PATTERNS = {"number": r"\d+", "num": r"\d+", "rows": r"\d+", "tp": r"\d+", "model": r"[^\"]+"}


@cache
def equal_flags() -> tuple[Mapping[str, Templates], ...]:
    """Every change that several servers have: server → its flags. Larger ones come first."""
    path = files("ridgeline.optimize.output") / "equal_flags.toml"
    rows = tomllib.loads(path.read_text(encoding="utf-8"))["equal"]
    methods: dict[str, dict[str, Templates]] = {}
    for server, table in drafter_table().servers.items():
        for method, templates in table.items():
            methods.setdefault(method, {})[server] = templates
    every = [*rows, *methods.values()]
    return tuple(sorted(every, key=lambda row: -max(map(len, row.values()))))


def translate_flags(
    flags: Sequence[tuple[str, str]], server: str, other: str, tp: int | None
) -> tuple[list[str], list[tuple[str, str]]]:
    """The words of the `other` server for a `server`'s flags, and the flags that it has none for.

    `tp`: the tensor-parallel size, if that is all the parallelism there is. A flag that was taken
    back is not translated: the other server does not have it either.
    """
    left = {flag: value for flag, value in flags if not flag.startswith(REMOVE)}
    words: list[str] = []
    for row in equal_flags():
        own, theirs = row.get(server), row.get(other)
        if not own or theirs is None:
            continue
        values = _values_of(own, left)
        filled = None if values is None else _fill(theirs, values, tp)
        if filled is None:
            continue
        left = {flag: value for flag, value in left.items() if flag not in own}
        words += filled
    return words, list(left.items())


def lookup_words(other: str, num: int) -> list[str] | None:
    """The flags of a server for n-gram speculation with `num` drafts; None if it has none."""
    for row in equal_flags():
        if '"ngram"' in row.get("vllm", {}).get("--speculative-config", "") and other in row:
            return _fill(row[other], {"num": str(num)}, None)
    return None


def _values_of(templates: Templates, flags: Mapping[str, str]) -> dict[str, str] | None:
    """What the placeholders stand for, if the flags are those of the templates."""
    found: dict[str, str] = {}
    for flag, template in templates.items():
        if flag not in flags:
            return None
        match = _pattern(template).fullmatch(_compact(flags[flag]))
        if match is None:
            return None
        found |= match.groupdict()
    return found


def _fill(templates: Templates, values: Mapping[str, str], tp: int | None) -> list[str] | None:
    """The words; None where a placeholder has no value."""
    known = dict(values)
    known.pop("tp", None)
    if tp is not None and tp > 1:
        known["tp"] = str(tp)
    if "num" in known:
        known["rows"] = str(int(known["num"]) + 1)
    words: list[str] = []
    for flag, template in templates.items():
        if any(name not in known for name in _PLACEHOLDER.findall(template)):
            return None
        value = _PLACEHOLDER.sub(lambda match: known[match[1]], template)
        words += [flag, value] if value else [flag]
    return words


@cache
def _pattern(template: str) -> re.Pattern[str]:
    parts = _PLACEHOLDER.split(template)  # text, name, text, …
    texts = [re.escape(part) for part in parts[::2]]
    names = [f"(?P<{name}>{_PATTERNS[name]})" for name in parts[1::2]]
    return re.compile("".join(a + b for a, b in zip(texts, [*names, ""], strict=True)))


def _compact(value: str) -> str:
    """A JSON object without blanks; any other value as it is."""
    if not value.startswith("{"):
        return value
    try:
        return json.dumps(json.loads(value), separators=(",", ":"))
    except DECODE_ERRORS:
        return value
