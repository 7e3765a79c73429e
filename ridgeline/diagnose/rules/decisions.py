"""The decision flowchart, walked with the numbers of one model, machine and workload.

decisions.toml holds the questions. Each is answered by arithmetic alone, from *bounds*: the least
time that bytes and FLOPs leave. A "no" of a bound is therefore final; a "yes" says only that
nothing forbids it, and measuring has the last word.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.resources import files

import msgspec

from ridgeline.diagnose.conditions import Facts, all_hold, fill, parse


class Decision(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row of decisions.toml; see its head."""

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

    def answered(self, facts: Facts) -> Answered:
        """With these facts."""
        conditions = tuple(map(parse, self.when))
        holds = all_hold(conditions, facts)
        if holds is None:
            missing = "; ".join(each.explain(facts) for each in conditions)
            why = fill(self.open, facts) or missing
            return Answered(id=self.id, question=self.question, answer=None, why=why)
        return Answered(
            id=self.id,
            question=self.question,
            answer=holds,
            why=fill(self.yes if holds else self.no, facts),
            techniques=self.yes_try if holds else self.no_try,
        )


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """A question on the way: yes, no or (a fact is missing) open; `techniques` it speaks for."""

    id: str
    question: str
    answer: bool | None
    why: str
    techniques: tuple[str, ...] = ()


@cache
def shipped_decisions() -> tuple[Decision, ...]:
    """The questions of this package."""
    text = files("ridgeline.diagnose.rules").joinpath("decisions.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text)["decision"], tuple[Decision, ...])


def walk(facts: Facts, decisions: tuple[Decision, ...] | None = None) -> Iterator[Answered]:
    """The questions that are met, first to last. An open one is passed over like a yes."""
    rows = shipped_decisions() if decisions is None else decisions
    place = {row.id: index for index, row in enumerate(rows)}
    at = 0
    while at < len(rows):
        row = rows[at]
        found = row.answered(facts)
        yield found
        onward = row.no_next if found.answer is False else row.yes_next
        at = place[onward] if onward else at + 1
