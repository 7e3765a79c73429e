"""Drafters: what they promise, and what they are told.

    opens ──▶ depth per sequence (`speculator.py`) ──▶ drafter ──▶ drafts ──▶ the step verifies

Invariants, checked by tests/engine/speculate for every drafter
- A draft is at most as long as asked, and every token of it is in the vocabulary.
- What is drafted for a sequence depends on its own known tokens, on what the drafter was built
  from, and (suffix drafts) on earlier text of the same tenant; never on another tenant's.
- A drafter keeps no state that a rejected draft could spoil: it compares what it has seen of a
  sequence with the tokens that it is shown, and goes back where they part.
- After `forget`, nothing is kept of a sequence but what the drafter shares on purpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ridgeline.engine.core.drafting import Open


class Drafter(Protocol):
    """Guesses how sequences go on."""

    name: str

    def draft(self, opens: Sequence[Open], depths: Sequence[int]) -> list[tuple[int, ...]]:
        """One draft per entry, of at most its depth; empty where it has nothing to say."""
        ...

    def forget(self, seq_id: int, tokens: Sequence[int], tenant: str) -> None:
        """The sequence is gone (or preempted), knowing `tokens`."""
        ...
