"""The step under construction: its runs, its token budget and its counts."""

from __future__ import annotations

import math

import msgspec

from ridgeline.engine.scheduler.admission.limits import SchedulerLimits
from ridgeline.engine.scheduler.plan import Run, SamplePoint
from ridgeline.engine.scheduler.sequence import Sequence
from ridgeline.engine.scheduler.token_budget import ChunkedBudget, TokenBudget, WholeBudget


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """What a `StepStat` reports about the scheduler: counts of sequences, blocks and tokens.

    The first five are levels; the last three are what the latest plan did. `num_waiting` counts
    every unfinished choice without a slot, `used_blocks` the blocks that have an owner.
    """

    num_running: int
    num_waiting: int
    used_blocks: int
    num_blocks: int
    max_num_seqs: int
    num_preempted: int
    queried_tokens: int
    hit_tokens: int


class SchedulerTotals(msgspec.Struct, kw_only=True):
    """Counts since the scheduler was created."""

    num_steps: int = 0
    num_tokens: int = 0
    num_sampled: int = 0
    num_preempted: int = 0
    num_forked: int = 0
    num_finished: int = 0


class StepBuilder:
    """Collects the runs of one step.

    `num_admitted` counts slots given to requests that started in this step. `best_preempted` is the
    rank of the highest-priority lane in which a sequence was preempted (inf: none).
    """

    def __init__(self, limits: SchedulerLimits, now_s: float, num_extra_tokens: int = 0) -> None:
        tokens = limits.max_num_batched_tokens
        if limits.chunked_prefill:  # half is left for the step, so that its prompts go on
            tokens -= min(num_extra_tokens, tokens // 2)
        self.budget: TokenBudget = (
            ChunkedBudget(tokens) if limits.chunked_prefill else WholeBudget(tokens)
        )
        self._prompt_logprob_tokens = limits.prompt_logprob_tokens
        self.now_s = now_s
        self.runs: list[Run] = []
        self.num_admitted = self.num_preempted = self.queried_tokens = self.hit_tokens = 0
        self.best_preempted = math.inf

    def offer(self, seq: Sequence, computed: int, later: int = 0) -> int:
        """How many of the sequence's tokens may be computed now, from position `computed` on.

        A position whose prompt log-probability was requested counts for what the logits of a row
        cost in addition to the token itself.
        """
        pending = seq.num_feedable + seq.num_computed - computed
        scored = num_prompt_positions(seq, computed, computed + pending)
        if not scored:
            return self.budget.offer(pending, later)
        cost = self._cost(seq, pending, computed)
        offered = self.budget.offer(cost, later)
        if offered >= cost:
            return pending
        num_tokens = int(offered / (1 + self._prompt_logprob_tokens))
        if num_tokens >= scored:  # the tokens after the prompt are not scored
            num_tokens = offered - (cost - pending)
        return max(num_tokens, min(1, offered))

    def take(self, seq: Sequence, num_tokens: int, later: int = 0) -> None:
        """Use what was offered."""
        cost = self._cost(seq, num_tokens, seq.num_computed)
        if cost > num_tokens:  # a single row may cost more than is left
            cost = max(num_tokens, min(cost, self.budget.left - later))
        self.budget.take(cost, later)

    def _cost(self, seq: Sequence, num_tokens: int, computed: int) -> int:
        """Tokens of the budget that computing `num_tokens` from `computed` on uses."""
        if seq.num_prompt_logprobs is None:
            return num_tokens
        scored = num_prompt_positions(seq, computed, computed + num_tokens)
        return num_tokens + math.ceil(scored * self._prompt_logprob_tokens)

    @property
    def num_rows(self) -> int:
        """Tokens that the runs so far feed, drafts included."""
        return sum([len(run.tokens) for run in self.runs])


def make_run(seq: Sequence, num_tokens: int, block_size: int, sample: SamplePoint | None) -> Run:
    """The next `num_tokens` pending tokens of `seq` as a run."""
    start, table = seq.num_computed, seq.blocks
    end = start + num_tokens
    tokens = tuple(seq.tokens[start:end]) if num_tokens > 1 else (seq.tokens[start],)
    num_blocks = -(-(end - seq.num_dropped) // block_size)
    slot, adapter = seq.state_slot, seq.request.adapter
    blocks = tuple(table if num_blocks == len(table) else table[:num_blocks])
    if seq.num_prompt_logprobs is None or not num_prompt_positions(seq, start, end):
        run = Run(seq.id, start, tokens, blocks, sample, state_slot=slot, adapter=adapter)
    else:
        following, num = seq.tokens[end] if end < seq.num_prompt else None, seq.num_prompt_logprobs
        logprobs = num, following
        run = Run(
            seq.id, start, tokens, blocks, sample, *logprobs, state_slot=slot, adapter=adapter
        )
    if seq.eviction is not None:
        run = msgspec.structs.replace(run, num_dropped=seq.num_dropped, eviction=seq.eviction)
    return _with_windows(run, seq, num_blocks) if seq.windows else run


def _with_windows(run: Run, seq: Sequence, num_blocks: int) -> Run:
    """The run with the sequence's tables of layers with a window, up to `num_blocks` places."""
    num_kept = num_blocks - seq.first_place
    windows = tuple([tuple(table[:num_kept]) for table in seq.windows])
    return msgspec.structs.replace(run, windows=windows, first_place=seq.first_place)


def with_drafts(run: Run, seq: Sequence, drafts: tuple[int, ...], block_size: int) -> Run:
    """The run with drafts appended to its known tokens; `seq` must have blocks for them."""
    tokens = run.tokens + drafts
    num_blocks = -(-(run.start + len(tokens) - run.num_dropped) // block_size)
    blocks = tuple(seq.blocks[:num_blocks])
    run = msgspec.structs.replace(run, tokens=tokens, blocks=blocks, num_drafts=len(drafts))
    return _with_windows(run, seq, num_blocks) if seq.windows else run


def num_prompt_positions(seq: Sequence, start: int, end: int) -> int:
    """How many of positions start..end - 1 predict a prompt token whose logprob was requested."""
    if seq.num_prompt_logprobs is None:
        return 0
    return max(0, min(end, seq.num_prompt - 1) - start)
