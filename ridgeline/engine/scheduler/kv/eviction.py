"""What one sequence's KV eviction means in tokens and blocks, and the compactions of a step.

    full        [ 0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13 14 15 | 16 17 ]     18 tokens, 5 blocks
    streaming   [ 0 1 2 3           | 8 9 10 11 | 12 13 14 15 | 16 17 ]     4 dropped: 4 blocks
    snapkv      [ 1 3 6 9 | 11 12 13 15                       | 16 17 ]     8 dropped: 3 blocks

A sequence that has dropped tokens is stored as if it were shorter by `num_dropped`: position p lies
at index p - num_dropped of its block table. Keys keep the rotation of their true positions, so only
the places of a sequence change, never its positions. Tokens are dropped in whole blocks, so that an
index and its position have the same offset in their block.

The policy, the prompt's length and the position alone decide what is dropped, so that batching,
chunks and preemption cannot change a token:

    streaming   the query at p sees the sinks and the latest tokens, at most `budget` in all; the
                blocks between them are given back (StreamingLLM, Xiao et al., ICLR 2024, arXiv
                2309.17453, which however re-rotates keys to their index in the cache)
    snapkv      a prompt longer than the budget is cut to it once it is computed
    adakv       the same, with a different share for each head of a layer
    h2o         the same, and again whenever the budget is reached

Streaming only slides: no byte moves. The others choose tokens by attention scores, per layer and
head. That is the runner's part; a `KvCompaction` tells it how many tokens to keep, and where.

A block that another sequence shares, or that a prefix hit can read, is never written: what is kept
moves to other blocks, and the original stays as it was. No block that holds evicted or moved tokens
enters the prefix cache; only the tokens that every policy computes as the full cache does are
published there (`exact_tokens`), and hits end before what eviction needs to see (`max_hit_tokens`).
"""

from __future__ import annotations

import math

import msgspec

from ridgeline.errors import BadInput
from ridgeline.records.kv_eviction import POOLING, SINKS, WINDOW, KvEviction


class SequenceEviction(msgspec.Struct, frozen=True):
    """A policy applied to one sequence; all lengths are tokens.

    `sinks` is a multiple of `block_size`, as is everything that is dropped.
    """

    method: str
    budget: int
    num_prompt: int
    block_size: int
    sinks: int = 0
    window: int = 0
    pooling: int = 1

    @staticmethod
    def of(policy: KvEviction | None, num_prompt: int, block_size: int) -> SequenceEviction | None:
        """The policy for a prompt; None if it evicts nothing.

        Raises BadInput if the budget has no room for what the method always keeps.
        """
        if policy is None or not policy.evicts:
            return None
        sinks = window = 0
        if policy.method == "streaming":
            sinks = SINKS if policy.sinks is None else policy.sinks
            sinks = _round_up(sinks, block_size)
        elif policy.method in ("snapkv", "adakv"):
            window = WINDOW if policy.window is None else policy.window
        num_blocks = 2 if policy.method in ("h2o", "adakv") else 1
        least = sinks + window + num_blocks * block_size
        budget = policy.budget_tokens(num_prompt, least)
        if budget < least:
            raise BadInput(
                f"the budget of KV eviction by {policy.method} is too small",
                value=f"{budget} tokens",
                limit=f">= {least}: what is always kept, in blocks of {block_size}",
                fix=f"use a budget of {least} or more",
            )
        pooling = POOLING if policy.pooling is None else policy.pooling
        return SequenceEviction(
            policy.method, budget, num_prompt, block_size, sinks, window, pooling
        )

    @property
    def is_sliding(self) -> bool:
        """Whether the middle's blocks are given back without moving a byte."""
        return self.method == "streaming"

    def dropped_at(self, position: int) -> int:
        """How many tokens before `position` its query does not see."""
        if self.is_sliding:
            over = position + 1 - self.budget
        elif position < self.num_prompt:
            return 0
        elif self.method == "h2o":
            over = position + 1 - self.budget
        else:
            over = self.num_prompt - self.budget
        return _round_up(max(0, over), self.block_size)

    def next_drop(self, position: int) -> float:
        """The first position after `position` before which tokens have to be chosen and dropped.

        No run goes beyond it; inf if there is none, or if dropping needs no choice.
        """
        if self.is_sliding:
            return math.inf
        if self.method == "h2o":
            return max(self.num_prompt, self.budget + self.dropped_at(position))
        due = position < self.num_prompt and self.dropped_at(self.num_prompt) > 0
        return self.num_prompt if due else math.inf

    @property
    def exact_tokens(self) -> float:
        """Tokens that are computed as the full cache computes them: these may be published."""
        return self.budget if self.is_sliding else self.next_drop(0)

    @property
    def max_hit_tokens(self) -> float:
        """Tokens that a prefix hit may supply.

        Scores come from queries, which a hit does not compute: those of the observation window, or
        of every token.
        """
        if self.method == "h2o":
            return 0
        exact = self.exact_tokens
        return exact if self.is_sliding or exact == math.inf else exact - self.window

    def max_held(self, num_tokens: int, run_tokens: int) -> int:
        """The most tokens in the cache until `num_tokens` are computed, `run_tokens` at a time."""
        if self.is_sliding:
            return min(num_tokens, self.budget + run_tokens - 1)
        prompt = min(num_tokens, self.num_prompt)
        if self.method == "h2o":
            return max(prompt, min(num_tokens, self.budget))
        return max(prompt, num_tokens - self.dropped_at(num_tokens))


class KvCompaction(msgspec.Struct, frozen=True):
    """Keep the `num_kept` best of a sequence's `num_cached` tokens, in order, in `targets`.

    The runner chooses them per layer and head, and reads all of them from `sources` before it
    writes any: blocks may be in both tables. `state_slot` is where it keeps the sequence's scores.
    """

    seq_id: int
    state_slot: int
    eviction: SequenceEviction
    num_cached: int
    num_kept: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]


def _round_up(num: int, multiple: int) -> int:
    return -(-num // multiple) * multiple
