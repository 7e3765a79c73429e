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
When it loses. Text that does not repeat itself: the index costs about two microseconds per token,
and a draft that is rejected costs its rows. No forward pass is spent on it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.engine.core.drafting import Open
from ridgeline.engine.speculate.base import (
    AGAIN,
    AGREES,
    ALONE,
    DIFFERS,
    NO_GUESS,
    Guess,
    kind_of,
)

MOST_AGREEING = 32  # tokens before a match that are compared to see how long it is
_ALONE_OF = tuple(kind_of(length, ALONE, own=False) for length in range(MOST_AGREEING + 1))


class Index:
    """Where each n-gram of one sequence ended last; grams that end at the last token are not in.

    `told[i]`: what was known of the token at place i before it came. Reading on costs a few
    microseconds whatever the length of what was read before.
    """

    __slots__ = ("ends", "told")

    def __init__(self, lengths: range) -> None:
        self.ends: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in lengths}
        self.told = [ALONE]

    def read(self, tokens: Sequence[int]) -> None:
        """Take in the n-grams that end before the last token and were not known yet."""
        told, ends = self.told, self.ends
        for end in range(len(told) - 1, len(tokens) - 1):
            last: int | None = None
            for n, ends_n in ends.items():
                if end >= n - 1:
                    gram = tuple(tokens[end - n + 1 : end + 1])
                    last = ends_n.get(gram) if last is None else last
                    ends_n[gram] = end
            told.append(ALONE if last is None else self._told(tokens, last + 1, end + 1))

    def find(self, tokens: Sequence[int]) -> int | None:
        """Where the longest gram that ends `tokens` ended the last time before."""
        for n, ends in self.ends.items():
            found = ends.get(tuple(tokens[-n:])) if len(tokens) > n else None
            if found is not None:
                return found
        return None

    def _told(self, tokens: Sequence[int], before: int, place: int) -> int:
        """What the token at `before`, after the same gram, told of that at `place`."""
        if tokens[before] != tokens[place]:
            return DIFFERS
        return AGAIN if self.told[before] >= AGREES else AGREES


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
        end = index.find(tokens)
        if end is None:
            return NO_GUESS
        kinds = self._kinds(index.told, end + 1, each, most)
        return Guess(copied(tokens, end + 1, most), kinds)

    def _kinds(self, told: Sequence[int], start: int, each: Open, most: int) -> tuple[int, ...]:
        """Of the tokens copied from `start` on."""
        length, period = num_agreeing(each.tokens, start - 1), len(each.tokens) - start
        num_prompt, found = each.num_prompt, list[int]()
        for i in range(most):
            place = start + (i if i < period else i % period)
            first = _ALONE_OF[min(MOST_AGREEING, length + i)]
            found.append(first + 2 * (told[place] - ALONE) + (place >= num_prompt))
        return tuple(found)

    def forget(self, seq_id: int, tokens: Sequence[int], tenant: str) -> None:
        self._indices.pop(seq_id, None)


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
