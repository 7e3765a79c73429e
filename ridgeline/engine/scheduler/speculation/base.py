"""The contract between the scheduler and whatever proposes draft tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from ridgeline.engine.scheduler.plan import Run
from ridgeline.records import Sampling


class DraftContext(msgspec.Struct, frozen=True):
    """A sequence whose run could carry up to `max_drafts` drafts.

    `tokens` are its known ones: to be read at once, neither changed nor kept. `tenant`: what is
    learnt from one tenant's text must not show in another's speed. Of the known tokens the first
    `num_computed` stand in the KV cache, in `blocks`, which have places for all of them.
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


class StepCapacity(msgspec.Struct, frozen=True):
    """The step so far: runs, rows that they feed, and rows that drafts may add to it."""

    num_runs: int
    num_rows: int
    num_free: int


class DraftOutcome(msgspec.Struct, frozen=True):
    """What became of one draft: the first `num_accepted` of its tokens were right."""

    seq_id: int
    num_drafted: int
    num_accepted: int


class DraftProposer(Protocol):
    """Where guesses come from. Called between plan and run; `observe` once per committed step."""

    def should_propose(self, runs: Sequence[Run]) -> bool:
        """Whether to be asked in this step at all: preparing the question costs time as well."""
        ...

    def propose(
        self, contexts: Sequence[DraftContext], room: StepCapacity
    ) -> list[tuple[int, ...]]:
        """One draft per entry of `contexts`, at most `max_drafts` tokens long (empty: nothing to say)."""
        ...

    def alternatives(self, seq_id: int) -> Sequence[tuple[int, ...]]:
        """Of the latest proposal: chains that might be right where the draft is not."""
        ...

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        """The verdicts of one step; none where it carried no drafts."""
        ...

    def forget(self, seq_id: int, tokens: Sequence[int], tenant: str) -> None:
        """The sequence has left its seat (finished or preempted), knowing `tokens`."""
        ...

    def counters(self) -> dict[str, float]:
        """Running totals of its own, for the engine's counters."""
        ...


class NoDrafts:
    """Nobody guesses."""

    def should_propose(self, runs: Sequence[Run]) -> bool:
        return False

    def propose(
        self, contexts: Sequence[DraftContext], room: StepCapacity
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
