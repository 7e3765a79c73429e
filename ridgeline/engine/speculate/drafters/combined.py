"""Several drafters as one: the cheapest that has something to say goes first.

What. Lookups cost microseconds, so they are asked first, in order; of their guesses the one that
rests on the longest evidence is taken. Only where none has one does a drafter that computes speak.

Source. The order is that of hybrid SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975) and of
SAM-Decoding, which fall back to a model where the match is short.

Invariant. A draft comes whole from one drafter, so that its rule of verification holds: what was
looked up is walked, what was drawn is judged against what it was drawn from.
When it loses. A lookup with a long but wrong match speaks where the model would have been right;
the controller sees that in the acceptance of that kind, and asks the model instead.
"""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.engine.scheduler.speculation.base import DraftContext
from ridgeline.engine.speculate.drafters.base import KINDS, NO_GUESS, Drafter, Guess, Lookup


class Lookups:
    """Several lookups as one; kinds are told apart by the lookup's place."""

    def __init__(self, lookups: Sequence[Lookup]) -> None:
        self._lookups = tuple(lookups)
        self.name = "+".join(each.name for each in self._lookups)

    def look(self, each: DraftContext, most: int) -> Guess:
        best, found = -1, NO_GUESS
        for place, lookup in enumerate(self._lookups):
            guess = lookup.look(each, most)
            if guess.tokens and guess.kinds[0] > best:
                best, first = guess.kinds[0], place * KINDS
                found = Guess(guess.tokens, tuple([first + kind for kind in guess.kinds]))
        return found

    def forget(self, seq_id: int, tokens: Sequence[int], tenant: str) -> None:
        for lookup in self._lookups:
            lookup.forget(seq_id, tokens, tenant)


class Combined:
    """A lookup, and a drafter where it has nothing to say, as one drafter of any depth."""

    def __init__(self, lookup: Lookup | None, drafter: Drafter | None) -> None:
        assert lookup is not None or drafter is not None
        self._lookup, self._drafter = lookup, drafter
        self.name = "+".join(each.name for each in (lookup, drafter) if each is not None)

    def draft(
        self, contexts: Sequence[DraftContext], depths: Sequence[int]
    ) -> list[tuple[int, ...]]:
        found = [self._looked_up(o, d) for o, d in zip(contexts, depths, strict=True)]
        if self._drafter is None:
            return found
        left = [0 if draft else depth for draft, depth in zip(found, depths, strict=True)]
        computed = self._drafter.draft(contexts, left)
        return [own or other for own, other in zip(found, computed, strict=True)]

    def forget(self, seq_id: int, tokens: Sequence[int], tenant: str) -> None:
        for each in (self._lookup, self._drafter):
            if each is not None:
                each.forget(seq_id, tokens, tenant)

    def _looked_up(self, each: DraftContext, depth: int) -> tuple[int, ...]:
        return self._lookup.look(each, depth).tokens if self._lookup and depth > 0 else ()
