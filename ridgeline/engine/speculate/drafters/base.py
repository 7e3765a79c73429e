"""Drafters: what they promise, and what they are told.

    opens ──▶ depth per sequence (`speculator.py`) ──▶ drafter ──▶ drafts ──▶ the step verifies

Two sorts. A `Drafter` computes, a forward pass per token, say: the depth is decided first. A
`Lookup` only looks something up: its guess takes microseconds, so that it is made first, and the
depth decided knowing it. A guess that is *not* verified still teaches, because plain decoding then
says whether it was right (`shadows.py`).

Invariants, checked by tests/engine/speculate for every drafter
- A draft is at most as long as asked, and every token of it is in the vocabulary.
- What is drafted for a sequence depends on its own known tokens, on what the drafter was built
  from, and (suffix drafts) on earlier text of the same tenant; never on another tenant's.
- A drafter keeps no state that a rejected draft could spoil: it compares what it has seen of a
  sequence with the tokens that it is shown, and goes back where they part.
- A lookup's guess is a function of what it has read, whether or not any guess was verified.
- After `forget`, nothing is kept of a sequence but what the drafter shares on purpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ridgeline.engine.scheduler.speculation.base import DraftContext


class Drafter(Protocol):
    """Guesses how sequences go on."""

    name: str

    def draft(
        self, contexts: Sequence[DraftContext], depths: Sequence[int]
    ) -> list[tuple[int, ...]]:
        """One draft per entry, of at most its depth; empty where it has nothing to say."""
        ...

    def forget(self, seq_id: int, tokens: Sequence[int], tenant: str) -> None:
        """The sequence is gone (or preempted), knowing `tokens`."""
        ...


class Guess(NamedTuple):
    """What a lookup has to say. `kinds`: of what kind each token is; how often tokens of a kind are
    right, where those before them were, is learnt kind by kind. Within a lookup, higher kinds rest
    on more evidence."""

    tokens: tuple[int, ...]
    kinds: tuple[int, ...]


NO_GUESS = Guess((), ())


class Lookup(Protocol):
    """Guesses without computing."""

    name: str

    def look(self, each: DraftContext, most: int) -> Guess:
        """At most `most` tokens; none where it has nothing to say."""
        ...

    def forget(self, seq_id: int, tokens: Sequence[int], tenant: str) -> None:
        """The sequence is gone (or preempted), knowing `tokens`."""
        ...


KINDS = 64  # per lookup
HIGHEST = 6  # level of evidence
DIFFERS, ALONE, AGREES, AGAIN = range(4)
"""What followed the same words before a place: something else, nothing was known, the same once,
the same more than once."""


def kind_of(length: int, told: int = ALONE, *, own: bool = True) -> int:
    """A token that follows a match of 0, 1, 2-3, 4-7, 8-15, … tokens (levels 0 to 6) at a place of
    which that was `told`; `own`: in the sequence's output rather than its prompt."""
    return (min(HIGHEST, length.bit_length()) * 4 + told) * 2 + own


def parts_of(kind: int) -> tuple[int, int, bool]:
    """Level of evidence, what was told, and whose words they are."""
    return kind % KINDS // 8, kind // 2 % 4, kind % 2 == 1
