"""A page that explains a topic, and the context that it is explained in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Protocol

import msgspec

from ridgeline.diagnose.conditions import Value
from ridgeline.diagnose.rules.decisions import DecisionAnswer, walk
from ridgeline.workflows.explain.recommendations import Recommendation


class TopicPage(msgspec.Struct, frozen=True, kw_only=True):
    """An explanation as labelled lines; empty lines are not shown."""

    kind: str
    id: str
    title: str
    lines: tuple[tuple[str, str], ...]


class TopicContext:
    """The model, machine and workload that a topic is explained for; computed on demand."""

    def __init__(
        self,
        facts: Callable[[], Mapping[str, Value]],
        recommendations: Callable[[], list[Recommendation]],
        derivations: Callable[[], Mapping[str, str]],
    ) -> None:
        self._facts, self._recommendations = facts, recommendations
        self._derivations = derivations

    @cached_property
    def facts(self) -> Mapping[str, Value]:
        """Facts by name, as in `static_facts`."""
        return self._facts()

    @cached_property
    def answers(self) -> tuple[DecisionAnswer, ...]:
        """The answers of the decision flowchart."""
        return tuple(walk(self.facts))

    @cached_property
    def recommendations(self) -> list[Recommendation]:
        """Every rung of the ladder, judged by arithmetic."""
        return self._recommendations()

    @cached_property
    def derivations(self) -> Mapping[str, str]:
        """Where each setting's value comes from."""
        return self._derivations()


class TopicKind(Protocol):
    """One kind of topic, a module."""

    def names(self) -> Mapping[str, str]:
        """Every spelling → id, in lower case."""

    def page(self, id: str, context: TopicContext) -> TopicPage:
        """The explanation of `id`."""
