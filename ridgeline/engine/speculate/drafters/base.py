"""The interface of drafters.

  contexts ──▶ depth per sequence ──▶ drafter ──▶ drafts ──▶ the step verifies

There are two kinds. A `Drafter` computes, for example one forward pass per token, so the depth is
decided first. A `Lookup` only searches, which takes microseconds, so its guess comes first and the
depth is decided knowing it. A guess that is not verified still teaches: plain decoding soon shows
whether it was right (`LookupAccuracy`).

Invariants, checked by tests/engine/speculate for every drafter:
- A draft is at most as long as requested, and every token of it is in the vocabulary.
- A sequence's draft depends on its own known tokens, on what the drafter was built from, and
  (suffix drafts) on earlier text of the same tenant; never on another tenant's.
- A drafter keeps no state that a rejected draft could corrupt: it compares what it has seen of a
  sequence with the tokens it is given, and goes back to where they diverge.
- A lookup's guess is a function of what it has read, whether or not any guess was verified.
- After `forget`, nothing of a sequence remains except what the drafter shares on purpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ridgeline.engine.scheduler.speculation.base import DraftContext


class Drafter(Protocol):
    """Drafts continuations of sequences by computing."""

    name: str

    def draft(
        self, contexts: Sequence[DraftContext], depths: Sequence[int]
    ) -> list[tuple[int, ...]]:
        """One draft per entry, no longer than its depth; empty if there is none."""
        ...

    def forget(self, seq_id: int, tokens: Sequence[int], tenant: str) -> None:
        """The sequence has finished or was preempted, knowing `tokens`."""
        ...


class LookupGuess(NamedTuple):
    """The guess of a lookup. `kinds` classifies each token by its evidence.

    The probability that a token of a kind is right, given that those before it were, is learnt per
    kind. Within a lookup, higher kinds have more evidence.
    """

    tokens: tuple[int, ...]
    kinds: tuple[int, ...]


NO_GUESS = LookupGuess((), ())


class Lookup(Protocol):
    """Drafts by searching, without computing."""

    name: str

    def look(self, context: DraftContext, most: int) -> LookupGuess:
        """At most `most` tokens; empty if there is no guess."""
        ...

    def forget(self, seq_id: int, tokens: Sequence[int], tenant: str) -> None:
        """The sequence has finished or was preempted, knowing `tokens`."""
        ...


KINDS = 64  # per lookup
HIGHEST = 6  # level of evidence
DIFFERS, ALONE, AGREES, AGAIN = range(4)
"""What followed the same words before a place: something else, nothing was known, the same once,
the same more than once."""


def kind_of(length: int, history: int = ALONE, *, own: bool = True) -> int:
    """The kind of a token that follows a match of 0, 1, 2-3, 4-7, 8-15, … tokens (levels 0 to 6).

    `history`: what followed the same words before (`ALONE`, …); `own`: it is in the sequence's
    output rather than its prompt.
    """
    return (min(HIGHEST, length.bit_length()) * 4 + history) * 2 + own


def parts_of(kind: int) -> tuple[int, int, bool]:
    """Evidence level, history of the position, and whether it is in the output."""
    return kind % KINDS // 8, kind // 2 % 4, kind % 2 == 1
