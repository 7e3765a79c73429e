"""Playbooks: what to tune for, which rungs to try first, and the checklist at the end, as data."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files

import msgspec

from ridgeline.errors import BadInput
from ridgeline.optimize.comparison.objective import Objective


class Playbook(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One playbook; playbooks.toml describes the fields."""

    goal: str
    workload: str
    slo: str
    objective: Objective
    first: tuple[str, ...]


class PlaybookCheck(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of the checklist: what to verify, and the command with its placeholders."""

    group: str
    what: str
    command: str

    def line(self, values: Mapping[str, str]) -> str:
        """The command, ready to run, and what it is for."""
        command = self.command
        for name, value in values.items():
            command = command.replace(f"{{{name}}}", value)
        return f"{command}      # {self.group}: {self.what}"


class _Document(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    playbook: dict[str, Playbook]
    check: tuple[PlaybookCheck, ...]


@cache
def _document() -> _Document:
    text = files("ridgeline.optimize").joinpath("playbooks.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), _Document)


def playbooks() -> Mapping[str, Playbook]:
    """Every playbook by name."""
    return _document().playbook


def playbook_checks() -> Sequence[PlaybookCheck]:
    """The checklist, before and after, of every playbook."""
    return _document().check


def find_playbook(name: str) -> Playbook:
    """The playbook of that name. Raises BadInput."""
    if name not in playbooks():
        raise BadInput("no playbook has this name", value=name, limit=", ".join(playbooks()))
    return playbooks()[name]


def place_of(rung: str, first: Sequence[str]) -> int:
    """The place of a rung in a playbook's order; the length of the order for any other."""
    for place, name in enumerate(first):
        if rung == name or rung.endswith(f"-{name}"):
            return place
    return len(first)
