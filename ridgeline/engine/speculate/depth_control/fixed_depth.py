"""Between scheduler and drafter: how deep to draft, for whom."""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.engine.scheduler.plan import Run
from ridgeline.engine.scheduler.speculation.draft_scheduler import Open, Room, Verdict
from ridgeline.engine.speculate.drafters.base import Drafter


class FixedDepth:
    """Every sequence drafts up to `depth` tokens in every step; the first in order go first."""

    def __init__(self, drafter: Drafter, depth: int) -> None:
        self._drafter, self._depth = drafter, depth

    def wants(self, runs: Sequence[Run]) -> bool:
        return True

    def propose(self, opens: Sequence[Open], room: Room) -> list[tuple[int, ...]]:
        return self._drafter.draft(opens, [min(each.most, self._depth) for each in opens])

    def others(self, seq_id: int) -> Sequence[tuple[int, ...]]:
        return ()

    def learn(self, verdicts: Sequence[Verdict]) -> None:
        pass

    def forget(self, seq_id: int, tokens: Sequence[int], tenant: str) -> None:
        self._drafter.forget(seq_id, tokens, tenant)

    def numbers(self) -> dict[str, float]:
        return {}
