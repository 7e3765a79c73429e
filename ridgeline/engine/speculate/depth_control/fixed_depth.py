"""Drafts a fixed number of tokens in every step."""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.engine.scheduler.plan import Run
from ridgeline.engine.scheduler.speculation.base import DraftContext, DraftOutcome, StepCapacity
from ridgeline.engine.speculate.drafters.base import Drafter


class FixedDepth:
    """Every sequence drafts up to `depth` tokens per step; the first in order go first."""

    def __init__(self, drafter: Drafter, depth: int) -> None:
        self._drafter, self._depth = drafter, depth

    def should_propose(self, runs: Sequence[Run]) -> bool:
        return True

    def propose(
        self, contexts: Sequence[DraftContext], room: StepCapacity
    ) -> list[tuple[int, ...]]:
        return self._drafter.draft(
            contexts, [min(context.max_drafts, self._depth) for context in contexts]
        )

    def alternatives(self, seq_id: int) -> Sequence[tuple[int, ...]]:
        return ()

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        pass

    def forget(self, seq_id: int, tokens: Sequence[int], tenant: str) -> None:
        self._drafter.forget(seq_id, tokens, tenant)

    def counters(self) -> dict[str, float]:
        return {}
