"""Recall from long contexts: what a smaller KV cache loses first, and short windows cannot show.

Prose with two facts in it, and a question with one right answer:

  needle       for one fact, at the end of the prompt
  second turn  for the other fact; the first question and its answer are part of the prompt
  later        for one fact, in the output that the model has written already: what chose keys and
               values at the end of the prompt has not seen the question

A fact's depth is spread evenly over the context, and the contexts have several lengths. An answer
counts if the greedy output begins with it. Answers of both models are paired by question. A kind of
which the original answers less than half cannot show a loss and does not count; if none counts and
recall is `required`, the verdict is inconclusive.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Protocol

import msgspec

from ridgeline.optimize.quality.task_questions import TaskScore, change_of_right_answers
from ridgeline.optimize.quality.thresholds import (
    PanelSize,
    QualityLimits,
    ThresholdCheck,
    check_min,
)
from ridgeline.stats import UNBOUNDED, Interval

KINDS = ("needle", "second turn", "later")
MASTERED = 0.5  # share of right answers above which the original can show a loss
ANSWER_TOKENS = 6
GOLDEN = 0.6180339887  # multiples of it, modulo 1, spread evenly from the first on
PLACES = ("harbour", "castle", "library", "station", "garden", "bridge", "museum", "market")
COLOURS = ("blue", "green", "silver", "purple", "golden", "scarlet", "white", "black")

Fact = tuple[str, str, int]  # place, colour, number


class RecallQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt, what the model has written after it, and the number that comes next.

    `length`: characters of the context. `depth`: where in it the fact stands, from 0 to 1.
    """

    kind: str
    length: int
    depth: float
    prompt: str
    written: str
    answer: str


class RecallSource(Protocol):
    """A model that answers with its KV cache as configured."""

    @property
    def continues_output(self) -> bool:
        """Whether it can be given the beginning of its output."""
        ...

    def complete(self, prompt: str, written: str, max_tokens: int) -> str:
        """The greedy output after `written`, which is empty unless it `continues_output`."""
        ...


class RecallTexts(msgspec.Struct, frozen=True):
    """Where questions come from: a long text, and the lengths of contexts in characters."""

    filler: str
    lengths: tuple[int, ...]

    def question(self, kind: str, index: int) -> RecallQuestion:
        """The same question on every call; the kinds ask for the same facts in the same context."""
        rng = random.Random(f"recall/{index}")
        length = self.lengths[index % len(self.lengths)]
        start = rng.randrange(max(1, len(self.filler) - length))
        prose = self.filler[start : start + length]
        places, colours = rng.sample(PLACES, 2), rng.sample(COLOURS, 2)
        numbers = rng.sample(range(100, 1000), 2)
        first, second = zip(places, colours, numbers, strict=True)
        depths = [(GOLDEN * (index + 1)) % 1.0, rng.random()]
        context = _with_facts(prose, [(depths[0], first), (depths[1], second)])
        prompt, written, asked, depth = context + _ask(first), "", first, depths[0]
        if kind == "second turn":
            prompt, asked = f"{prompt} {first[2]}.{_ask(second)}", second
            depth = depths[1]
        elif kind == "later":
            prompt, written = context, _ask(first)
        return RecallQuestion(
            kind=kind,
            length=length,
            depth=depth,
            prompt=prompt,
            written=written,
            answer=str(asked[2]),
        )


def _with_facts(prose: str, facts: Sequence[tuple[float, Fact]]) -> str:
    """The prose with each fact at its depth, between two words."""
    for depth, (place, colour, number) in sorted(facts, reverse=True):
        at = prose.find(" ", int(depth * len(prose)))
        at = len(prose) if at < 0 else at
        fact = f"Remember this: the secret number of the {colour} {place} is {number}."
        prose = f"{prose[:at]}\n\n{fact}\n\n{prose[at:].lstrip()}"
    return prose


def _ask(fact: Fact) -> str:
    place, colour, _ = fact
    name = f"the secret number of the {colour} {place}"
    return f"\n\nQuestion: What is {name}?\nAnswer: {name} is"


def recalls(source: RecallSource, question: RecallQuestion) -> bool:
    """Whether the greedy output begins with the right number."""
    text = source.complete(question.prompt, question.written, ANSWER_TOKENS)
    answer = re.match(r"\s*(\w+)", text)
    return answer is not None and answer[1] == question.answer


class RecallReference:
    """The original's answers, each read once, until `freeze`."""

    def __init__(self, texts: RecallTexts, source: RecallSource) -> None:
        self.texts, self._source = texts, source
        self.kinds = tuple(k for k in KINDS if k != "later" or source.continues_output)
        self._right: dict[str, list[bool]] = {kind: [] for kind in self.kinds}
        self._frozen = False

    def right(self, kind: str, count: int) -> Sequence[bool]:
        """Whether each of the first `count` questions (fewer after `freeze`) is right."""
        own = self._right[kind]
        while not self._frozen and len(own) < count:
            own.append(recalls(self._source, self.texts.question(kind, len(own))))
        return own[:count]

    def available(self, kind: str, count: int) -> int:
        """How many of the first `count` questions can be compared."""
        return min(count, len(self._right[kind])) if self._frozen else count

    def read_with(self, source: RecallSource) -> None:
        """Ask another configuration that answers the same from now on."""
        self._source = source

    def freeze(self) -> None:
        """The original is no longer available: only answers already read are known."""
        self._frozen = True


class RecallPart:
    """Recall as a part of the panel: one check for each kind of question."""

    def __init__(
        self,
        reference: RecallReference,
        source: RecallSource,
        limits: QualityLimits,
        size: PanelSize,
        *,
        required: bool,
    ) -> None:
        self._reference, self._source, self._required = reference, source, required
        self._limits, self._size = limits, size
        self._right: dict[str, list[bool]] = {kind: [] for kind in reference.kinds}

    def read(self, look: int) -> bool:
        """Ask as many questions of each kind as look number `look` requires.

        The candidate is asked first: a server with a single address restarts when the other side is
        asked, and the part before this one asked the candidate last.
        """
        wanted = self._size.first_contexts << look
        kinds = self._reference.kinds if look == 0 else self._mastered()
        # One context after the other, so that the kinds of question find it in the prefix cache.
        for index in range(wanted):
            for kind in kinds:
                own = self._right[kind]
                if len(own) == index < self._reference.available(kind, wanted):
                    question = self._reference.texts.question(kind, index)
                    own.append(recalls(self._source, question))
        for index in range(1, wanted + 1):
            for kind in kinds:
                self._reference.right(kind, index)
        return bool(kinds) and all(len(self._right[kind]) == wanted for kind in kinds)

    def _mastered(self) -> tuple[str, ...]:
        """The kinds that the original answers well enough to lose something."""
        first = self._size.first_contexts
        right = {kind: self._reference.right(kind, first) for kind in self._reference.kinds}
        return tuple(k for k, own in right.items() if own and sum(own) / len(own) >= MASTERED)

    def checks(self, level: float) -> tuple[ThresholdCheck, ...]:
        """The change of the share of right answers of each kind."""
        margin = -self._limits.recall_drop_max
        mastered = self._mastered()
        if not mastered and self._required:
            unknown = Interval(low=-UNBOUNDED, mid=0.0, high=UNBOUNDED)
            name = "recall (the original has none to lose)"
            return (
                ThresholdCheck(name=name, measured=unknown, limit=margin, verdict="inconclusive"),
            )
        return tuple(
            check_min(
                f"recall, {kind}", change_of_right_answers(self._changes(kind), level), margin
            )
            for kind in mastered
        )

    def _changes(self, kind: str) -> list[float]:
        own = self._right[kind]
        before = self._reference.right(kind, len(own))
        return [float(new) - float(old) for old, new in zip(before, own, strict=True)]

    def scores(self) -> tuple[TaskScore, ...]:
        """The scores to show."""
        mastered = self._mastered()
        return tuple(self._score(kind, kind in mastered) for kind in self._reference.kinds)

    def _score(self, kind: str, mastered: bool) -> TaskScore:
        own = self._right[kind]
        before = self._reference.right(kind, len(own))
        count = max(1, len(own))
        return TaskScore(
            name=f"recall, {kind}",
            num_items=len(own),
            chance=0.0,
            right_before=sum(before) / count,
            right_after=sum(own) / count if mastered else None,
            num_flips=sum(change != 0 for change in self._changes(kind)),
        )
