"""A suffix automaton: every substring of a text, in at most two states per token.

What. Each state stands for the substrings that end at the same places. `feed` appends a token in
amortised constant time; `follow` takes a reader, who stands on the longest tail of *another* text
that occurs here, one token further, also in amortised constant time. `place` is where what the
reader matches ended last, so that what came after it can be copied.

Source. Blumer et al. 1985; as a drafter: SAM-Decoding (Hu et al. 2024, arXiv 2411.10666).

Invariant. A reader's match is the longest tail of its text that occurs here, also after the
automaton has grown (a state that was split is repaired as it is passed), of `LONGEST` tokens at
most. tests/engine/speculate/test_suffix.py compares with a search.
"""

from __future__ import annotations

from collections.abc import Sequence

LONGEST = 64  # tokens of a match that are told apart
_MOST_LINKS = 32  # states whose latest place is brought up to date by a token


class Reader:
    """Where another text stands: it has matched the last `length` of its tokens at `state`."""

    __slots__ = ("length", "state")

    def __init__(self) -> None:
        self.state = self.length = 0


class Automaton:
    """See the head of this file. `text`: what was fed."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link, self._length, self._end = [-1], [0], [-1]
        self._last = 0

    def feed(self, token: int) -> None:
        """Append a token to the text."""
        end = len(self.text)
        self.text.append(token)
        new = self._state({}, self._length[self._last] + 1, end)
        at = self._last
        while at >= 0 and token not in self._next[at]:
            self._next[at][token] = new
            at = self._link[at]
        self._link[new] = 0 if at < 0 else self._split(at, token)
        self._last = new
        self._refresh(self._link[new], end)

    def follow(self, reader: Reader, tokens: Sequence[int]) -> None:
        """The reader's text goes on with `tokens`."""
        self._repair(reader)  # the text may have grown, and have split the state
        for token in tokens:
            state = reader.state
            while state and token not in self._next[state]:
                state = self._link[state]
                reader.length = self._length[state]
            reader.state = self._next[state].get(token, 0)
            reader.length = min(LONGEST, reader.length + 1) if reader.state else 0
            self._repair(reader)

    def place(self, reader: Reader) -> int:
        """Where in the text the reader's match ended last; it must have one."""
        self._repair(reader)
        return self._end[reader.state]

    def _repair(self, reader: Reader) -> None:
        """Back to the state that holds substrings of the reader's length."""
        link = self._link[reader.state]
        while link > 0 and reader.length <= self._length[link]:
            reader.state, link = link, self._link[link]

    def _state(self, follows: dict[int, int], length: int, end: int) -> int:
        self._next.append(follows)
        self._length.append(length)
        self._link.append(0)
        self._end.append(end)
        return len(self._next) - 1

    def _split(self, at: int, token: int) -> int:
        """The state for what `at` holds, with `token` behind it, and nothing longer."""
        whole = self._next[at][token]
        length = self._length[at] + 1
        if self._length[whole] == length:
            return whole
        part = self._state(dict(self._next[whole]), length, self._end[whole])
        self._link[part] = self._link[whole]
        while at >= 0 and self._next[at].get(token) == whole:
            self._next[at][token] = part
            at = self._link[at]
        self._link[whole] = part
        return part

    def _refresh(self, state: int, end: int) -> None:
        """What ends here ended last here; the shortest of very many tails may stay behind."""
        for _ in range(_MOST_LINKS):
            if state <= 0:
                return
            self._end[state] = end
            state = self._link[state]
