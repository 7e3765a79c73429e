"""Flags of the engine and the server: meaning, value here, and what refers to them."""

from __future__ import annotations

from collections.abc import Mapping

from ridgeline.config.option import Option, Section, options_of
from ridgeline.config.server import ServerOptions
from ridgeline.config.settings import Settings
from ridgeline.diagnose.conditions import written
from ridgeline.diagnose.rules.rulebook import shipped_rules
from ridgeline.optimize import ladder
from ridgeline.workflows.explain.topics import technique
from ridgeline.workflows.explain.topics.base import TopicContext, TopicPage


def names() -> Mapping[str, str]:
    """Every option of the engine and the server; the dashes of the flag may be left out."""
    return {name: name for name in (*_flags(ServerOptions), *_flags(Settings))}


def page(id: str, context: TopicContext) -> TopicPage:
    """The flag, with the techniques, rungs, rules and decisions that name it."""
    flag = "--" + id.replace("_", "-")
    engine = _flags(Settings)
    own = _engine(engine[id], context) if id in engine else _server(_flags(ServerOptions)[id])
    techniques = [row for row in technique.rows().values() if _names(row["switch"], flag)]
    rungs = {rung.id for rung in ladder.load_default_ladder().rungs if id in _changed(rung)}
    rules = [rule for rule in shipped_rules() if _names(rule.flag.get("ridgeline", ""), flag)]
    lines = (
        *own,
        *(("switches", f"{row['id']}: moves {row['term']}") for row in techniques),
        *(
            (recommendation.verdict, f"{recommendation.title}: {recommendation.reason}")
            for recommendation in context.recommendations
            if recommendation.rung in rungs
        ),
        *(("fixes", f"{rule.id} ({rule.verdict}): {rule.fix}") for rule in rules),
        *(
            ("decision", f"{answer.question} {answer.why}")
            for answer in context.answers
            if flag in answer.why
        ),
    )
    return TopicPage(kind="flag", id=id, title=flag, lines=lines)


def _flags(section: type[Section]) -> dict[str, Option]:
    return {name: option for name, option in options_of(section).items() if option.has_flag}


def _engine(option: Option, context: TopicContext) -> tuple[tuple[str, str], ...]:
    value = written(option.name, context.facts) if option.name in context.facts else "not set"
    because = context.derivations.get(option.name, "default")
    return (("is", option.about.help), ("here", value), ("because", because))


def _server(option: Option) -> tuple[tuple[str, str], ...]:
    default = ("default", option.default_text)
    return (("is", option.about.help), default, ("option of", "ridgeline serve"))


def _names(text: str, flag: str) -> bool:
    """Whether the text names this flag, and not one with the same prefix."""
    no = flag.replace("--", "--[no-]", 1)
    words = text.replace(",", " ").replace("(", " ").split()
    return flag in words or no in words


def _changed(rung: ladder.Rung) -> set[str]:
    return {*rung.changes, *(name for variant in rung.variants for name in variant)}
