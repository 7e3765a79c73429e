"""How good lookups are, learnt from what they said, whether or not it was verified.

A lookup's guess is made in a few microseconds. Whatever becomes of it, verified, in part, or left
out of the step because drafting does not pay: soon the sequence knows what really came, and that
judges it. So how often such tokens are right is known without a single wasted row: there is nothing
to probe.

Learnt is the chance of a token of a kind, where those before it in the guess were right: of all
sequences together, and of one sequence, which is taken to be like the others until it has shown
more. A guess goes on for as long as its kinds make likely: past a place where the text went two
ways before, seldom.

It is the same acceptance as verification would have found, greedy or sampled: a guess that names
one token per place is accepted where it is the token that was drawn (`walk.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ridgeline.engine.core.drafting import Open
from ridgeline.engine.speculate.base import (
    AGAIN,
    AGREES,
    DIFFERS,
    HIGHEST,
    KINDS,
    Guess,
    kind_of,
    parts_of,
)
from ridgeline.engine.speculate.choose import LEAST_CHANCE

# Chance of a token before anything is known: by level of evidence (short matches lie), and what a
# place's past makes of it. Two tokens outweigh it.
_PRIORS = (0.2, 0.2, 0.3, 0.5, 0.7, 0.85, 0.93)
_DOUBT = {DIFFERS: 1.4, AGREES: 0.6, AGAIN: 0.4}  # times the chance that it is wrong
_PROMPT = 0.9  # times the chance: a prompt's words say less than its own
_PRIOR_WEIGHT, _LIKE_OTHERS = 2.0, 3.0  # tokens that prior and others' experience count for
_FADE_ALL, _FADE_OWN = 0.99, 0.85  # with every token of the kind


def prior(kind: int) -> float:
    """The chance of a token of which nothing was learnt."""
    level, told, own = parts_of(kind)
    chance = 1 - (1 - _PRIORS[level]) * _DOUBT.get(told, 1.0)
    return max(0.05, chance) * (1.0 if own else _PROMPT)


_PRIOR_OF = tuple(prior(kind) for kind in range(kind_of(1 << HIGHEST, AGAIN) + 1))
_Counts = dict[int, tuple[float, float]]
"""Tokens of each kind that were right, and all of them; old ones count for less."""


def _note(counts: _Counts, kind: int, right: bool, fade: float) -> None:
    num_right, num = counts.get(kind, (0.0, 0.0))
    counts[kind] = num_right * fade + right, num * fade + 1


class Shadows:
    """See the head of this file."""

    def __init__(self) -> None:
        self._all: _Counts = {}
        self._own: dict[int, _Counts] = {}
        self._pending: dict[int, tuple[int, Guess]] = {}  # known tokens then, and the guess
        self._chances: dict[int, float] = {}  # by kind, until something is learnt of it

    def chance(self, kind: int) -> float:
        """Of a token of any sequence."""
        num_right, num = self._all.get(kind, (0.0, 0.0))
        return (num_right + _PRIOR_WEIGHT * _PRIOR_OF[kind % KINDS]) / (num + _PRIOR_WEIGHT)

    def survivals(self, seq_id: int, guess: Guess) -> list[float]:
        """Chance that the first 1, 2, … tokens of a guess are all accepted, while it is worth
        considering."""
        own, found, alive = self._own.get(seq_id, {}), list[float](), 1.0
        chances = self._chances
        for kind in guess.kinds:
            chance, counts = chances.get(kind), own.get(kind)
            if chance is None:
                chance = chances[kind] = self.chance(kind)
            if counts is not None:
                chance = (counts[0] + _LIKE_OTHERS * chance) / (counts[1] + _LIKE_OTHERS)
            alive *= chance
            if alive < LEAST_CHANCE:
                break
            found.append(alive)
        return found

    def keep(self, each: Open, guess: Guess) -> None:
        """What was said of a sequence in this step, whether or not it is drafted."""
        if guess.tokens:
            self._pending[each.seq_id] = len(each.tokens), guess
        else:
            self._pending.pop(each.seq_id, None)

    def compare(self, seq_id: int, tokens: Sequence[int]) -> None:
        """Judge what was said of the sequence last by what is known now."""
        start, guess = self._pending.pop(seq_id, (0, None))
        if guess is None or len(tokens) <= start:
            return
        own = self._own.setdefault(seq_id, {})
        for kind, right in _judged(guess, tokens[start : start + len(guess.tokens)]):
            _note(self._all, kind, right, _FADE_ALL)
            self._chances.pop(kind, None)
            _note(own, kind, right, _FADE_OWN)

    def forget(self, seq_id: int) -> None:
        self._pending.pop(seq_id, None)
        self._own.pop(seq_id, None)


def _judged(guess: Guess, came: Sequence[int]) -> Iterable[tuple[int, bool]]:
    """The kinds of a guess's tokens and whether they were right, up to the first that was not."""
    for token, kind, true in zip(guess.tokens, guess.kinds, came, strict=False):
        yield kind, token == true
        if token != true:
            return
