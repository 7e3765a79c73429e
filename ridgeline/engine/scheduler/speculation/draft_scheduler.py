"""Drafts: tokens that somebody guesses cheaply, so that one step can confirm several of them.

    propose   after the runs of a step are decided, the drafter guesses how some of them go on (if
              it `should_propose` to: where nothing pays, a step costs what it costs without drafts)
    verify    the guesses are fed behind the run's last known token; the target model says at each
              place what comes next
    accept    the guesses that agree become known, and one token more: what the target says after
              the last of them

A draft is a guest. It takes tokens of the budget and blocks that nobody else wanted in this step;
nobody waits, loses a seat or is preempted for it. Rejected, it leaves nothing behind: the sequence
gives the blocks behind its known tokens back, nothing of it was published in the prefix cache, and
its places in the KV cache are written again before they are read.
"""

from __future__ import annotations

import logging

import msgspec

from ridgeline.engine.scheduler.kv.block_pool import BlockPool
from ridgeline.engine.scheduler.kv.block_tables import BlockTables
from ridgeline.engine.scheduler.plan import Run, RunOutput, draft_paths
from ridgeline.engine.scheduler.queue.sequence_registry import SequenceRegistry
from ridgeline.engine.scheduler.sequence import Sequence as Known
from ridgeline.engine.scheduler.speculation.base import (
    DraftContext,
    DraftOutcome,
    DraftProposer,
    NoDrafts,
    StepCapacity,
)
from ridgeline.engine.scheduler.speculation.draft_branches import DraftBranches
from ridgeline.engine.scheduler.step_builder import StepBuilder, with_drafts
from ridgeline.engine.scheduler.stopping import StopRule

_LOG = logging.getLogger(__name__)


class DraftTotals(msgspec.Struct, kw_only=True):
    """Counts since the scheduler was made. `accepted_by_place[i]`: drafts whose i-th token was."""

    num_drafts: int = 0
    num_tokens: int = 0
    num_accepted: int = 0
    accepted_by_place: list[int] = []
    drafted_by_place: list[int] = []

    def as_dict(self) -> dict[str, float]:
        """Under vLLM's names; a place's count carries its place behind a slash."""
        accepted = "spec_decode_num_accepted_tokens"
        return {
            "spec_decode_num_drafts": float(self.num_drafts),
            "spec_decode_num_draft_tokens": float(self.num_tokens),
            accepted: float(self.num_accepted),
        } | {f"{accepted}_per_pos/{i}": float(n) for i, n in enumerate(self.accepted_by_place)}

    def count(self, outcome: DraftOutcome) -> None:
        self.num_drafts += 1
        self.num_tokens += outcome.num_drafted
        self.num_accepted += outcome.num_accepted
        _count_places(self.drafted_by_place, outcome.num_drafted)
        _count_places(self.accepted_by_place, outcome.num_accepted)


def _count_places(counts: list[int], num: int) -> None:
    counts.extend([0] * (num - len(counts)))
    for place in range(num):
        counts[place] += 1


class DraftScheduler:
    """The scheduler's side of it: who may carry drafts, what they carry, what became of them."""

    def __init__(
        self,
        drafts: DraftProposer | None,
        rule: StopRule,
        tables: BlockTables,
        registry: SequenceRegistry,
        pool: BlockPool,
    ) -> None:
        self.totals = DraftTotals()
        self._proposer: DraftProposer = drafts or NoDrafts()
        self._rule, self._tables, self._registry, self._pool = rule, tables, registry, pool
        self._branches = DraftBranches(tables)
        self._outcomes: list[DraftOutcome] = []
        self._told = False  # that a step went without drafts

    def plan(self, step: StepBuilder) -> None:
        """Guesses for whoever decodes, in what the step has left over."""
        if step.budget.left <= 0 or not self._proposer.should_propose(step.runs):
            return
        contexts = [(i, each) for i, run in enumerate(step.runs) if (each := self._open(run))]
        if not contexts:
            return
        rows = sum(len(run.tokens) for run in step.runs)
        room = StepCapacity(len(step.runs), rows, step.budget.left)
        try:
            drafts = self._proposer.propose([each for _, each in contexts], room)
        except ArithmeticError as error:
            if type(error) is not ArithmeticError:  # a division by zero is a bug, not a guess
                raise
            self._go_without(contexts, error)
            return
        for (i, each), tokens in zip(contexts, drafts, strict=True):
            self._carry(step, i, tokens, each.max_drafts)

    def _go_without(self, contexts: list[tuple[int, DraftContext]], error: ArithmeticError) -> None:
        """A guess must not end the engine: this step goes without, and the guesser starts afresh
        with these sequences."""
        if not self._told:
            _LOG.warning("a step goes without drafts, as later ones may: %s", error)
            self._told = True
        for _, each in contexts:
            self._proposer.forget(each.seq_id, (), each.tenant)

    def settle(self, seq: Known | None, run: Run, sampled: RunOutput) -> Run:
        """The run along the path that it has taken. `seq`: None where it has ended meanwhile."""
        if not run.branches:
            return run
        found = self._branches.settle(seq, run, sampled)
        every = draft_paths(run)
        # those of the path that was taken are counted with its verdict
        self.totals.num_tokens += sum(path.num_drafts for path in every) - found.num_drafts
        return found

    def judge(self, run: Run, sampled: RunOutput) -> None:
        """Note what became of the run's draft, if it carried one and its request did not fail."""
        if not run.num_drafts or not sampled.tokens:
            return
        num_accepted = len(sampled.tokens) - 1
        assert sampled.tokens[:-1] == run.drafts[:num_accepted], "only drafts can be accepted"
        outcome = DraftOutcome(run.seq_id, run.num_drafts, num_accepted)
        self.totals.count(outcome)
        self._outcomes.append(outcome)

    def observe(self) -> None:
        """Tell the drafter the verdicts of the step that was just committed."""
        outcomes, self._outcomes = self._outcomes, []
        self._proposer.observe(outcomes)

    def counters(self) -> dict[str, float]:
        """What was drafted and accepted, and what the drafter counts."""
        return self.totals.as_dict() | self._proposer.counters()

    def forget(self, seq: Known) -> None:
        self._proposer.forget(seq.id, seq.tokens, seq.request.tenant)

    def _open(self, run: Run) -> DraftContext | None:
        """The run's sequence, if drafts could follow: it decodes, and does not end at once."""
        seq = self._registry.running_by_id(run.seq_id) if run.sample is not None else None
        if seq is None or not seq.num_output:
            return None
        most = self._rule.most_drafts(seq)
        if most <= 0:
            return None
        request = seq.group.request
        return DraftContext(
            seq.id,
            seq.tokens,
            seq.num_prompt,
            request.tenant,
            request.sampling,
            seq.seed,
            most,
            run.start,
            run.blocks,
        )

    def _carry(self, step: StepBuilder, i: int, proposed: tuple[int, ...], most: int) -> None:
        """Put drafts behind run `i`, if there are blocks that nobody else needs."""
        run, drafts = step.runs[i], proposed[: min(most, step.budget.left)]
        seq = self._registry.running_by_id(run.seq_id)
        assert seq is not None
        num_tokens = len(run.tokens) + len(drafts)
        spare = self._pool.num_idle - len(self._registry.running)
        if not drafts or self._tables.num_missing(seq, num_tokens) > max(0, spare):
            return
        if self._tables.reserve(seq, num_tokens):
            step.budget.left -= len(drafts)
            step.runs[i] = with_drafts(run, seq, drafts, self._pool.block_size)
            others = self._proposer.alternatives(seq.id)
            if others and drafts == proposed:
                spare = self._pool.num_idle - len(self._registry.running)
                self._branches.grow(step, i, seq, others, spare)
