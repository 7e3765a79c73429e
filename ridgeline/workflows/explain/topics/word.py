"""Words that Ridgeline prints: the glossary, outcomes, symptoms, and other names of techniques."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

import msgspec

from ridgeline.diagnose.rules.rulebook import Rule, shipped_rules
from ridgeline.workflows.explain.topics.base import TopicContext, TopicPage


class Word(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row of words.toml. `rules`: the rules of the rule book that a symptom may come from."""

    title: str
    says: str
    also: tuple[str, ...] = ()
    glossary: bool = False
    rules: tuple[str, ...] = ()
    see: tuple[str, ...] = ()


@cache
def rows() -> Mapping[str, Word]:
    """The rows by title."""
    text = (
        files("ridgeline.workflows.explain.topics")
        .joinpath("words.toml")
        .read_text(encoding="utf-8")
    )
    words = msgspec.convert(tomllib.loads(text)["word"], tuple[Word, ...])
    return {word.title: word for word in words}


def names() -> Mapping[str, str]:
    """Titles and other names."""
    return {name: word.title for word in rows().values() for name in (word.title, *word.also)}


def page(id: str, context: TopicContext) -> TopicPage:
    """What the word means, and the rules that a symptom may come from."""
    word = rows()[id]
    by_id = {rule.id: rule for rule in shipped_rules()}
    lines = (
        ("means", word.says),
        *((f"{number}. cause", _cause(by_id[id])) for number, id in enumerate(word.rules, 1)),
        ("see", ", ".join(word.see)),
    )
    return TopicPage(kind="word", id=id, title=word.title, lines=lines)


def _cause(rule: Rule) -> str:
    return f"{rule.id} ({rule.verdict}): {rule.fix}"
