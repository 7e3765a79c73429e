"""Trees of drafts: chains of guesses from one place, of which at most one goes on.

    blocks   [ 4 | 9 | 2 ]            the sequence's; 2 holds its last tokens, and the drafts'
    branch   [ 4 | 9 | 7 ]            what is known of 2 is copied to 7, the branch's guesses follow
    after    [ 4 | 9 | 7 ]            where the branch was right, 7 stays and 2 is given back

A branch is fed as a run of its own, from the known token on: what two paths have in common is
computed once for each. It takes blocks that nobody else wants, for one step.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ridgeline.engine.scheduler.kv.block_tables import BlockTables
from ridgeline.engine.scheduler.plan import DraftBranch, Run, RunOutput, with_branch
from ridgeline.engine.scheduler.sequence import Sequence as Known
from ridgeline.engine.scheduler.step_builder import StepBuilder


class DraftBranches:
    """The blocks of the branches of the step under way, by sequence."""

    def __init__(self, tables: BlockTables) -> None:
        self._tables = tables
        self._fresh: dict[int, list[list[int]]] = {}

    def grow(
        self,
        step: StepBuilder,
        i: int,
        seq: Known,
        chains: Sequence[tuple[int, ...]],
        num_spare: int,
    ) -> None:
        """Put chains beside the drafts of run `i`, in order, as many as budget and spare blocks
        allow. A younger sibling is never there without the elder: verification counts on it."""
        run = step.runs[i]
        if len(run.tokens) != run.num_drafts + 1:
            return  # what it feeds beside its last known token stands in no cache yet
        found, place = [], seq.computed // self._tables.block_size
        for chain in chains:
            num_tokens = 1 + len(chain)
            num_blocks = self._tables.num_of_branch(seq, num_tokens)
            if num_tokens > step.budget.left or num_blocks > num_spare:
                break
            fresh = self._tables.branch(seq, num_tokens)
            self._fresh.setdefault(seq.id, []).append(fresh)
            step.budget.left -= num_tokens
            num_spare -= num_blocks
            found.append(DraftBranch(chain, (*seq.blocks[:place], *fresh)))
        step.runs[i] = msgspec.structs.replace(run, branches=tuple(found))

    def settle(self, seq: Known | None, run: Run, sampled: RunOutput) -> Run:
        """The path that the run has taken, as a run without branches; the sequence (None: it has
        ended) goes on in its blocks, those of the others are given back."""
        every = self._fresh.pop(run.seq_id)
        trunk = msgspec.structs.replace(run, branches=())
        taken = sampled.path - 1
        for at, fresh in enumerate(every):
            if at == taken and seq is not None:
                self._tables.graft(seq, fresh)
            else:
                self._tables.cut(fresh)
        return with_branch(trunk, run.branches[taken]) if taken >= 0 else trunk
