"""The frozen records between deciding and computing: StepPlan goes down, StepResult comes back.

No tensors: a plan can be printed, logged, and replayed against the reference model.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from ridgeline.records import Sampling, TokenLogprobs


class SamplePoint(msgspec.Struct, frozen=True):
    """Sample one token after the last position of a run.

    `index` is the position of the new token within the output: with `seed` it alone determines the
    random draw, so that batching, chunking and preemption cannot change it. `num_prompt` splits
    `history` (prompt + output so far) for penalties; it is empty unless the sampling needs it.
    `banned` tokens must not come out (end-of-sequence before min_tokens). `is_argmax`: it is known
    that the first largest logit is all that is asked for; False says nothing.
    """

    sampling: Sampling
    seed: int
    index: int
    num_prompt: int
    history: tuple[int, ...] = ()
    banned: tuple[int, ...] = ()
    is_argmax: bool = False


class DraftBranch(msgspec.Struct, frozen=True):
    """Other guesses from where a run's drafts begin: `blocks` are the sequence's up to there, and
    then some that nobody else owns."""

    drafts: tuple[int, ...]
    blocks: tuple[int, ...]


class Run(msgspec.Struct, frozen=True):
    """One sequence's share of a step: feed `tokens` at positions start, start+1, …

    `blocks` is the sequence's block table; position p lives in blocks[p // block_size]. `sample` is
    None while known tokens remain uncomputed after this run. `prompt_logprobs` asks for the
    log-probabilities of the prompt tokens that follow each fed position (k, or None).

    The last `num_drafts` of `tokens` are guesses: the run is to give the longest head of them that
    sampling confirms, and the token after it. `branches` are guesses in their place: with the
    drafts they make a tree, whose root is the one known token that such a run feeds.
    """

    seq_id: int
    start: int
    tokens: tuple[int, ...]
    blocks: tuple[int, ...]
    sample: SamplePoint | None
    prompt_logprobs: int | None = None
    next_prompt_token: int | None = None
    num_drafts: int = 0
    branches: tuple[DraftBranch, ...] = ()

    @property
    def drafts(self) -> tuple[int, ...]:
        return self.tokens[len(self.tokens) - self.num_drafts :]

    @property
    def is_argmax(self) -> bool:
        """After every token that is fed one is sampled, by the first largest logit."""
        at = self.sample
        return at is not None and at.is_argmax and len(self.tokens) == self.num_drafts + 1

    @property
    def max_outputs(self) -> int:
        """The most tokens that the run can give: one for each row that is sampled."""
        return 0 if self.sample is None else self.num_drafts + 1


def draft_paths(run: Run) -> tuple[Run, ...]:
    """A run's tree as runs without branches: its drafts, then each branch, all from the same known
    token on."""
    if not run.branches:
        return (run,)
    trunk = msgspec.structs.replace(run, branches=())
    return (trunk, *(with_branch(trunk, branch) for branch in run.branches))


def with_branch(trunk: Run, branch: DraftBranch) -> Run:
    """The run with a branch's guesses in place of its own."""
    assert len(trunk.tokens) == trunk.num_drafts + 1
    tokens, num = (trunk.tokens[0], *branch.drafts), len(branch.drafts)
    return msgspec.structs.replace(trunk, tokens=tokens, blocks=branch.blocks, num_drafts=num)


def sample_points(run: Run) -> tuple[SamplePoint, ...]:
    """How to sample after the known tokens of a run, and after each of its drafts in turn."""
    at = run.sample
    if at is None:
        return ()
    if not run.num_drafts:
        return (at,)
    if at.sampling.greedy and not at.history and not at.banned:
        return (at,) * (run.num_drafts + 1)  # nothing that is looked at changes from row to row
    drafts = run.drafts
    return (at, *(_after(at, drafts[:count]) for count in range(1, len(drafts) + 1)))


def _after(at: SamplePoint, drafts: tuple[int, ...]) -> SamplePoint:
    """The same, `drafts` later: as if they were known."""
    index = at.index + len(drafts)
    return msgspec.structs.replace(
        at,
        index=index,
        history=(*at.history, *drafts) if at.history else (),
        banned=at.banned if index < at.sampling.min_tokens else (),
    )


class StepPlan(msgspec.Struct, frozen=True):
    """One step. `copies` are (from, to) block copies to do first (copy-on-write)."""

    index: int
    runs: tuple[Run, ...]
    copies: tuple[tuple[int, int], ...] = ()


class RunOutput(msgspec.Struct, frozen=True):
    """What a run gave: its sampled tokens in order (none while the prompt is still being
    computed; with drafts, those that were accepted and the one after them). `path`: along which of
    the run's `draft_paths`."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    path: int = 0


class StepResult(msgspec.Struct, frozen=True):
    """Aligned with StepPlan.runs."""

    outputs: tuple[RunOutput, ...]


class Runner(Protocol):
    """Whatever computes a plan: torch here, a cost model in the simulator, a script in tests."""

    def run(self, plan: StepPlan) -> StepResult: ...
