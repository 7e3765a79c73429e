"""Prompt lookup: what came after these words the last time may come after them again.

What. The longest of the last `max_n` … `min_n` tokens of a sequence that has occurred in it before
is looked for, and the tokens that followed its latest occurrence are the draft. Where that
occurrence overlaps the end, the copy goes on with what it copied (as in LZ77), so that a period is
continued as long as asked. A guess counts as a better kind where the gram was followed by the same
token the time before, as a worse one where it was followed by another, or stands in the prompt (of
the demo model's answers to edits, a match of two or three tokens is right in 0.87, 0.59 and 0.35).

Source. Inference with reference (LLMA, Yang et al. 2023, arXiv 2304.04487); prompt lookup decoding
(Saxena 2023); vLLM's "ngram" method, which takes the earliest occurrence.

Invariant. A draft depends on the sequence's own tokens only: no tenant learns of another.
When it loses. Text that does not repeat itself: the index costs about two microseconds per token,
and a draft that is rejected costs its rows. No forward pass is spent on it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.engine.core.drafting import Open
from ridgeline.engine.speculate.base import HIGHEST, NO_GUESS, Guess, kind_of

MOST_AGREEING = 32  # tokens before a match that are compared to see how long it is
ALONE, AGREES, DIFFERS = 0, 1, 2  # what came after a gram the last time, against the time before


class Index:
    """Where each n-gram of one sequence ended last; grams that end at the last token are not in.

    Reading on costs a few microseconds whatever the length of what was read before.
    """

    __slots__ = ("ends", "num_read")

    def __init__(self, lengths: range) -> None:
        # 3 * place + whether the token after it is that of the time before
        self.ends: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in lengths}
        self.num_read = 0

    def read(self, tokens: Sequence[int]) -> None:
        """Take in the n-grams that end before the last token and were not known yet."""
        last, first = len(tokens) - 1, self.num_read
        for n, ends in self.ends.items():
            for end in range(max(first, n - 1), last):
                gram = tuple(tokens[end - n + 1 : end + 1])
                before = ends.get(gram)
                if before is None:
                    ends[gram] = 3 * end + ALONE
                else:
                    same = tokens[before // 3 + 1] == tokens[end + 1]
                    ends[gram] = 3 * end + (AGREES if same else DIFFERS)
        self.num_read = max(first, last)

    def find(self, tokens: Sequence[int]) -> tuple[int, int] | None:
        """Where the longest gram that ends `tokens` ended the last time before, and whether what
        came after it agrees with the time before that."""
        for n, ends in self.ends.items():
            found = ends.get(tuple(tokens[-n:])) if len(tokens) > n else None
            if found is not None:
                return divmod(found, 3)
        return None


class NgramDrafter:
    """See the head of this file. Grams of `min_n` to `max_n` tokens, longest first."""

    name = "ngram"

    def __init__(self, min_n: int, max_n: int) -> None:
        self._lengths = range(max_n, min_n - 1, -1)
        self._indices: dict[int, Index] = {}

    def look(self, each: Open, most: int) -> Guess:
        """Of exactly `most` tokens where a gram was found, else empty."""
        index = self._indices.get(each.seq_id)
        if index is None:
            index = self._indices[each.seq_id] = Index(self._lengths)
        tokens = each.tokens
        index.read(tokens)
        found = index.find(tokens)
        if found is None:
            return NO_GUESS
        end, agrees = found
        kind = kind_of(num_agreeing(tokens, end)) + _BONUS[agrees] - (end < each.num_prompt)
        return Guess(copied(tokens, end + 1, most), max(1, min(HIGHEST, kind)))

    def forget(self, seq_id: int, tokens: Sequence[int], tenant: str) -> None:
        self._indices.pop(seq_id, None)


_BONUS = {ALONE: 0, AGREES: 1, DIFFERS: -1}


def num_agreeing(tokens: Sequence[int], end: int) -> int:
    """How many tokens up to place `end` are those that end the text (at most MOST_AGREEING)."""
    last, num = len(tokens) - 1, 0
    most = min(MOST_AGREEING, end + 1)
    while num < most and tokens[end - num] == tokens[last - num]:
        num += 1
    return num


def copied(tokens: Sequence[int], start: int, count: int) -> tuple[int, ...]:
    """`count` tokens from `start` on; past the end, the copy itself is read."""
    found = list(tokens[start : start + count])
    period = len(tokens) - start
    while len(found) < count:
        found.append(found[len(found) - period])
    return tuple(found)
