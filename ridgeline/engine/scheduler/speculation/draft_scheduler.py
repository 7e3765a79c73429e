"""Speculative decoding: schedules draft tokens for verification in the same step.

    propose   Once the runs of a step are decided, the proposer drafts continuations for some of
              them (if `should_propose`: where drafting does not pay, a step costs what it costs
              without it).
    verify    The drafts are fed after the run's last known token, and the target model says at
              each position what comes next.
    accept    The drafts that agree become known, and one more token: what the target model says
              after the last of them.

Drafts only use budget tokens and blocks that are left over in this step: no sequence waits, loses
its slot or is preempted for them. A rejected draft leaves nothing behind: the sequence returns the
blocks after its known tokens, none of the draft was published in the prefix cache, and its
positions in the KV cache are overwritten before they are read.
"""

from __future__ import annotations

import logging

import msgspec

from ridgeline.engine.scheduler.kv.block_pool import BlockPool
from ridgeline.engine.scheduler.kv.block_tables import BlockTables
from ridgeline.engine.scheduler.plan import Run, RunOutput, draft_paths, is_row_error
from ridgeline.engine.scheduler.queue.sequence_registry import SequenceRegistry
from ridgeline.engine.scheduler.sequence import Sequence
from ridgeline.engine.scheduler.speculation.base import (
    DraftContext,
    DraftOutcome,
    DraftProposer,
    NoDrafts,
    StepCapacity,
)
from ridgeline.engine.scheduler.speculation.draft_branches import DraftBranches
from ridgeline.engine.scheduler.speculation.predicted_output import PredictedOutput
from ridgeline.engine.scheduler.step_builder import StepBuilder, with_drafts
from ridgeline.engine.scheduler.stopping import StopRule
from ridgeline.records import Request

_LOG = logging.getLogger(__name__)


class DraftTotals(msgspec.Struct, kw_only=True):
    """Counts since the scheduler was created.

    `drafted_by_position[i]` counts drafts with an i-th token, `accepted_by_position[i]` those whose
    i-th token was accepted.
    """

    num_drafts: int = 0
    num_tokens: int = 0
    num_accepted: int = 0
    accepted_by_position: list[int] = []
    drafted_by_position: list[int] = []

    def as_dict(self) -> dict[str, float]:
        """The counts under vLLM's names; a position's count has the position after a slash."""
        accepted = "spec_decode_num_accepted_tokens"
        return {
            "spec_decode_num_drafts": float(self.num_drafts),
            "spec_decode_num_draft_tokens": float(self.num_tokens),
            accepted: float(self.num_accepted),
        } | {f"{accepted}_per_pos/{i}": float(n) for i, n in enumerate(self.accepted_by_position)}

    def count(self, outcome: DraftOutcome) -> None:
        """Add the outcome of one draft."""
        self.num_drafts += 1
        self.num_tokens += outcome.num_drafted
        self.num_accepted += outcome.num_accepted
        _count_positions(self.drafted_by_position, outcome.num_drafted)
        _count_positions(self.accepted_by_position, outcome.num_accepted)


def _count_positions(counts: list[int], num: int) -> None:
    counts.extend([0] * (num - len(counts)))
    for position in range(num):
        counts[position] += 1


class DraftScheduler:
    """Decides which runs carry drafts, attaches them, and reports their outcomes."""

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
        self._has_predictions = False
        self._predictions: dict[int, PredictedOutput] = {}  # by sequence id
        self._warned = False
        self.reserves_ahead = False

    @property
    def has_proposer(self) -> bool:
        """Whether anything can propose drafts."""
        return not isinstance(self._proposer, NoDrafts)

    def plan(self, step: StepBuilder) -> None:
        """Attach drafts to decoding runs, within what the step has left over.

        With `reserves_ahead`, decoding runs get the block of the position after them, too.
        """
        if self.reserves_ahead:
            self._reserve_ahead(step)
        if self._has_predictions:
            self._draft_from_predictions(step)
        if step.budget.left <= 0 or not self._proposer.should_propose(step.runs):
            return
        contexts = [
            (i, context)
            for i, run in enumerate(step.runs)
            if not run.num_drafts and (context := self._context(run)) is not None
        ]
        if not contexts:
            return
        capacity = StepCapacity(len(step.runs), step.num_rows, step.budget.left)
        try:
            drafts = self._proposer.propose([context for _, context in contexts], capacity)
        except ArithmeticError as error:
            if not is_row_error(error):
                raise
            # A failing drafter must not stop the engine: this step goes without drafts, and the
            # drafter starts afresh with these sequences.
            if not self._warned:
                _LOG.warning("drafting failed, this step runs without drafts: %s", error)
                self._warned = True
            for _, context in contexts:
                self._proposer.forget(context.seq_id, (), context.tenant)
            return
        for (i, context), tokens in zip(contexts, drafts, strict=True):
            self._attach(step, i, tokens, context.max_drafts)

    def resolve_branches(self, seq: Sequence | None, run: Run, output: RunOutput) -> Run:
        """The run along its accepted path. `seq` is None if it has ended in the meantime."""
        if not run.branches:
            return run
        accepted = self._branches.resolve(seq, run, output)
        # Drafts of the accepted path are counted with its outcome.
        num_drafted = sum(path.num_drafts for path in draft_paths(run))
        self.totals.num_tokens += num_drafted - accepted.num_drafts
        return accepted

    def count_outcome(self, seq: Sequence, run: Run, output: RunOutput) -> None:
        """Record what became of the run's draft, if it had one and its request did not fail."""
        if not run.num_drafts or not output.tokens:
            return
        num_accepted = len(output.tokens) - 1
        assert output.tokens[:-1] == run.drafts[:num_accepted], "only drafts can be accepted"
        outcome = DraftOutcome(run.seq_id, run.num_drafts, num_accepted)
        self.totals.count(outcome)
        if not seq.request.prediction:
            self._outcomes.append(outcome)
            return
        self._predictions[seq.id].observe(run.num_drafts, num_accepted)
        seq.num_predicted += num_accepted
        seq.num_mispredicted += run.num_drafts - num_accepted

    def report_outcomes(self) -> None:
        """Pass the outcomes of the step just committed to the proposer."""
        outcomes, self._outcomes = self._outcomes, []
        self._proposer.observe(outcomes)

    def counters(self) -> dict[str, float]:
        """Drafted and accepted tokens, and the proposer's own counters."""
        return self.totals.as_dict() | self._proposer.counters()

    def forget(self, seq: Sequence) -> None:
        """The sequence has lost its slot."""
        self._predictions.pop(seq.id, None)
        self._proposer.forget(seq.id, seq.tokens, seq.request.cache_scope)

    def note_request(self, request: Request) -> None:
        """A request was queued, which may have a prediction of its output."""
        self._has_predictions = self._has_predictions or bool(request.prediction)

    def _draft_from_predictions(self, step: StepBuilder) -> None:
        """Attach what their clients predict to the runs of requests with a prediction."""
        for i, run in enumerate(step.runs):
            seq = self._registry.find_running(run.seq_id)
            if run.sample is None or seq is None or not seq.request.prediction or seq.group.beams:
                continue
            max_drafts = min(self._max_drafts(seq, run), step.budget.left)
            if max_drafts <= 0 or not seq.num_output:
                continue
            if seq.id not in self._predictions:
                self._predictions[seq.id] = PredictedOutput(seq.request.prediction)
            output = seq.tokens[seq.num_prompt :]
            self._attach(step, i, self._predictions[seq.id].draft(output, max_drafts), max_drafts)

    def _context(self, run: Run) -> DraftContext | None:
        """What a proposer needs to know of the run; None if drafts could not follow it."""
        seq = self._registry.find_running(run.seq_id) if run.sample is not None else None
        if seq is None or not seq.num_output or seq.request.prediction or seq.group.beams:
            return None
        max_drafts = self._max_drafts(seq, run)
        if max_drafts <= 0:
            return None
        return DraftContext(
            seq.id,
            seq.tokens,
            seq.num_prompt,
            seq.request.cache_scope,
            seq.sampling,
            seq.seed,
            max_drafts,
            run.start,
            run.blocks,
            run.windows,
            run.first_place,
        )

    def _max_drafts(self, seq: Sequence, run: Run) -> int:
        """Drafts that may follow a run: none in the step that moves its sequence's keys."""
        most = self._rule.max_useful_drafts(seq)
        if seq.eviction is None:
            return most
        if self._tables.compactor.moves(seq):
            return 0
        return int(min(most, seq.next_drop - run.start - len(run.tokens)))

    def _attach(
        self, step: StepBuilder, i: int, proposed: tuple[int, ...], max_drafts: int
    ) -> None:
        """Attach drafts to run `i` if there are blocks that no running sequence may need."""
        run, drafts = step.runs[i], proposed[: min(max_drafts, step.budget.left)]
        seq = self._registry.find_running(run.seq_id)
        assert seq is not None
        num_tokens = len(run.tokens) + len(drafts)
        spare = self._num_spare()
        if not drafts or self._tables.num_missing_blocks(seq, num_tokens) > max(0, spare):
            return
        if self._tables.reserve(seq, num_tokens):
            step.budget.left -= len(drafts)
            step.runs[i] = with_drafts(run, seq, drafts, self._pool.block_size)
            chains = () if seq.request.prediction else self._proposer.alternatives(seq.id)
            if chains and drafts == proposed:
                self._branches.add(step, i, seq, chains, self._num_spare())

    def _reserve_ahead(self, step: StepBuilder) -> None:
        """Give runs that decode the block of their next position: a step is launched ahead there.

        Nothing is preempted for it, and nothing is taken that running sequences may need.
        """
        if any(len(run.tokens) != 1 or run.sample is None for run in step.runs):
            return
        for i, run in enumerate(step.runs):
            seq = self._registry.find_running(run.seq_id)
            is_last = (run.start + 1) % self._pool.block_size == 0
            if seq is None or seq.windows or seq.eviction is not None or not is_last:
                continue
            if self._num_spare() > 0 and self._tables.reserve(seq, 2):
                step.runs[i] = msgspec.structs.replace(
                    run, blocks=tuple(seq.blocks[: len(run.blocks) + 1])
                )

    def _num_spare(self) -> int:
        """Idle blocks beyond those that running sequences may need in the next step."""
        kept = len(self._registry.running) * self._tables.num_groups
        return self._pool.num_idle - kept
