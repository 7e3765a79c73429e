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

from collections.abc import Sequence

import ridgeline._native as _native
from ridgeline.engine.scheduler.speculation.base import DraftContext
from ridgeline.engine.speculate.depth_control.plan import LEAST_CHANCE
from ridgeline.engine.speculate.drafters.base import (
    AGAIN,
    AGREES,
    DIFFERS,
    HIGHEST,
    KINDS,
    Guess,
    kind_of,
    parts_of,
)

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


# By kind within its lookup; no token is of the last ones.
_NUM_USED = kind_of(1 << HIGHEST, AGAIN) + 1
_PRIOR_OF = [prior(kind) for kind in range(_NUM_USED)] + [0.5] * (KINDS - _NUM_USED)


class Shadows:
    """See the head of this file."""

    def __init__(self) -> None:
        self._record = _native.GuessRecord(
            _PRIOR_OF, _PRIOR_WEIGHT, _LIKE_OTHERS, _FADE_ALL, _FADE_OWN, LEAST_CHANCE
        )

    def chance(self, kind: int) -> float:
        """Of a token of any sequence."""
        return self._record.chance(kind)

    def survivals(self, seq_id: int, guess: Guess) -> list[float]:
        """Chance that the first 1, 2, … tokens of a guess are all accepted, while it is worth
        considering."""
        return self._record.survivals(seq_id, guess.kinds)

    def keep(self, each: DraftContext, guess: Guess) -> None:
        """What was said of a sequence in this step, whether or not it is drafted."""
        self._record.keep(each.seq_id, len(each.tokens), guess.tokens, guess.kinds)

    def compare(self, seq_id: int, tokens: Sequence[int]) -> None:
        """Judge what was said of the sequence last by what is known now."""
        self._record.compare(seq_id, tokens)

    def forget(self, seq_id: int) -> None:
        self._record.forget(seq_id)
