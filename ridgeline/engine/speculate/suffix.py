"""Suffix drafts: what came after these words in what this tenant was answered lately.

What. The outputs of a tenant's finished sequences go into a suffix automaton (`automaton.py`). A
sequence keeps its place in it, token by token, so that the longest tail of it that occurs anywhere
in those texts is always known; what followed there, the last time, is the draft, as long as the
match. The sequence's own text is looked up as well (`ngram.py`); the longer match speaks.

Bounds. A tenant has two automata: the younger is written until it holds `MOST_TOKENS / 2` tokens
and then becomes the elder, whose texts are dropped. Of all tenants together at most `MOST_IN_ALL`
tokens are kept, about 600 bytes each; beyond that the tenant that was served longest ago is
forgotten.

Source. SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975), SAM-Decoding (arXiv 2411.10666).

Invariants. Nothing of one tenant's text shows in another's drafts: neither tokens nor speed.
Answers never depend on it (`walk.py`).
When it loses. Traffic that does not repeat itself: about five microseconds per token to remember it
and one per token to look, and the memory above.
"""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.engine.core.drafting import Open
from ridgeline.engine.speculate.automaton import Automaton, Reader
from ridgeline.engine.speculate.base import NO_GUESS, Guess, kind_of

MOST_TOKENS, MOST_IN_ALL = 16_384, 65_536
LEAST_MATCH = 2
BETWEEN = -1  # stands between two texts: no draft reaches over it
_WARM = 64  # tokens of its own text that a sequence is matched by at first


class _Seat:
    """A sequence's place in one automaton."""

    __slots__ = ("automaton", "num_read", "reader")

    def __init__(self, automaton: Automaton, num_known: int) -> None:
        self.automaton, self.reader = automaton, Reader()
        self.num_read = max(0, num_known - _WARM)

    def catch_up(self, tokens: Sequence[int]) -> None:
        if self.num_read > len(tokens):
            self.reader, self.num_read = Reader(), max(0, len(tokens) - _WARM)
        self.automaton.follow(self.reader, tokens[self.num_read :])
        self.num_read = len(tokens)


class Texts:
    """What one tenant was answered lately."""

    def __init__(self, most_tokens: int) -> None:
        self._most = most_tokens // 2
        self.young, self.old = Automaton(), Automaton()

    @property
    def num_tokens(self) -> int:
        return len(self.young.text) + len(self.old.text)

    def add(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.young.feed(token)
        self.young.feed(BETWEEN)
        if len(self.young.text) >= self._most:
            self.young, self.old = Automaton(), self.young


class SuffixDrafter:
    """See the head of this file."""

    name = "suffix"

    def __init__(self, most_tokens: int = MOST_TOKENS, most_in_all: int = MOST_IN_ALL) -> None:
        self._most_tokens, self._most_in_all = most_tokens, most_in_all
        self._texts: dict[str, Texts] = {}  # by tenant; the one served last is last
        self._seats: dict[int, list[_Seat]] = {}
        self._num_prompt: dict[int, int] = {}

    def look(self, each: Open, most: int) -> Guess:
        self._num_prompt[each.seq_id] = each.num_prompt
        texts = self._texts.get(each.tenant)
        if texts is None:
            return NO_GUESS
        best, longest = NO_GUESS, LEAST_MATCH - 1
        for seat in self._seated(each, texts):
            seat.catch_up(each.tokens)
            length = seat.reader.length
            if length > longest:
                tokens = _after(seat.automaton, seat.reader, min(most, 2 * length))
                if tokens:
                    kinds = [kind_of(length + i) for i in range(len(tokens))]
                    best, longest = Guess(tokens, tuple(kinds)), length
        return best

    def forget(self, seq_id: int, tokens: Sequence[int], tenant: str) -> None:
        """What it was answered is remembered for its tenant."""
        self._seats.pop(seq_id, None)
        num_prompt = self._num_prompt.pop(seq_id, None)
        if num_prompt is None or num_prompt >= len(tokens):
            return
        texts = self._texts.pop(tenant, None) or Texts(self._most_tokens)
        texts.add(tokens[num_prompt:][-self._most_tokens // 2 :])
        self._texts[tenant] = texts
        while self.num_tokens > self._most_in_all and len(self._texts) > 1:
            self._texts.pop(next(iter(self._texts)))

    @property
    def num_tokens(self) -> int:
        """Kept of all tenants together."""
        return sum(texts.num_tokens for texts in self._texts.values())

    def _seated(self, each: Open, texts: Texts) -> list[_Seat]:
        """The sequence's places in what is remembered now."""
        had = {seat.automaton: seat for seat in self._seats.get(each.seq_id, ())}
        wanted = [texts.young, texts.old] if texts.old.text else [texts.young]
        seats = [had.get(one) or _Seat(one, len(each.tokens)) for one in wanted]
        self._seats[each.seq_id] = seats
        return seats


def _after(automaton: Automaton, reader: Reader, count: int) -> tuple[int, ...]:
    """What followed the reader's match the last time, within the same text."""
    start = automaton.place(reader) + 1
    found = automaton.text[start : start + count]
    return tuple(found[: found.index(BETWEEN)] if BETWEEN in found else found)
