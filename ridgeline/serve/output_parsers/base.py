"""Parts of an answer, and what every reader of a model's dialect promises.

Invariants, in words
- A reader is fed an answer's text piece by piece, in any pieces, and `end` once. The parts that
  come out are the same however the text was cut, apart from where texts are split.
- Nothing is lost: what turns out not to be a call comes out as content, as it was written. (Of
  blanks next to calls only those between texts: the others are the format's.)
- A call comes out once it is complete; its arguments are JSON text of an object.
- A reader never raises, and never runs, fetches or evaluates what it reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec


class Content(msgspec.Struct, frozen=True):
    """Text for the user."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """Text the model wrote to itself."""

    text: str


class Call(msgspec.Struct, frozen=True):
    """One whole call of a tool. `arguments`: JSON text."""

    name: str
    arguments: str


Part = Content | Reasoning | Call
Schemas = Mapping[str, Mapping[str, Any]]
"""Parameters of every tool that may be called, by its name."""


class Reader(Protocol):
    """Text to parts; one object per answer."""

    def feed(self, text: str) -> list[Part]: ...

    def end(self) -> list[Part]: ...


class CallFormat(Protocol):
    """A way of writing calls."""

    def reader(self, tools: Schemas) -> Reader: ...


class Plain:
    """An answer that is text and nothing else."""

    def feed(self, text: str) -> list[Part]:
        return [Content(text)] if text else []

    def end(self) -> list[Part]:
        return []


class Named:
    """An answer that is the arguments of one call, by its grammar."""

    def __init__(self, name: str) -> None:
        self._name, self._text = name, ""

    def feed(self, text: str) -> list[Part]:
        self._text += text
        return []

    def end(self) -> list[Part]:
        return [Call(self._name, self._text)]


class Listed:
    """An answer that is a JSON list of calls, by its grammar; cut short, it is content."""

    def __init__(self) -> None:
        self._text = ""

    def feed(self, text: str) -> list[Part]:
        self._text += text
        return []

    def end(self) -> list[Part]:
        calls = calls_in(self._text)
        return [*calls] if calls else [Content(self._text)] if self._text else []


def calls_in(text: str) -> list[Call]:
    """The calls that a JSON object or list of them holds; none where it is anything else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return []
    calls = [call_of(each) for each in (found if isinstance(found, list) else [found])]
    return [call for call in calls if call is not None] if all(calls) else []


def call_of(found: object) -> Call | None:
    """`{"name": …, "arguments" or "parameters": {…}}` as a call."""
    if not isinstance(found, dict) or not isinstance(found.get("name"), str) or not found["name"]:
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, dict):
        return None
    return Call(found["name"], json.dumps(arguments, ensure_ascii=False))


def held_back(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of `text` that may be the beginning of a marker."""
    longest = max(map(len, markers)) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-size:]) for marker in markers):
            return size
    return 0
