"""Topics that can be explained: techniques, methods of the field, metrics, flags, verdicts, words
and errors.

Each kind is a module with `names()` and `page(id, context)`. A name that two kinds share is
explained as both, but a method of the same name as a technique of Ridgeline's only as that. Spaces,
dashes, underscores and case make no difference.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import cast

from ridgeline.errors import BadInput
from ridgeline.workflows.explain.topics.base import TopicContext, TopicKind, TopicPage

REGISTRY: Mapping[str, str] = MappingProxyType(
    {
        "technique": "ridgeline.workflows.explain.topics.technique",
        "method": "ridgeline.workflows.explain.topics.method",
        "metric": "ridgeline.workflows.explain.topics.metric",
        "flag": "ridgeline.workflows.explain.topics.flag",
        "verdict": "ridgeline.workflows.explain.topics.verdict",
        "word": "ridgeline.workflows.explain.topics.word",
        "error": "ridgeline.workflows.explain.topics.error",
    }
)


def find_topics(subject: str) -> list[tuple[str, str]]:
    """(kind, id) of every topic of this name; of the singular, if a plural has none."""
    name = normalise(subject)
    matches = _named(name)
    return matches or (_named(name[:-1]) if name.endswith("s") else [])


def _named(name: str) -> list[tuple[str, str]]:
    """The topics that are spelt like this, or but for the spaces."""
    for spelt in (name, name.replace(" ", "")):
        found = {kind: id for kind in REGISTRY if (id := _spellings(kind).get(spelt)) is not None}
        if "technique" in found:
            found.pop("method", None)
        if found:
            return list(found.items())
    return []


@cache
def _spellings(kind: str) -> Mapping[str, str]:
    names = {normalise(name): id for name, id in topic_kind(kind).names().items()}
    return {name.replace(" ", ""): id for name, id in names.items()} | names


def topic_page(kind: str, id: str, context: TopicContext) -> TopicPage:
    """The explanation."""
    return topic_kind(kind).page(id, context)


def unknown_topic(subject: str) -> BadInput:
    """The error for an unknown subject, with the closest names."""
    kinds = reversed([*REGISTRY])  # of two spellings of a name, that of the first kind is shown
    names = {normalise(name): name for kind in kinds for name in topic_kind(kind).names()}
    close = difflib.get_close_matches(normalise(subject), names, n=3, cutoff=0.6)
    hint = f"did you mean {', '.join(names[name] for name in close)}? " if close else ""
    return BadInput(
        "there is no model or topic of this name",
        value=subject,
        limit="a model, technique, metric, flag, verdict, error, symptom or word that is printed",
        fix=f"{hint}`ridgeline explain topics` lists them",
    )


def topic_kind(kind: str) -> TopicKind:
    """The module of a kind."""
    return cast(TopicKind, import_module(REGISTRY[kind]))


def normalise(text: str) -> str:
    """The canonical spelling of a name."""
    return " ".join(text.lower().replace("_", " ").replace("-", " ").split())


def all_topics() -> dict[str, list[str]]:
    """Ids of all topics by kind."""
    return {kind: sorted(set(topic_kind(kind).names().values())) for kind in REGISTRY}
