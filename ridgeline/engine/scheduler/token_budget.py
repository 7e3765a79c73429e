"""The token budget of one step: how many of its pending tokens a sequence may compute now.

Sequences ask in order. `later` is how many running sequences have yet to come: one token is set
aside for each, so that a long prompt in front never stalls the answers behind it (stall-free
batching, Sarathi-Serve, Agrawal et al. 2024), and no sequence is left out while the budget covers
all of them.

    chunked   take what is left: a prompt is computed over as many steps as it needs
    whole     a prompt is taken entirely or not at all. The first prompt of a step is always taken,
              since one that exceeds the budget would otherwise wait for ever; it does not use up
              what is set aside for the others. Decoding sequences (one pending token) are as in
              chunked.
"""

from __future__ import annotations

from typing import Protocol


class TokenBudget(Protocol):
    """Tokens of one step."""

    left: int

    def offer(self, pending: int, later: int = 0) -> int:
        """How many of `pending` tokens may be computed now (0: none)."""

    def take(self, num_tokens: int, later: int = 0) -> None:
        """Use what was offered."""

    def narrow(self, num_tokens: int) -> None:
        """From now on at most `num_tokens` in all, prompts included."""


class ChunkedBudget:
    """Prompts are split where the budget ends."""

    def __init__(self, num_tokens: int) -> None:
        self.left = num_tokens

    def offer(self, pending: int, later: int = 0) -> int:
        return min(pending, max(self.left - later, min(1, self.left)))

    def take(self, num_tokens: int, later: int = 0) -> None:
        self.left -= num_tokens

    def narrow(self, num_tokens: int) -> None:
        self.left = min(self.left, num_tokens)


class WholeBudget:
    """Prompts are computed in one step each."""

    def __init__(self, num_tokens: int) -> None:
        self.left = num_tokens
        self._took_prompt = False

    def offer(self, pending: int, later: int = 0) -> int:
        if pending <= max(self.left - later, min(1, self.left)):
            return pending
        return pending if pending > 1 and not self._took_prompt else 0

    def take(self, num_tokens: int, later: int = 0) -> None:
        set_aside = min(self.left, later)
        self.left = max(self.left - num_tokens, set_aside if num_tokens > 1 else 0)
        self._took_prompt |= num_tokens > 1

    def narrow(self, num_tokens: int) -> None:
        self.left = min(self.left, num_tokens)
        self._took_prompt = True
