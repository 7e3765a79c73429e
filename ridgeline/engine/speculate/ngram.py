"""Prompt lookup: what came after these words the last time may come after them again.

What. The longest of the last `max_n` … `min_n` tokens of a sequence that has occurred in it before
is looked for, and the tokens that followed its latest occurrence are the draft. Where that
occurrence overlaps the end, the copy goes on with what it copied (as in LZ77), so that a period is
continued as long as asked.

Source. Inference with reference (LLMA, Yang et al. 2023, arXiv 2304.04487); prompt lookup decoding
(Saxena 2023); vLLM's "ngram" method, which takes the earliest occurrence.

Invariant. A draft depends on the sequence's own tokens only: no tenant learns of another.
When it loses. Text that does not repeat itself: the index costs about a microsecond per token and
length, and a draft that is rejected costs its rows. No forward pass is spent on it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.engine.core.drafting import Open


class _Index:
    """Where each n-gram of one sequence ended last; grams that end at the last token are not in."""

    __slots__ = ("ends", "num_read")

    def __init__(self, lengths: range) -> None:
        self.ends: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in lengths}
        self.num_read = 0

    def read(self, tokens: Sequence[int]) -> None:
        """Take in the n-grams that end before the last token and were not known yet."""
        for n, ends in self.ends.items():
            for end in range(max(self.num_read, n - 1), len(tokens) - 1):
                ends[tuple(tokens[end - n + 1 : end + 1])] = end
        self.num_read = max(self.num_read, len(tokens) - 1)


class NgramDrafter:
    """See the head of this file. Grams of `min_n` to `max_n` tokens, longest first."""

    name = "ngram"

    def __init__(self, min_n: int, max_n: int) -> None:
        self._lengths = range(max_n, min_n - 1, -1)
        self._indices: dict[int, _Index] = {}

    def draft(self, opens: Sequence[Open], depths: Sequence[int]) -> list[tuple[int, ...]]:
        """One draft per entry, of exactly its depth where a gram was found, else empty."""
        return [self._draft(each, depth) for each, depth in zip(opens, depths, strict=True)]

    def forget(self, seq_id: int, tokens: Sequence[int], tenant: str) -> None:
        self._indices.pop(seq_id, None)

    def _draft(self, each: Open, depth: int) -> tuple[int, ...]:
        index = self._indices.get(each.seq_id)
        if index is None:
            index = self._indices[each.seq_id] = _Index(self._lengths)
        index.read(each.tokens)
        for n, ends in index.ends.items():
            end = ends.get(tuple(each.tokens[-n:])) if len(each.tokens) > n else None
            if end is not None:
                return copied(each.tokens, end + 1, depth)
        return ()


def copied(tokens: Sequence[int], start: int, count: int) -> tuple[int, ...]:
    """`count` tokens from `start` on; past the end, the copy itself is read."""
    found = list(tokens[start : start + count])
    period = len(tokens) - start
    while len(found) < count:
        found.append(found[len(found) - period])
    return tuple(found)
