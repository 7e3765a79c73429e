"""The frozen records between deciding and computing: StepPlan goes down, StepResult comes back.

No tensors: a plan can be printed, logged, and replayed against the reference model.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from ridgeline.records import Sampling, TokenLogprobs


class SampleAt(msgspec.Struct, frozen=True):
    """Sample one token after the last position of a run.

    `index` is the position of the new token within the output: with `seed` it alone determines the
    random draw, so that batching, chunking and preemption cannot change it. `num_prompt` splits
    `history` (prompt + output so far) for penalties; it is empty unless the sampling needs it.
    `banned` tokens must not come out (end-of-sequence before min_tokens).
    """

    sampling: Sampling
    seed: int
    index: int
    num_prompt: int
    history: tuple[int, ...] = ()
    banned: tuple[int, ...] = ()


class Run(msgspec.Struct, frozen=True):
    """One sequence's share of a step: feed `tokens` at positions start, start+1, …

    `blocks` is the sequence's block table; position p lives in blocks[p // block_size]. `sample` is
    None while known tokens remain uncomputed after this run. `prompt_logprobs` asks for the
    log-probabilities of the prompt tokens that follow each fed position (k, or None).
    """

    seq_id: int
    start: int
    tokens: tuple[int, ...]
    blocks: tuple[int, ...]
    sample: SampleAt | None
    prompt_logprobs: int | None = None
    next_prompt_token: int | None = None


class StepPlan(msgspec.Struct, frozen=True):
    """One step. `copies` are (from, to) block copies to do first (copy-on-write)."""

    index: int
    runs: tuple[Run, ...]
    copies: tuple[tuple[int, int], ...] = ()


class Sampled(msgspec.Struct, frozen=True):
    """What a run gave: its sampled tokens in order (none while the prompt is still being
    computed)."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class StepResult(msgspec.Struct, frozen=True):
    """Aligned with StepPlan.runs."""

    sampled: tuple[Sampled, ...]


class Runner(Protocol):
    """Whatever computes a plan: torch here, a cost model in the simulator, a script in tests."""

    def run(self, plan: StepPlan) -> StepResult: ...
