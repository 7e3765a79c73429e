"""`ridgeline explain TECHNIQUE|METRIC|FLAG|VERDICT|ERROR`: what it is, and what it is *here*.

kind → module with `names()` and `page(id, known)` (base.py). A name that two kinds have is
explained as both; spaces, dashes and underscores are one, and case is none.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import cast

from ridgeline.errors import BadInput
from ridgeline.workflows.explain.topics.base import Known, Page, Topics

REGISTRY: Mapping[str, str] = MappingProxyType(
    {
        "technique": "ridgeline.workflows.explain.topics.technique",
        "metric": "ridgeline.workflows.explain.topics.metric",
        "flag": "ridgeline.workflows.explain.topics.flag",
        "verdict": "ridgeline.workflows.explain.topics.verdict",
        "error": "ridgeline.workflows.explain.topics.error",
    }
)


def find(subject: str) -> list[tuple[str, str]]:
    """(kind, id) of all that may be meant."""
    found = [(kind, _spellings(kind).get(spelt(subject))) for kind in REGISTRY]
    return [(kind, id) for kind, id in found if id is not None]


@cache
def _spellings(kind: str) -> Mapping[str, str]:
    return {spelt(name): id for name, id in topics(kind).names().items()}


def page(kind: str, id: str, known: Known) -> Page:
    """The explanation."""
    return topics(kind).page(id, known)


def unknown(subject: str) -> BadInput:
    """What to say of a subject that is none, with the names nearest to it."""
    names = {spelt(name): name for kind in REGISTRY for name in topics(kind).names()}
    near = difflib.get_close_matches(spelt(subject), names, n=3, cutoff=0.6)
    meant = f"did you mean {', '.join(names[each] for each in near)}? " if near else ""
    return BadInput(
        "nothing is known under this name",
        value=subject,
        limit="a model, technique, metric, flag, verdict or error",
        fix=f"{meant}`ridgeline explain topics` lists all",
    )


def topics(kind: str) -> Topics:
    """The module of a kind."""
    return cast(Topics, import_module(REGISTRY[kind]))


def spelt(text: str) -> str:
    """One spelling of a name."""
    return " ".join(text.lower().replace("_", " ").replace("-", " ").split())
