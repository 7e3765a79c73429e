"""Learning from guesses that were not verified: what plain decoding says next judges them too.

A lookup's guess is made in a few microseconds. Where drafting does not pay it is not put into the
step; it is kept, and compared with the tokens that the sequence gets anyway. So how often such
guesses would have been accepted is known without a single wasted row: there is nothing to probe.

It is the same acceptance as verification would have found, greedy or sampled: a guess that names
one token per place is accepted where it is the token that was drawn (`walk.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.engine.core.drafting import Open
from ridgeline.engine.speculate.acceptance import Acceptance
from ridgeline.engine.speculate.base import KINDS, Guess
from ridgeline.engine.speculate.choose import LEAST_CHANCE

# Chance of the first token before anything is known, by length of match: short ones lie. Two
# verdicts outweigh it.
_PRIORS = (0.2, 0.2, 0.3, 0.5, 0.7, 0.85, 0.93)


class Shadows:
    """Acceptance by kind of guess, learnt from guesses with and without verification."""

    def __init__(self) -> None:
        self.by_kind: dict[int, Acceptance] = {}
        self._pending: dict[int, tuple[int, Guess]] = {}  # known tokens then, and the guess

    def of(self, kind: int) -> Acceptance:
        found = self.by_kind.get(kind)
        if found is None:
            prior = _PRIORS[min(kind % KINDS, len(_PRIORS) - 1)]
            found = self.by_kind[kind] = Acceptance(prior)
        return found

    def survivals(self, seq_id: int, guess: Guess) -> list[float]:
        """Chance that the first 1, 2, … tokens of a guess are all accepted, while it is worth
        considering."""
        acceptance = self.of(guess.kind)
        return acceptance.survivals(seq_id, acceptance.rates(len(guess.tokens)), LEAST_CHANCE)

    def keep(self, each: Open, guess: Guess) -> None:
        """A guess that is not verified now; one per sequence at a time."""
        if guess.tokens and each.seq_id not in self._pending:
            self._pending[each.seq_id] = len(each.tokens), guess

    def compare(self, seq_id: int, tokens: Sequence[int]) -> None:
        """Judge the sequence's pending guess by what is known now, once that says enough."""
        pending = self._pending.get(seq_id)
        if pending is None or len(tokens) <= pending[0]:
            return
        start, guess = pending
        num_known, num_right = len(tokens) - start, 0
        for guessed, token in zip(guess.tokens, tokens[start : start + num_known], strict=False):
            if guessed != token:
                break
            num_right += 1
        num_judged = min(num_known, len(guess.tokens))
        if num_right < num_judged or num_judged == len(guess.tokens):
            del self._pending[seq_id]
            self.of(guess.kind).learn(seq_id, num_judged, num_right)

    def learn(self, seq_id: int, kind: int, num_drafted: int, num_accepted: int) -> None:
        """A guess that was verified."""
        self._pending.pop(seq_id, None)
        self.of(kind).learn(seq_id, num_drafted, num_accepted)

    def forget(self, seq_id: int) -> None:
        self._pending.pop(seq_id, None)
        for acceptance in self.by_kind.values():
            acceptance.forget(seq_id)
