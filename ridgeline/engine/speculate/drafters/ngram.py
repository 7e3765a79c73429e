"""Prompt lookup: what followed the last few tokens earlier may follow them again.

The longest of the last `max_n` … `min_n` tokens of a sequence that occurred in it before is
searched, and the tokens after its latest occurrence are the draft. If that occurrence overlaps the
end, the copy continues with what it copied (as in LZ77), so a period continues as long as
requested. For every position it is recorded whether its token would have been guessed correctly
when it was new: a copy that reaches a position where the text diverged before is likely to diverge
there. That history, the match length so far, and whether the position lies in the prompt determine
the kind of each token.

Source: inference with reference (LLMA, Yang et al. 2023, arXiv 2304.04487); prompt lookup decoding
(Saxena 2023); vLLM's "ngram" method, which takes the earliest occurrence.

Invariant: a draft depends on the sequence's own tokens only, so tenants learn nothing of each
other. When it loses: text without repetition. The index costs about a quarter of a microsecond per
token, and a rejected draft costs its rows. No forward pass is spent on it.
"""

from __future__ import annotations

from collections.abc import Sequence

import ridgeline._native as _native
from ridgeline.engine.scheduler.speculation.base import DraftContext
from ridgeline.engine.speculate.drafters.base import NO_GUESS, LookupGuess


class NgramDrafter:
    """Looks up n-grams of `min_n` to `max_n` tokens, longest first."""

    name = "ngram"

    def __init__(self, min_n: int, max_n: int) -> None:
        self._texts = _native.PromptLookup(min_n, max_n)

    def look(self, context: DraftContext, most: int) -> LookupGuess:
        """Exactly `most` tokens if an n-gram was found, else empty."""
        found = self._texts.look(context.seq_id, context.tokens, context.num_prompt, most)
        return NO_GUESS if found is None else LookupGuess(*found)

    def forget(self, seq_id: int, tokens: Sequence[int], tenant: str) -> None:
        self._texts.forget(seq_id)
