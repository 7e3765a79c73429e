"""Draft trees: several chains of drafts from one position, of which at most one is accepted.

    blocks   [ 4 | 9 | 2 ]        the sequence's own; block 2 holds its last tokens and its drafts
    branch   [ 4 | 9 | 7 ]        the known part of block 2 is copied to 7, the drafts follow
    after    [ 4 | 9 | 7 ]        if the branch was right, block 7 stays and block 2 is returned

A branch is fed as a separate run, starting with the last known token. What two paths have in
common is computed once for each. Branches only use blocks that no sequence needs, for one step.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ridgeline.engine.scheduler.kv.block_tables import BlockTables
from ridgeline.engine.scheduler.plan import DraftBranch, Run, RunOutput, with_branch
from ridgeline.engine.scheduler.sequence import Sequence as EngineSequence
from ridgeline.engine.scheduler.step_builder import StepBuilder


class DraftBranches:
    """Owns the blocks of the current step's branches, by sequence id."""

    def __init__(self, tables: BlockTables) -> None:
        self._tables = tables
        self._blocks: dict[int, list[list[list[int]]]] = {}  # of each branch, by group of layers

    def add(
        self,
        step: StepBuilder,
        i: int,
        seq: EngineSequence,
        chains: Sequence[tuple[int, ...]],
        num_spare: int,
    ) -> None:
        """Add chains as branches of run `i`, in order, as far as budget and spare blocks go.

        A chain is never added without those before it: verification relies on that.
        """
        run = step.runs[i]
        if len(run.tokens) != run.num_drafts + 1:
            return  # further known tokens that the run feeds are not in the cache yet
        branches = []
        for chain in chains:
            num_tokens = 1 + len(chain)
            num_blocks = self._tables.num_branch_blocks(seq, num_tokens)
            if num_tokens > step.budget.left or num_blocks > num_spare:
                break
            blocks = self._tables.allocate_branch(seq, num_tokens)
            self._blocks.setdefault(seq.id, []).append(blocks)
            step.budget.left -= num_tokens
            num_spare -= num_blocks
            branches.append(DraftBranch(chain, *self._tables.branch_tables(seq, blocks)))
        step.runs[i] = msgspec.structs.replace(run, branches=tuple(branches))

    def resolve(self, seq: EngineSequence | None, run: Run, output: RunOutput) -> Run:
        """The accepted path as a run without branches.

        The sequence (None if it has ended) continues in that path's blocks; the blocks of the other
        branches are returned.
        """
        trunk = msgspec.structs.replace(run, branches=())
        accepted = output.path - 1
        for at, blocks in enumerate(self._blocks.pop(run.seq_id)):
            if at == accepted and seq is not None:
                self._tables.accept_branch(seq, blocks)
            else:
                self._tables.release_branch(blocks)
        return with_branch(trunk, run.branches[accepted]) if accepted >= 0 else trunk
