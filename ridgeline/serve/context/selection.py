"""Which parts of a text carry the most information, by the log-probabilities of a model.

Selective Context (Li et al., EMNLP 2023, arXiv 2310.06201): what the model predicts with ease says
little and is left out. Lossy, and blind to the question: a sentence that is easy to predict may be
the one that was asked for.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal

import msgspec

KeepUnit = Literal["sentence", "word"]
_BOUNDARIES = {
    "sentence": re.compile(r"(?<=[.!?])(?=\s)|(?=\n)"),
    "word": re.compile(r"(?<=\S)(?=\s)"),
}


def split_units(text: str, unit: KeepUnit) -> list[str]:
    """The sentences or words of a text, each with the white space before it; they join to it."""
    return [part for part in _BOUNDARIES[unit].split(text) if part]


class ScoredUnit(msgspec.Struct, frozen=True):
    """Log-probabilities of the tokens of a unit; None for one without anything before it."""

    logprobs: tuple[float | None, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.logprobs)

    @property
    def information(self) -> float:
        """Mean of -log p over the tokens, in nats; infinite where nothing is known."""
        known = [-value for value in self.logprobs if value is not None]
        return sum(known) / len(known) if known else math.inf


def select_units(units: Sequence[ScoredUnit], keep_ratio: float) -> list[int]:
    """Indices, in order, of the most informative units that together have at least `keep_ratio` of
    the tokens; of equal ones the earlier first."""
    needed = keep_ratio * sum(unit.num_tokens for unit in units)
    kept: list[int] = []
    num_tokens = 0
    for index in sorted(range(len(units)), key=lambda i: (-units[i].information, i)):
        if num_tokens >= needed:
            break
        kept.append(index)
        num_tokens += units[index].num_tokens
    return sorted(kept)


class CompressedTexts:
    """Texts that were compressed before, by tenant, settings and digest; the oldest go first."""

    def __init__(self, max_chars: int) -> None:
        self._max_chars, self._num_chars = max_chars, 0
        self._texts: OrderedDict[tuple[str, float, KeepUnit, bytes], str] = OrderedDict()

    def find(self, key: tuple[str, float, KeepUnit, bytes]) -> str | None:
        """What a text was compressed to; None if that is not known."""
        if key in self._texts:
            self._texts.move_to_end(key)
        return self._texts.get(key)

    def store(self, key: tuple[str, float, KeepUnit, bytes], text: str) -> None:
        """Keep what a text was compressed to."""
        if key in self._texts or len(text) > self._max_chars:
            return
        self._texts[key] = text
        self._num_chars += len(text) + 128
        while self._num_chars > self._max_chars:
            self._num_chars -= len(self._texts.popitem(last=False)[1]) + 128
