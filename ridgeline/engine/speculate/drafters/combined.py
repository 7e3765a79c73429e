"""Several drafters as one: the cheapest with a guess goes first.

Lookups cost microseconds, so they go first, in order; of their guesses the one with the longest
evidence is used. Only if none has a guess does a drafter compute one.

Source: hybrid SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975) and SAM-Decoding, which fall
back to a model after short matches.

Invariant: a draft comes entirely from one drafter, so its verification rule holds: lookups are
matched exactly, sampled drafts are judged against the distribution they were sampled from. When it
loses: a lookup with a long but wrong match preempts a model that would have been right; the
controller sees this in the acceptance of that kind and uses the model instead.
"""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.engine.scheduler.speculation.base import DraftContext
from ridgeline.engine.speculate.drafters.base import KINDS, NO_GUESS, Drafter, Lookup, LookupGuess


class Lookups:
    """Several lookups as one; their kinds are distinguished by the lookup's position."""

    def __init__(self, lookups: Sequence[Lookup]) -> None:
        self._lookups = tuple(lookups)
        self.name = "+".join(lookup.name for lookup in self._lookups)

    def look(self, part: DraftContext, most: int) -> LookupGuess:
        best, found = -1, NO_GUESS
        for place, lookup in enumerate(self._lookups):
            guess = lookup.look(part, most)
            if guess.tokens and guess.kinds[0] > best:
                best, first = guess.kinds[0], place * KINDS
                found = LookupGuess(guess.tokens, tuple([first + kind for kind in guess.kinds]))
        return found

    def forget(self, seq_id: int, tokens: Sequence[int], tenant: str) -> None:
        for lookup in self._lookups:
            lookup.forget(seq_id, tokens, tenant)


class Combined:
    """A lookup, with a drafter as its fallback, as one drafter of any depth."""

    def __init__(self, lookup: Lookup | None, drafter: Drafter | None) -> None:
        assert lookup is not None or drafter is not None
        self._lookup, self._drafter = lookup, drafter
        self.name = "+".join(part.name for part in (lookup, drafter) if part is not None)

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
        for part in (self._lookup, self._drafter):
            if part is not None:
                part.forget(seq_id, tokens, tenant)

    def _looked_up(self, part: DraftContext, depth: int) -> tuple[int, ...]:
        return self._lookup.look(part, depth).tokens if self._lookup and depth > 0 else ()
