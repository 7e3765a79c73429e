"""Drafts: tokens that somebody guesses cheaply, so that one step can confirm several of them.

    propose   after the runs of a step are decided, the drafter guesses how some of them go on (if
              it `wants` to: where nothing pays, a step costs what it costs without drafts)
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
from collections.abc import Sequence
from typing import Protocol

import msgspec

from ridgeline.engine.scheduler.kv.block_pool import BlockPool
from ridgeline.engine.scheduler.kv.block_tables import BlockTables
from ridgeline.engine.scheduler.plan import Run, Sampled, paths
from ridgeline.engine.scheduler.queue.sequence_registry import Roster
from ridgeline.engine.scheduler.sequence import Sequence as Known
from ridgeline.engine.scheduler.speculation.draft_branches import Branches
from ridgeline.engine.scheduler.step_builder import Step, with_drafts
from ridgeline.engine.scheduler.stopping import StopRule
from ridgeline.records import Sampling

_LOG = logging.getLogger(__name__)


class Open(msgspec.Struct, frozen=True):
    """A sequence whose run could carry up to `most` drafts.

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
    most: int
    num_computed: int = 0
    blocks: tuple[int, ...] = ()


class Room(msgspec.Struct, frozen=True):
    """The step so far: runs, rows that they feed, and rows that drafts may add to it."""

    num_runs: int
    num_rows: int
    num_free: int


class Verdict(msgspec.Struct, frozen=True):
    """What became of one draft: the first `num_accepted` of its tokens were right."""

    seq_id: int
    num_drafted: int
    num_accepted: int


class Drafts(Protocol):
    """Where guesses come from. Called between plan and run; `learn` once per committed step."""

    def wants(self, runs: Sequence[Run]) -> bool:
        """Whether to be asked in this step at all: preparing the question costs time as well."""
        ...

    def propose(self, opens: Sequence[Open], room: Room) -> list[tuple[int, ...]]:
        """One draft per entry of `opens`, at most `most` tokens long (empty: nothing to say)."""
        ...

    def others(self, seq_id: int) -> Sequence[tuple[int, ...]]:
        """Of the latest proposal: chains that might be right where the draft is not."""
        ...

    def learn(self, verdicts: Sequence[Verdict]) -> None:
        """The verdicts of one step; none where it carried no drafts."""
        ...

    def forget(self, seq_id: int, tokens: Sequence[int], tenant: str) -> None:
        """The sequence has left its seat (finished or preempted), knowing `tokens`."""
        ...

    def numbers(self) -> dict[str, float]:
        """Running totals of its own, for the engine's counters."""
        ...


class NoDrafts:
    """Nobody guesses."""

    def wants(self, runs: Sequence[Run]) -> bool:
        return False

    def propose(self, opens: Sequence[Open], room: Room) -> list[tuple[int, ...]]:
        return [()] * len(opens)

    def others(self, seq_id: int) -> Sequence[tuple[int, ...]]:
        return ()

    def learn(self, verdicts: Sequence[Verdict]) -> None:
        pass

    def forget(self, seq_id: int, tokens: Sequence[int], tenant: str) -> None:
        pass

    def numbers(self) -> dict[str, float]:
        return {}


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

    def count(self, verdict: Verdict) -> None:
        self.num_drafts += 1
        self.num_tokens += verdict.num_drafted
        self.num_accepted += verdict.num_accepted
        _count_places(self.drafted_by_place, verdict.num_drafted)
        _count_places(self.accepted_by_place, verdict.num_accepted)


def _count_places(counts: list[int], num: int) -> None:
    counts.extend([0] * (num - len(counts)))
    for place in range(num):
        counts[place] += 1


class Drafting:
    """The scheduler's side of it: who may carry drafts, what they carry, what became of them."""

    def __init__(
        self,
        drafts: Drafts | None,
        rule: StopRule,
        tables: BlockTables,
        roster: Roster,
        pool: BlockPool,
    ) -> None:
        self.totals = DraftTotals()
        self._drafts: Drafts = drafts or NoDrafts()
        self._rule, self._tables, self._roster, self._pool = rule, tables, roster, pool
        self._branches = Branches(tables)
        self._verdicts: list[Verdict] = []
        self._told = False  # that a step went without drafts

    def plan(self, step: Step) -> None:
        """Guesses for whoever decodes, in what the step has left over."""
        if step.budget.left <= 0 or not self._drafts.wants(step.runs):
            return
        opens = [(i, each) for i, run in enumerate(step.runs) if (each := self._open(run))]
        if not opens:
            return
        rows = sum(len(run.tokens) for run in step.runs)
        room = Room(len(step.runs), rows, step.budget.left)
        try:
            drafts = self._drafts.propose([each for _, each in opens], room)
        except ArithmeticError as error:
            if type(error) is not ArithmeticError:  # a division by zero is a bug, not a guess
                raise
            self._go_without(opens, error)
            return
        for (i, each), tokens in zip(opens, drafts, strict=True):
            self._carry(step, i, tokens, each.most)

    def _go_without(self, opens: list[tuple[int, Open]], error: ArithmeticError) -> None:
        """A guess must not end the engine: this step goes without, and the guesser starts afresh
        with these sequences."""
        if not self._told:
            _LOG.warning("a step goes without drafts, as later ones may: %s", error)
            self._told = True
        for _, each in opens:
            self._drafts.forget(each.seq_id, (), each.tenant)

    def settle(self, seq: Known | None, run: Run, sampled: Sampled) -> Run:
        """The run along the path that it has taken. `seq`: None where it has ended meanwhile."""
        if not run.branches:
            return run
        found = self._branches.settle(seq, run, sampled)
        every = paths(run)
        # those of the path that was taken are counted with its verdict
        self.totals.num_tokens += sum(path.num_drafts for path in every) - found.num_drafts
        return found

    def judge(self, run: Run, sampled: Sampled) -> None:
        """Note what became of the run's draft, if it carried one and its request did not fail."""
        if not run.num_drafts or not sampled.tokens:
            return
        num_accepted = len(sampled.tokens) - 1
        assert sampled.tokens[:-1] == run.drafts[:num_accepted], "only drafts can be accepted"
        verdict = Verdict(run.seq_id, run.num_drafts, num_accepted)
        self.totals.count(verdict)
        self._verdicts.append(verdict)

    def learn(self) -> None:
        """Tell the drafter the verdicts of the step that was just committed."""
        verdicts, self._verdicts = self._verdicts, []
        self._drafts.learn(verdicts)

    def numbers(self) -> dict[str, float]:
        """What was drafted and accepted, and what the drafter counts."""
        return self.totals.as_dict() | self._drafts.numbers()

    def forget(self, seq: Known) -> None:
        self._drafts.forget(seq.id, seq.tokens, seq.request.tenant)

    def _open(self, run: Run) -> Open | None:
        """The run's sequence, if drafts could follow: it decodes, and does not end at once."""
        seq = self._roster.running_by_id(run.seq_id) if run.sample is not None else None
        if seq is None or not seq.num_output:
            return None
        most = self._rule.most_drafts(seq)
        if most <= 0:
            return None
        request = seq.choices.request
        return Open(
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

    def _carry(self, step: Step, i: int, proposed: tuple[int, ...], most: int) -> None:
        """Put drafts behind run `i`, if there are blocks that nobody else needs."""
        run, drafts = step.runs[i], proposed[: min(most, step.budget.left)]
        seq = self._roster.running_by_id(run.seq_id)
        assert seq is not None
        num_tokens = len(run.tokens) + len(drafts)
        spare = self._pool.num_idle - len(self._roster.running)
        if not drafts or self._tables.num_missing(seq, num_tokens) > max(0, spare):
            return
        if self._tables.reserve(seq, num_tokens):
            step.budget.left -= len(drafts)
            step.runs[i] = with_drafts(run, seq, drafts, self._pool.block_size)
            others = self._drafts.others(seq.id)
            if others and drafts == proposed:
                spare = self._pool.num_idle - len(self._roster.running)
                self._branches.grow(step, i, seq, others, spare)
