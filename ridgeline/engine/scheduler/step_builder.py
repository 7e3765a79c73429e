"""The plan while it is being made: runs, budget and counts of one step."""

from __future__ import annotations

import math

import msgspec

from ridgeline.engine.scheduler.admission.limits import SchedulerLimits
from ridgeline.engine.scheduler.plan import Run, SamplePoint
from ridgeline.engine.scheduler.sequence import Sequence
from ridgeline.engine.scheduler.token_budget import ChunkedBudget, TokenBudget, WholeBudget


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """What a `StepStat` wants to know from the scheduler. Counts of sequences, blocks and tokens.

    The first five are as of now; the last three are what the latest plan did. `num_waiting` counts
    every unfinished choice without a seat; `used_blocks` have an owner.
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
    """Counts since the scheduler was made."""

    num_steps: int = 0
    num_tokens: int = 0
    num_sampled: int = 0
    num_preempted: int = 0
    num_forked: int = 0
    num_finished: int = 0


class StepBuilder:
    """One step in the making."""

    def __init__(self, limits: SchedulerLimits, now_s: float) -> None:
        tokens = limits.max_num_batched_tokens
        self.budget: TokenBudget = (
            ChunkedBudget(tokens) if limits.chunked_prefill else WholeBudget(tokens)
        )
        self.now_s = now_s
        self.runs: list[Run] = []
        self.num_admitted = self.num_preempted = self.queried_tokens = self.hit_tokens = 0
        self.best_preempted = math.inf  # rank of the best lane that somebody lost a seat in


def make_run(seq: Sequence, num_tokens: int, block_size: int, sample: SamplePoint | None) -> Run:
    """The next `num_tokens` pending tokens of `seq` as a run."""
    start, table = seq.computed, seq.blocks
    end = start + num_tokens
    tokens = tuple(seq.tokens[start:end]) if num_tokens > 1 else (seq.tokens[start],)
    num_blocks = -(-end // block_size)
    blocks = tuple(table if num_blocks == len(table) else table[:num_blocks])
    if seq.num_prompt_logprobs is None or not num_prompt_positions(seq, start, end):
        return Run(seq.id, start, tokens, blocks, sample)
    following = seq.tokens[end] if end < seq.num_prompt else None
    return Run(seq.id, start, tokens, blocks, sample, seq.num_prompt_logprobs, following)


def with_drafts(run: Run, seq: Sequence, drafts: tuple[int, ...], block_size: int) -> Run:
    """The same run with guesses behind its known tokens; `seq` has blocks for them."""
    tokens = run.tokens + drafts
    blocks = tuple(seq.blocks[: -(-(run.start + len(tokens)) // block_size)])
    return msgspec.structs.replace(run, tokens=tokens, blocks=blocks, num_drafts=len(drafts))


def num_prompt_positions(seq: Sequence, start: int, end: int) -> int:
    """How many positions of start..end predict a prompt token whose log-probability is wanted."""
    if seq.num_prompt_logprobs is None:
        return 0
    return max(0, min(end, seq.num_prompt - 1) - start)
