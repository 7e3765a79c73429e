"""The decision flowchart, evaluated for one model, machine and workload.

The questions are in decisions.toml. They are answered from *bounds*: the minimum time that bytes
and FLOPs allow. A "no" is therefore final, while a "yes" only means that no bound rules it out; a
measurement has to confirm it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.resources import files

import msgspec

from ridgeline.diagnose.conditions import Facts, all_hold, fill, parse


class Decision(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row of decisions.toml.

    The answer is yes if all conditions of `when` hold. `yes`, `no` and `open` are the texts for
    each answer; `yes_try` and `no_try` name techniques; `yes_next` and `no_next` the next question,
    if it is not the following row.
    """

    id: str
    question: str
    when: tuple[str, ...]
    yes: str
    no: str
    open: str = ""
    yes_try: tuple[str, ...] = ()
    no_try: tuple[str, ...] = ()
    yes_next: str | None = None
    no_next: str | None = None

    def answered(self, facts: Facts) -> DecisionAnswer:
        """Answer the question with these facts."""
        conditions = tuple(map(parse, self.when))
        holds = all_hold(conditions, facts)
        if holds is None:
            missing = "; ".join(condition.explain(facts) for condition in conditions)
            why = fill(self.open, facts) or missing
            return DecisionAnswer(id=self.id, question=self.question, answer=None, why=why)
        return DecisionAnswer(
            id=self.id,
            question=self.question,
            answer=holds,
            why=fill(self.yes if holds else self.no, facts),
            techniques=self.yes_try if holds else self.no_try,
        )


class DecisionAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a question. `answer`: None if a fact is missing. `techniques`: what to try."""

    id: str
    question: str
    answer: bool | None
    why: str
    techniques: tuple[str, ...] = ()


@cache
def shipped_decisions() -> tuple[Decision, ...]:
    """The flowchart of this package."""
    text = files("ridgeline.diagnose.rules").joinpath("decisions.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text)["decision"], tuple[Decision, ...])


def walk(facts: Facts, decisions: tuple[Decision, ...] | None = None) -> Iterator[DecisionAnswer]:
    """Answer the questions in the order of the flowchart. An open one continues like a yes."""
    rows = shipped_decisions() if decisions is None else decisions
    place = {row.id: index for index, row in enumerate(rows)}
    at = 0
    while at < len(rows):
        row = rows[at]
        result = row.answered(facts)
        yield result
        next_id = row.no_next if result.answer is False else row.yes_next
        at = place[next_id] if next_id else at + 1
