"""What an explanation is, and what the finders of one know of the place it is given in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Protocol

import msgspec

from ridgeline.diagnose.conditions import Value
from ridgeline.diagnose.rules.decisions import Answered, walk
from ridgeline.workflows.explain.recommendations import Recommendation


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """An explanation: labelled lines. An empty line is left out."""

    kind: str
    id: str
    title: str
    lines: tuple[tuple[str, str], ...]


class Known:
    """The model, machine and workload that an explanation is applied to; each part on demand."""

    def __init__(
        self,
        facts: Callable[[], Mapping[str, Value]],
        told: Callable[[], list[Recommendation]],
        derivations: Callable[[], Mapping[str, str]],
    ) -> None:
        self._facts, self._told, self._derivations = facts, told, derivations

    @cached_property
    def facts(self) -> Mapping[str, Value]:
        """By name; see ridgeline/workflows/explain/static_bounds.py."""
        return self._facts()

    @cached_property
    def walked(self) -> tuple[Answered, ...]:
        """The decision flowchart's answers."""
        return tuple(walk(self.facts))

    @cached_property
    def told(self) -> list[Recommendation]:
        """Every rung of the ladder, judged by arithmetic."""
        return self._told()

    @cached_property
    def derivations(self) -> Mapping[str, str]:
        """Where each setting's value comes from."""
        return self._derivations()


class Topics(Protocol):
    """One kind of subject, a module."""

    def names(self) -> Mapping[str, str]:
        """Every spelling → id, in lower case."""

    def page(self, id: str, known: Known) -> Page:
        """The explanation of `id`."""
