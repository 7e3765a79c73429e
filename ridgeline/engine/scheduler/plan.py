"""The frozen records between deciding and computing: a StepPlan goes in, a StepResult comes out.

They hold no tensors, so a plan can be printed, logged and replayed against the reference model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from ridgeline.engine.scheduler.kv.eviction import KvCompaction, SequenceEviction
from ridgeline.engine.scheduler.token_rules import forced_token, tokens_completing
from ridgeline.records import Sampling, TokenLogprobs


class NoTokenError(ArithmeticError):
    """No token can be chosen from a row's logits: all are forbidden, or the model computed NaN."""


def is_row_error(error: BaseException) -> bool:
    """Whether one row has no answer: no token to choose, a grammar that exceeds its limits.

    Other subclasses of ArithmeticError, such as ZeroDivisionError, are bugs.
    """
    return type(error) in (ArithmeticError, NoTokenError)


class SamplePoint(msgspec.Struct, frozen=True):
    """Sample one token after the last position of a run.

    `index` is the position of the new token within the output. Together with `seed` it alone
    determines the random draw, so batching, chunking and preemption cannot change it. `history`
    holds prompt and output so far, split at `num_prompt`, for penalties and grammars; it is empty
    unless the sampling needs it. `banned` tokens must not be chosen (end-of-sequence tokens before
    min_tokens), nor `completing` ones (they would complete a bad word). `forced`: the only token
    that may be chosen. `is_argmax` True means the first largest logit is all that is needed; False
    means nothing.
    """

    sampling: Sampling
    seed: int
    index: int
    num_prompt: int
    history: tuple[int, ...] = ()
    banned: tuple[int, ...] = ()
    is_argmax: bool = False
    completing: tuple[int, ...] = ()
    forced: int | None = None

    @property
    def forbids(self) -> bool:
        """True if some token must not be chosen here."""
        return bool(self.banned or self.completing) or self.forced is not None


class DraftBranch(msgspec.Struct, frozen=True):
    """Alternative drafts from the position where a run's own drafts begin.

    `blocks` are the sequence's blocks up to there, followed by blocks that only this branch owns,
    and so are `windows`.
    """

    drafts: tuple[int, ...]
    blocks: tuple[int, ...]
    windows: tuple[tuple[int, ...], ...] = ()


class Run(msgspec.Struct, frozen=True):
    """One sequence's part of a step: feed `tokens` at positions start, start + 1, …

    `blocks` is the block table: position p lives in blocks[p // block_size]. `sample` is None while
    known tokens remain uncomputed after this run. `prompt_logprobs` k requests the
    log-probabilities of the prompt tokens that follow each fed position, with k alternatives;
    `next_prompt_token` is the one after the last position, if there is one.

    The last `num_drafts` of `tokens` are drafts: the run yields the longest accepted prefix of them
    and one token more. `branches` are alternatives to those drafts. Together they form a tree whose
    root is the one known token that such a run feeds. `state_slot` is where recurrent layers keep
    the sequence's state, `adapter` the id of the adapter that its rows use (0: none).

    Layers with a window have separate block tables, one per group of layers (`KvLayout`), that
    begin with the block of index `first_place`: position p lives in
    windows[j][p // block_size - first_place]. `blocks` is empty if no layer sees everything.

    Under `eviction`, `num_dropped` tokens before `start` are not in the cache: position p lives in
    blocks[(p - num_dropped) // block_size] (`stored_runs`).
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
    state_slot: int = 0
    windows: tuple[tuple[int, ...], ...] = ()
    first_place: int = 0
    num_dropped: int = 0
    eviction: SequenceEviction | None = None
    adapter: int = 0

    @property
    def num_cached(self) -> int:
        """Tokens before the run that are in the cache."""
        return self.start - self.num_dropped

    @property
    def drafts(self) -> tuple[int, ...]:
        return self.tokens[len(self.tokens) - self.num_drafts :]

    @property
    def is_argmax(self) -> bool:
        """True if every fed token is followed by a sampled one, that of the largest logit."""
        point = self.sample
        return point is not None and point.is_argmax and len(self.tokens) == self.num_drafts + 1

    @property
    def restricts_tokens(self) -> bool:
        """True if the request forbids some tokens in this step."""
        point = self.sample
        return point is not None and (
            point.sampling.is_masked or point.forbids or bool(point.sampling.logit_bias)
        )

    @property
    def max_outputs(self) -> int:
        """The most tokens the run can yield: one per sampled row."""
        return 0 if self.sample is None else self.num_drafts + 1


def draft_paths(run: Run) -> tuple[Run, ...]:
    """A run's draft tree as runs without branches: its own drafts first, then each branch.

    All of them start from the same known token.
    """
    if not run.branches:
        return (run,)
    trunk = msgspec.structs.replace(run, branches=())
    return (trunk, *(with_branch(trunk, branch) for branch in run.branches))


def with_branch(trunk: Run, branch: DraftBranch) -> Run:
    """The run with a branch's drafts instead of the trunk's."""
    assert len(trunk.tokens) == trunk.num_drafts + 1
    tokens, num = (trunk.tokens[0], *branch.drafts), len(branch.drafts)
    tables = {"blocks": branch.blocks, "windows": branch.windows}
    return msgspec.structs.replace(trunk, tokens=tokens, num_drafts=num, **tables)


def stored_runs(runs: Sequence[Run], block_size: int) -> Sequence[Run]:
    """The runs as the cache stores them: numbered by index in their block tables.

    A run that slides over dropped tokens is divided where its queries begin to see fewer of them.
    The position of a result's first token is start + num_dropped.
    """
    if all(run.eviction is None for run in runs):
        return runs
    stored: list[Run] = []
    for run in runs:
        stored += _stored(run, block_size)
    return stored


def _stored(run: Run, block_size: int) -> list[Run]:
    eviction, dropped = run.eviction, run.num_dropped
    if eviction is None:
        return [run]
    if not eviction.is_sliding:
        return [msgspec.structs.replace(run, start=run.start - dropped, eviction=None)]
    parts, position, end = [], run.start, run.start + len(run.tokens)
    sinks = eviction.sinks // block_size
    while position < end:
        # The queries before this one see no less than the one at `position`.
        now = eviction.dropped_at(position)
        stop = min(end, eviction.budget + now)
        passed = sinks + (now - dropped) // block_size
        blocks = (*run.blocks[:sinks], *run.blocks[passed:]) if now > dropped else run.blocks
        parts.append(
            msgspec.structs.replace(
                run,
                start=position - now,
                tokens=run.tokens[position - run.start : stop - run.start],
                blocks=blocks[: -(-(stop - now) // block_size)],
                num_dropped=now,
                eviction=None,
            )
        )
        position = stop
    return parts


def sample_points(run: Run) -> tuple[SamplePoint, ...]:
    """How to sample after the known tokens of a run, and after each of its drafts."""
    point = run.sample
    if point is None:
        return ()
    if not run.num_drafts:
        return (point,)
    if point.sampling.greedy and not point.history and not point.banned:
        return (point,) * (run.num_drafts + 1)  # nothing that greedy sampling reads differs by row
    drafts = run.drafts
    return (point, *(_after_drafts(point, drafts[:num]) for num in range(1, len(drafts) + 1)))


def _after_drafts(point: SamplePoint, drafts: tuple[int, ...]) -> SamplePoint:
    """The sample point after `drafts`, as if they were known tokens."""
    index, sampling = point.index + len(drafts), point.sampling
    history = (*point.history, *drafts) if point.history else ()
    rules = token_rules(sampling, history[point.num_prompt :]) if sampling.has_token_rules else {}
    return msgspec.structs.replace(
        point,
        index=index,
        history=history,
        banned=point.banned if index < sampling.min_tokens else (),
        **rules,
    )


def token_rules(sampling: Sampling, output: tuple[int, ...]) -> dict[str, Any]:
    """The fields of the sample point after `output` that bad words and the thinking limit set."""
    limit = sampling.thinking_limit
    return {
        "completing": tokens_completing(sampling.bad_words_token_ids, output),
        "forced": None if limit is None else forced_token(limit, output),
    }


class BlockMoveFailed(Exception):
    """Raised by a runner that could not move all blocks of a plan, whose cause says why.

    The sequences of the plan, and what the prefix cache holds, then have blocks of unknown content.
    """


class StepPlan(msgspec.Struct, frozen=True):
    """One step.

    Before its runs, in this order: `stores` copy blocks to slots of the memory tier, (block, slot);
    `loads` copy slots to blocks, (slot, block); `copies` are copies on write, (from, to);
    `compactions` evict tokens.
    """

    index: int
    runs: tuple[Run, ...]
    copies: tuple[tuple[int, int], ...] = ()
    compactions: tuple[KvCompaction, ...] = ()
    stores: tuple[tuple[int, int], ...] = ()
    loads: tuple[tuple[int, int], ...] = ()


class RunOutput(msgspec.Struct, frozen=True):
    """The tokens a run yielded, in order.

    None while the prompt is still being computed; with drafts, the accepted ones and the token
    after them. `path` is the index within the run's `draft_paths` that was taken.
    A run that `is_late` was computed but not sampled yet: its last token has to be fed again. With
    `error`, its request has failed.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    path: int = 0
    is_late: bool = False
    error: Exception | None = None


class StepResult(msgspec.Struct, frozen=True):
    """One output per run of the plan, in the same order."""

    outputs: tuple[RunOutput, ...]


class Runner(Protocol):
    """Computes plans: torch in the engine, a cost model in the simulator, a script in tests."""

    def run(self, plan: StepPlan) -> StepResult: ...
