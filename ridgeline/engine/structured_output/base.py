"""Masks over the vocabulary: what every part of this family promises.

A mask is a pure function of (grammar, output so far). Nothing about it lives in the sequence, so a
choice that is forked, preempted, recomputed or drafted for needs no state to be saved, moved or
rolled back; what an implementation keeps between steps is a cache of that function.

Invariants, in words
- `prepare` compiles a grammar once and refuses, with the reason, what cannot be compiled within the
  limits on size and work. After it, `apply` works for every output that `apply` itself allowed, or
  raises BadInput for a grammar that comes to these limits behind it.
- `apply` sets the logits of every token that may not follow to -inf and changes nothing else; rows
  that ask for nothing keep their bits. At least one token is left, or the row raises
  ArithmeticError: the runner then fails that one request and goes on with the others.
- Where the grammar is complete, an end-of-sequence token is allowed; where nothing may follow, it
  is the only one.
- A row depends on its own SampleAt alone, except that a row behind a draft which the row before it
  forbids is left as it is: that draft cannot be accepted, so that nobody reads the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from ridgeline.engine.scheduler.plan import SamplePoint
from ridgeline.records import OutputGrammar

if TYPE_CHECKING:
    from torch import Tensor


class TokenMasks(Protocol):
    """Which tokens may come next. Shapes: S rows that sample, V vocabulary."""

    def prepare(self, structured: OutputGrammar) -> None:
        """Compile. BadInput (malformed, too large, too complex) or CannotRun. From any thread."""
        ...

    def apply(self, logits_SV: Tensor, at: Sequence[SamplePoint]) -> Tensor:
        """The logits with forbidden tokens at -inf; the input itself where nobody asked."""
        ...


def restrict_to(logits_SV: Tensor, at: Sequence[SamplePoint]) -> None:
    """Lists of allowed tokens, in place."""
    for row, spot in enumerate(at):
        if spot.sampling.allowed_token_ids:
            kept_K = torch.tensor(spot.sampling.allowed_token_ids, device=logits_SV.device)
            masked_V = torch.full_like(logits_SV[row], -torch.inf)
            masked_V[kept_K] = logits_SV[row, kept_K]
            logits_SV[row] = masked_V


def follows_draft(before: SamplePoint, at: SamplePoint) -> bool:
    """Whether `at` is `before` of the same choice with one token (a draft) more."""
    return (
        at.seed == before.seed
        and at.index == before.index + 1
        and at.sampling == before.sampling
        and at.history[:-1] == before.history
    )


def needs_mask(at: Sequence[SamplePoint]) -> bool:
    return any(not spot.is_argmax and spot.sampling.is_masked for spot in at)
