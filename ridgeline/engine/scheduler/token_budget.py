"""The token budget of one step: how many of its pending tokens a sequence may compute now.

Sequences are offered tokens in order. `later` is the number of running sequences still to come: one
token is reserved for each, so a long prompt in front never stalls the decodes behind it (stall-free
batching, Sarathi-Serve, Agrawal et al. 2024), and no sequence is left out while the budget covers
all of them.

    chunked   Take what is left: a prompt is computed over as many steps as it needs.
    whole     A prompt is computed entirely or not at all. The first prompt of a step is always
              taken, since one larger than the budget would otherwise wait for ever; it does not use
              up what is reserved for others. Decodes (one pending token) behave as in chunked.
"""

from __future__ import annotations

from typing import Protocol


class TokenBudget(Protocol):
    """The tokens one step may still compute."""

    left: int

    def offer(self, pending: int, later: int = 0) -> int:
        """How many of `pending` tokens may be computed now; 0 for none."""

    def take(self, num_tokens: int, later: int = 0) -> None:
        """Use what was offered."""

    def limit(self, num_tokens: int) -> None:
        """From now on compute at most `num_tokens` more, whole prompts included."""


class ChunkedBudget:
    """Splits prompts where the budget ends."""

    def __init__(self, num_tokens: int) -> None:
        self.left = num_tokens

    def offer(self, pending: int, later: int = 0) -> int:
        return min(pending, max(self.left - later, min(1, self.left)))

    def take(self, num_tokens: int, later: int = 0) -> None:
        self.left -= num_tokens

    def limit(self, num_tokens: int) -> None:
        self.left = min(self.left, num_tokens)


class WholeBudget:
    """Computes each prompt in one step."""

    def __init__(self, num_tokens: int) -> None:
        self.left = num_tokens
        self._took_prompt = False

    def offer(self, pending: int, later: int = 0) -> int:
        if pending <= max(self.left - later, min(1, self.left)):
            return pending
        return pending if pending > 1 and not self._took_prompt else 0

    def take(self, num_tokens: int, later: int = 0) -> None:
        reserved = min(self.left, later)
        self.left = max(self.left - num_tokens, reserved if num_tokens > 1 else 0)
        self._took_prompt |= num_tokens > 1

    def limit(self, num_tokens: int) -> None:
        self.left = min(self.left, num_tokens)
        self._took_prompt = True  # an oversized prompt may not slip in any more
