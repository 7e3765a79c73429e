"""The contract between the scheduler and whatever proposes draft tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from ridgeline.engine.scheduler.plan import Run
from ridgeline.records import Sampling


class DraftContext(msgspec.Struct, frozen=True):
    """A sequence whose run could carry up to `max_drafts` drafts.

    `tokens` are its known tokens: read them during the call, do not change or keep them. Nothing
    learned from one `tenant`'s text may show in the speed of another. The first `num_computed`
    known tokens are in the KV cache, in `blocks`, which have room for all of them; `windows` and
    `first_place` are the tables of layers with a window, as in a `Run`.
    """

    seq_id: int
    tokens: Sequence[int]
    num_prompt: int
    tenant: str
    sampling: Sampling
    seed: int
    max_drafts: int
    num_computed: int = 0
    blocks: tuple[int, ...] = ()
    windows: tuple[tuple[int, ...], ...] = ()
    first_place: int = 0

    @property
    def num_places(self) -> int:
        """Blocks of positions for which every block table has room."""
        ends = [self.first_place + len(table) for table in self.windows]
        return min([len(self.blocks), *ends] if self.blocks else ends, default=0)


class StepCapacity(msgspec.Struct, frozen=True):
    """The step so far: its runs, the rows they feed, and the rows that drafts may add."""

    num_runs: int
    num_rows: int
    num_free: int


class DraftOutcome(msgspec.Struct, frozen=True):
    """What became of one draft: the first `num_accepted` of its tokens were accepted."""

    seq_id: int
    num_drafted: int
    num_accepted: int


class DraftProposer(Protocol):
    """Proposes drafts. Called between plan and run; `observe` once per committed step."""

    def should_propose(self, runs: Sequence[Run]) -> bool:
        """Whether to call `propose` for this step at all: preparing the call takes time as well."""
        ...

    def propose(
        self, contexts: Sequence[DraftContext], capacity: StepCapacity
    ) -> list[tuple[int, ...]]:
        """One draft per context, at most `max_drafts` tokens long; empty for no draft."""
        ...

    def alternatives(self, seq_id: int) -> Sequence[tuple[int, ...]]:
        """Further chains of the latest proposal, which may be right where the draft is not."""
        ...

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        """The outcomes of one step; none if it carried no drafts."""
        ...

    def forget(self, seq_id: int, tokens: Sequence[int], tenant: str) -> None:
        """The sequence has lost its slot (finished or preempted) with `tokens` known."""
        ...

    def counters(self) -> dict[str, float]:
        """Running totals for the engine's counters."""
        ...


class NoDrafts:
    """Proposes nothing."""

    def should_propose(self, runs: Sequence[Run]) -> bool:
        return False

    def propose(
        self, contexts: Sequence[DraftContext], capacity: StepCapacity
    ) -> list[tuple[int, ...]]:
        return [()] * len(contexts)

    def alternatives(self, seq_id: int) -> Sequence[tuple[int, ...]]:
        return ()

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        pass

    def forget(self, seq_id: int, tokens: Sequence[int], tenant: str) -> None:
        pass

    def counters(self) -> dict[str, float]:
        return {}
