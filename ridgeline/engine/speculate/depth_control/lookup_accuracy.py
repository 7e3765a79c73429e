"""Accuracy of lookups, learnt from their guesses whether or not these were verified.

A guess costs a few microseconds. Whether it is verified, partly verified, or left out because
drafting does not pay, the sequence soon knows the real tokens, and those judge it. So accuracy is
learnt without a single wasted row; no probes are needed.

Learnt is the probability of a token of a kind given that those before it in the guess were right:
over all sequences, and per sequence, which is assumed to resemble the others until it has shown
more. A guess continues as long as its kinds make it likely; rarely past a position where the text
diverged before.

It equals the acceptance that verification would find, greedy or sampled: a guess that names one
token per position is accepted where it equals the sampled token.
"""

from __future__ import annotations

from collections.abc import Sequence

import ridgeline._native as _native
from ridgeline.engine.scheduler.speculation.base import DraftContext
from ridgeline.engine.speculate.depth_control.plan import MIN_CHANCE
from ridgeline.engine.speculate.drafters.base import (
    AGAIN,
    AGREES,
    DIFFERS,
    HIGHEST,
    KINDS,
    LookupGuess,
    kind_of,
    parts_of,
)

# Probability of a token before anything is learnt: by level of evidence (short matches mislead),
# and corrected by the position's history. Two observed tokens outweigh it.
_PRIORS = (0.2, 0.2, 0.3, 0.5, 0.7, 0.85, 0.93)
_DOUBT = {DIFFERS: 1.4, AGREES: 0.6, AGAIN: 0.4}  # factor on the probability of being wrong
_PROMPT = 0.9  # factor for matches in the prompt, which predict less than the output
_PRIOR_WEIGHT, _LIKE_OTHERS = 2.0, 3.0  # tokens that prior and others' experience count for
_FADE_ALL, _FADE_OWN = 0.99, 0.85  # with every token of the kind


def prior(kind: int) -> float:
    """The probability assumed for a token of a kind before anything is learnt."""
    level, history, own = parts_of(kind)
    chance = 1 - (1 - _PRIORS[level]) * _DOUBT.get(history, 1.0)
    return max(0.05, chance) * (1.0 if own else _PROMPT)


# By kind within its lookup; no token is of the last ones.
_NUM_USED = kind_of(1 << HIGHEST, AGAIN) + 1
_PRIOR_OF = [prior(kind) for kind in range(_NUM_USED)] + [0.5] * (KINDS - _NUM_USED)


class LookupAccuracy:
    """Probability that looked-up tokens are right, by kind, per sequence and over all."""

    def __init__(self) -> None:
        self._record = _native.GuessRecord(
            _PRIOR_OF, _PRIOR_WEIGHT, _LIKE_OTHERS, _FADE_ALL, _FADE_OWN, MIN_CHANCE
        )

    def chance(self, kind: int) -> float:
        """Probability of a token of any sequence."""
        return self._record.chance(kind)

    def survivals(self, seq_id: int, guess: LookupGuess) -> list[float]:
        """Probability that the first 1, 2, … tokens of a guess are all accepted, while worth
        considering.
        """
        return self._record.survivals(seq_id, guess.kinds)

    def keep(self, context: DraftContext, guess: LookupGuess) -> None:
        """Record the guess for a sequence in this step, whether or not it is drafted."""
        self._record.keep(context.seq_id, len(context.tokens), guess.tokens, guess.kinds)

    def compare(self, seq_id: int, tokens: Sequence[int]) -> None:
        """Judge the sequence's last guess by the tokens known now."""
        self._record.compare(seq_id, tokens)

    def forget(self, seq_id: int) -> None:
        self._record.forget(seq_id)
