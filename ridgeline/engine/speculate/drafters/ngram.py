"""Prompt lookup: what came after these words the last time may come after them again.

What. The longest of the last `max_n` … `min_n` tokens of a sequence that has occurred in it before
is looked for, and the tokens that followed its latest occurrence are the draft. Where that
occurrence overlaps the end, the copy goes on with what it copied (as in LZ77), so that a period is
continued as long as asked. Of every place it is remembered whether what stands there would have
been guessed right when it was new, from what stood before it then: a copy that comes to a place
where the text went two ways before is likely to part there. That, how long the match is by then,
and whether the place lies in the prompt make the kind of each token.

Source. Inference with reference (LLMA, Yang et al. 2023, arXiv 2304.04487); prompt lookup decoding
(Saxena 2023); vLLM's "ngram" method, which takes the earliest occurrence.

Invariant. A draft depends on the sequence's own tokens only: no tenant learns of another.
When it loses. Text that does not repeat itself: the index (`native/speculation/drafts.h`) costs about a quarter
of a microsecond per token, and a draft that is rejected costs its rows. No forward pass is spent on
it.
"""

from __future__ import annotations

from collections.abc import Sequence

import ridgeline._native as _native
from ridgeline.engine.scheduler.speculation.base import DraftContext
from ridgeline.engine.speculate.drafters.base import NO_GUESS, Guess


class NgramDrafter:
    """See the head of this file. Grams of `min_n` to `max_n` tokens, longest first."""

    name = "ngram"

    def __init__(self, min_n: int, max_n: int) -> None:
        self._texts = _native.PromptLookup(min_n, max_n)

    def look(self, each: DraftContext, most: int) -> Guess:
        """Of exactly `most` tokens where a gram was found, else empty."""
        found = self._texts.look(each.seq_id, each.tokens, each.num_prompt, most)
        return NO_GUESS if found is None else Guess(*found)

    def forget(self, seq_id: int, tokens: Sequence[int], tenant: str) -> None:
        self._texts.forget(seq_id)
