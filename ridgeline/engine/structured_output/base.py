"""Masks over the vocabulary: the contract of the family.

A mask is a pure function of (grammar, output so far). None of it is stored in the sequence, so a
choice that is forked, preempted, recomputed or drafted for needs no state to be saved, moved or
rolled back. Whatever an implementation keeps between steps is a cache of that function.

Invariants
- `prepare` compiles a grammar once, and rejects with a reason what cannot be compiled within the
  limits on size and work. After that, `apply` works for every output that it has allowed itself, or
  raises BadInput if the grammar reaches these limits later.
- Masks set the logits of every token that may not follow to -inf and change nothing else; rows
  without a restriction keep their bits. If no token is left, the row raises ArithmeticError, and
  the runner fails that request only.
- If the output is complete according to the grammar, an end-of-sequence token is allowed; if
  nothing may follow, it is the only one.
- A row depends on its own SamplePoint alone, with one exception: a row after a draft that the
  previous row forbids is left unchanged. That draft cannot be accepted, so the row is never read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from ridgeline.engine.scheduler.plan import SamplePoint
from ridgeline.records import OutputGrammar

if TYPE_CHECKING:
    from torch import Tensor


class UnmaskedRows(NamedTuple):
    """Rows that wait for a later step, and rows whose request has failed, with the reason."""

    late: frozenset[int] = frozenset()
    failed: Mapping[int, Exception] = {}


class TokenMasks(Protocol):
    """Decides which tokens may come next. Shapes: S sampled rows, V vocabulary."""

    def warm_up(self) -> None:
        """Load what every grammar needs, before the first one comes."""
        ...

    def prepare(self, structured: OutputGrammar) -> None:
        """Compile a grammar; may be called from any thread.

        Raises BadInput (malformed, too large, too complex) or CannotRun.
        """
        ...

    def apply(self, logits_SV: Tensor, points: Sequence[SamplePoint]) -> Tensor:
        """A copy with forbidden tokens at -inf; the input itself if no row is restricted."""
        ...

    def apply_in_time(
        self, logits_SV: Tensor, points: Sequence[SamplePoint], can_wait: Sequence[bool]
    ) -> UnmaskedRows:
        """As `apply`, but in place, and rows that `can_wait` may stay without a mask, and fail
        alone.

        Nothing may be sampled from these rows. Whether a row waits depends on time; what its mask
        is does not.
        """
        ...


def restrict_to(logits_SV: Tensor, points: Sequence[SamplePoint]) -> None:
    """Apply the lists of allowed tokens in place."""
    for row, point in enumerate(points):
        if point.sampling.allowed_token_ids:
            ids_K = torch.tensor(point.sampling.allowed_token_ids, device=logits_SV.device)
            kept_K = logits_SV[row, ids_K]
            logits_SV[row] = -torch.inf
            logits_SV[row, ids_K] = kept_K


def follows_draft(before: SamplePoint, point: SamplePoint) -> bool:
    """Whether `point` belongs to the same choice as `before`, one drafted token later."""
    return (
        point.seed == before.seed
        and point.index == before.index + 1
        and point.sampling == before.sampling
        and point.history[:-1] == before.history
    )


def needs_mask(points: Sequence[SamplePoint]) -> bool:
    """Whether any row has a grammar or a list of allowed tokens."""
    return any(not point.is_argmax and point.sampling.is_masked for point in points)
