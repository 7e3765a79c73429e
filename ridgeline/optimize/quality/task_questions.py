"""Generated questions with one right answer, which perplexity averages away.

  arithmetic   three steps with small numbers, after a few worked examples    (maths)
  variables    the value of a variable after three assignments, as Python     (code)
  recall       which number was paired with a word, six pairs earlier         (memory)

An answer is one token out of a few, and the model's answer is the most likely of those. That scores
models that could never write the answer freely, and makes the chance level known. The right answer
is drawn uniformly, so no constant guess beats chance. A task at which the original does not beat
chance cannot show a loss: it is reported as such and does not count.

The change is paired by question. With hardly any flips the interval cannot come from the flips
alone: it is never narrower than one additional flip would make it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import msgspec
import numpy as np

from ridgeline.optimize.quality.text_comparison import LogprobsOf
from ridgeline.optimize.quality.thresholds import (
    PanelSize,
    QualityLimits,
    ThresholdCheck,
    check_min,
)
from ridgeline.stats import LEVEL, Interval, mean_interval

Encode = Callable[[str], Sequence[int]]
NUM_SHOTS = 5
NUM_STEPS = 3
WORDS = (
    "lamp",
    "river",
    "stone",
    "apple",
    "chair",
    "window",
    "garden",
    "paper",
    "silver",
    "engine",
)
NUM_PAIRS = 6
MASTERY_ERRORS = 2.24  # standard errors above chance that count as mastery (one-sided 98.75 %)


class TokenQuestion(msgspec.Struct, frozen=True):
    """One question: prompt tokens, tokens allowed as answers, and the index of the right one."""

    prompt: tuple[int, ...]
    options: tuple[int, ...]
    right: int


class TextQuestion(msgspec.Struct, frozen=True):
    """One question as text; an option directly follows the prompt."""

    prompt: str
    options: tuple[str, ...]
    right: int


class Task:
    """A kind of question; `item(i)` is the same question on every call."""

    def __init__(
        self, name: str, draw: Callable[[random.Random], TextQuestion], encode: Encode
    ) -> None:
        self.name, self._draw, self._encode = name, draw, encode
        self._items: dict[int, TokenQuestion] = {}

    def item(self, index: int) -> TokenQuestion:
        if index not in self._items:
            question = self._draw(random.Random(f"{self.name}/{index}"))
            item = _item(question, self._encode)
            assert item is not None, "make_tasks tried the options of this task"
            self._items[index] = item
        return self._items[index]

    @property
    def chance(self) -> float:
        return 1 / len(self.item(0).options)


class TaskScore(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of right answers.

    `right_after` is None if the original does not beat chance, so the candidate was not question.
    """

    name: str
    num_items: int
    chance: float
    right_before: float
    right_after: float | None
    num_flips: int


def make_tasks(encode: Encode) -> tuple[Task, ...]:
    """The tasks whose answers this tokenizer distinguishes by a single token."""
    return tuple(
        Task(name, draw, encode)
        for name, draw in _KINDS
        if all(_item(draw(random.Random(f"{name}/{i}")), encode) for i in range(8))
    )


def text_questions(number: int) -> Iterator[TextQuestion]:
    """The first questions of every kind, alternating, for models whose tokenizer is not here."""
    for index in range(number):
        name, draw = _KINDS[index % len(_KINDS)]
        yield draw(random.Random(f"{name}/{index // len(_KINDS)}"))


def _item(question: TextQuestion, encode: Encode) -> TokenQuestion | None:
    """None if options share their first token or merge with the end of the prompt."""
    coded = [tuple(encode(question.prompt + option)) for option in question.options]
    shortest = min(map(len, coded))
    same = next((i for i in range(shortest) if len({c[i] for c in coded}) > 1), shortest)
    options = tuple(c[same] for c in coded if len(c) > same)
    if same == 0 or len(set(options)) < len(question.options):
        return None
    return TokenQuestion(coded[0][:same], options, question.right)


DIGITS = tuple(f" {digit}" for digit in range(10))


def _steps(rng: random.Random) -> list[int]:
    """Values from first to last, each a digit; the last is drawn uniformly."""
    return [rng.randrange(10) for _ in range(NUM_STEPS + 1)]


def _step(old: int, new: int) -> str:
    return f"+ {new - old}" if new >= old else f"- {old - new}"


def _line(values: Sequence[int]) -> str:
    changes = " ".join(_step(a, b) for a, b in pairwise(values))
    return f"{values[0]} {changes} ="


def _arithmetic(rng: random.Random) -> TextQuestion:
    """`3 + 4 - 2 + 1 = 6`."""
    shots = [_steps(rng) for _ in range(NUM_SHOTS + 1)]
    lines = [f"{_line(values)} {values[-1]}\n" for values in shots[:-1]]
    return TextQuestion("".join(lines) + _line(shots[-1]), DIGITS, shots[-1][-1])


def _program(values: Sequence[int], names: Sequence[str]) -> str:
    first = f"{names[0]} = {values[0]}\n"
    rest = [
        f"{names[i + 1]} = {names[i]} {_step(values[i], values[i + 1])}\n"
        for i in range(len(values) - 1)
    ]
    return first + "".join(rest) + f"assert {names[len(values) - 1]} =="


def _variables(rng: random.Random) -> TextQuestion:
    """`a = 3`, `b = a + 4`, `c = b - 2`, …, `assert d == 6`."""
    shots = [_steps(rng) for _ in range(3)]
    programs = [_program(values, "abcd") for values in shots]
    examples = [f"{p} {v[-1]}\n\n" for p, v in zip(programs[:-1], shots[:-1], strict=True)]
    return TextQuestion("".join(examples) + programs[-1], DIGITS, shots[-1][-1])


def _recall(rng: random.Random) -> TextQuestion:
    """`lamp = 4`, `river = 7`, …, `river =`."""
    words, values = rng.sample(WORDS, NUM_PAIRS), rng.sample(range(10), NUM_PAIRS)
    pairs = [f"{word} = {value}\n" for word, value in zip(words, values, strict=True)]
    right = rng.randrange(NUM_PAIRS)
    options = tuple(f" {value}" for value in values)
    return TextQuestion("".join(pairs) + f"{words[right]} =", options, right)


class TaskReference:
    """The original's answers, each computed once."""

    def __init__(self, task: Task, read: LogprobsOf) -> None:
        self.task, self._read = task, read
        self._right: list[bool] = []
        self._frozen = False

    def right(self, count: int) -> Sequence[bool]:
        """Whether each of the first `count` questions (fewer after `freeze`) is right."""
        if not self._frozen:
            while len(self._right) < count:
                self._right.append(is_right(self._read, self.task.item(len(self._right))))
        return self._right[:count]

    def read_with(self, read: LogprobsOf) -> None:
        """Compute the answers by another function from now on."""
        self._read = read

    def mastered(self, count: int) -> bool:
        """Whether the first look has more right answers than chance explains."""
        return is_mastered(self.right(count), self.task.chance)

    def freeze(self) -> None:
        """The original is no longer available: only answers already computed are known."""
        self._frozen = True


def is_mastered(right: Sequence[bool], chance: float) -> bool:
    """Whether there are more right answers than guessing explains; False without answers."""
    count = max(1, len(right))
    return sum(right) / count > chance + MASTERY_ERRORS * math.sqrt(chance * (1 - chance) / count)


def change_of_right_answers(changes: Sequence[float], level: float = LEVEL) -> Interval:
    """The mean of changes paired by question (-1, 0 or 1 each), with its interval.

    With hardly any flips the spread cannot come from them alone: one more is assumed.
    """
    return mean_interval(changes, level=level, least_sd=1 / math.sqrt(len(changes)))


def is_right(read: LogprobsOf, item: TokenQuestion) -> bool:
    """Whether the most likely of the options is the right one."""
    last_V = np.asarray(read(item.prompt))[-1]
    return int(np.argmax(last_V[list(item.options)])) == item.right


class TaskPanelPart:
    """One task as a part of the panel."""

    def __init__(
        self, reference: TaskReference, after: LogprobsOf, gate: QualityLimits, size: PanelSize
    ) -> None:
        self._reference, self._after, self._gate, self._size = reference, after, gate, size
        self._mastered = reference.mastered(size.first_items)
        self._right: list[bool] = []

    def read(self, look: int) -> bool:
        """Ask as many questions as look number `look` requires; False if no further ones are
        available.
        """
        if not self._mastered:
            return False
        wanted = self._size.first_items << look
        before = self._reference.right(wanted)
        task = self._reference.task
        while len(self._right) < len(before):
            self._right.append(is_right(self._after, task.item(len(self._right))))
        return len(before) == wanted

    def checks(self, level: float) -> tuple[ThresholdCheck, ...]:
        """Empty for a task that the original does not master."""
        if not self._mastered:
            return ()
        change = change_of_right_answers(self._changes(), level)
        return (check_min(self.name, change, -self._gate.task_drop_max),)

    @property
    def name(self) -> str:
        return f"{self._reference.task.name}, right answers"

    def _changes(self) -> list[float]:
        before = self._reference.right(len(self._right))
        return [float(new) - float(old) for old, new in zip(before, self._right, strict=True)]

    def scores(self) -> tuple[TaskScore, ...]:
        """The scores to show."""
        count = len(self._right) or self._size.first_items
        before = self._reference.right(count)
        score = TaskScore(
            name=self._reference.task.name,
            num_items=len(before),
            chance=self._reference.task.chance,
            right_before=sum(before) / max(1, len(before)),
            right_after=sum(self._right) / count if self._mastered else None,
            num_flips=sum(change != 0 for change in self._changes()),
        )
        return (score,)


_KINDS = (("arithmetic", _arithmetic), ("variables", _variables), ("recall", _recall))
