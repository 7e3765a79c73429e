"""The torch runner: a StepPlan becomes tensors, the tensors become tokens.

    plan ─▶ copies ─▶ Batch (one transfer) ─▶ decoder ─▶ rows ─▶ sampler ─▶ StepResult

It keeps nothing between steps but the weights and the KV cache; whatever it needs is in the plan.

Shape legend: T tokens of the step, S rows that are sampled (of a run with drafts: the last known
token's and each draft's), P prompt positions whose log-probabilities were asked for, C hidden_size,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import cast

import msgspec
import torch
from torch import Tensor

from ridgeline.engine.attention.base import Attention
from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.attention.full import self_attention
from ridgeline.engine.execution.base import HiddenStatesObserver, NoObserver
from ridgeline.engine.execution.batch import StepBatch, make_batch
from ridgeline.engine.execution.greedy_fast_path import (
    ReusedBuffer,
    StateBuffer,
    make_greedy_path,
    new_buffer,
)
from ridgeline.engine.execution.threads import StepThreads
from ridgeline.engine.model.decoder import Decoder
from ridgeline.engine.sampling import token_logprobs
from ridgeline.engine.sampling.argmax_head import make_argmax_head
from ridgeline.engine.sampling.base import Choice
from ridgeline.engine.sampling.verify.verifier import (
    PathOutput,
    Verifier,
    with_raw_logprobs,
    with_raw_logprobs_of_trees,
)
from ridgeline.engine.scheduler.plan import (
    Run,
    RunOutput,
    StepPlan,
    StepResult,
    draft_paths,
    sample_points,
)
from ridgeline.engine.structured_output.base import TokenMasks
from ridgeline.engine.structured_output.none import NoGrammars
from ridgeline.records import TokenLogprobs

LOGIT_ROWS = 256  # prompt log-probabilities go through the head this many rows at a time


class TorchRunner:
    """Runs plans on one device; the `Runner` of the real engine."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KvCache | None,
        attention: Attention | None,
        masks: TokenMasks | None = None,
        verifier: Verifier | None = None,
        observer: HiddenStatesObserver | None = None,
        threads: StepThreads | None = None,
    ) -> None:
        # None: it only scores, and is never asked to run a plan.
        self.cache, self.attention = cast(KvCache, cache), cast(Attention, attention)
        like = torch.empty(0, dtype=decoder.compute_dtype, device=decoder.device)
        self.decoder, self._alone = decoder, self_attention(decoder.spec, like, cache, attention)
        self.masks = masks or NoGrammars("this runner was given none")
        self.verifier, self.observer = verifier or Verifier(), observer or NoObserver()
        self.threads = threads
        self.argmax_head = make_argmax_head(decoder)
        room: StateBuffer = ReusedBuffer() if isinstance(self.observer, NoObserver) else new_buffer
        self.greedy = make_greedy_path(decoder.forward, self.attention, self.argmax_head, room)

    def run(self, plan: StepPlan) -> StepResult:
        """Compute the plan: feed every run's tokens, sample where asked."""
        runs = plan.runs
        if any(run.branches for run in runs):
            return self._run_trees(plan)
        if plan.copies or not runs or not self.greedy.can_run(runs):
            return self._run(plan)
        if self.threads is not None:
            self.threads.begin(sum([len(run.tokens) for run in runs]))
        tokens, x_TC = self.greedy(runs)
        return self._named(tokens, runs, x_TC)

    @torch.inference_mode()
    def _run(self, plan: StepPlan) -> StepResult:
        """The usual way."""
        self.cache.copy_blocks(plan.copies)
        if not plan.runs:
            return StepResult(())
        batch = make_batch(plan.runs, self.decoder.device)
        if self.threads is not None:
            self.threads.begin(len(batch.tokens_T))
        attend = self.attention.prepare(plan.runs)
        x_TC = self.decoder.hidden(batch.tokens_T, batch.positions_T, batch.end, attend)
        if all(run.is_argmax and run.prompt_logprobs is None for run in plan.runs):
            return self._named(self.argmax_head(x_TC), plan.runs, x_TC)
        drawn = self._sample(plan.runs, x_TC, batch)
        self.observer.observe(plan.runs, [len(each) for each in drawn], x_TC)
        prompts = self._prompt_logprobs(plan.runs, x_TC)
        return StepResult(tuple(map(_sampled, drawn, prompts)))

    @torch.inference_mode()
    def _run_trees(self, plan: StepPlan) -> StepResult:
        """A step in which runs have branches: each path is a run of its own."""
        every = [draft_paths(run) for run in plan.runs]
        runs = list(chain.from_iterable(every))
        self.cache.copy_blocks(plan.copies)
        if self.threads is not None:
            self.threads.begin(sum([len(run.tokens) for run in runs]))
        if self.greedy.can_run(runs):
            tokens, x_TC = self.greedy(runs)
            return self._taken(self.verifier.accept_argmax_trees(tokens, plan.runs), every, x_TC)
        batch = make_batch(runs, self.decoder.device)
        attend = self.attention.prepare(runs)
        x_TC = self.decoder.hidden(batch.tokens_T, batch.positions_T, batch.end, attend)
        at = list(chain.from_iterable(map(sample_points, runs)))
        raw_SV = self.decoder.logits(x_TC[batch.sampled_rows()])
        logits_SV = self.masks.apply(raw_SV, at)
        accepted = self.verifier.accept_trees(logits_SV, plan.runs, at)
        if logits_SV is not raw_SV:
            accepted = with_raw_logprobs_of_trees(accepted, raw_SV, every, at)
        return self._taken(accepted, every, x_TC)

    def _taken(
        self, accepted: Sequence[PathOutput], every: Sequence[Sequence[Run]], x_TC: Tensor
    ) -> StepResult:
        """The result; watchers see the rows of the paths that were taken."""
        firsts = list(accumulate((len(path.tokens) for path in chain(*every)), initial=0))
        starts = accumulate((len(own) for own in every), initial=0)
        chosen = [start + own.path for start, own in zip(starts, accepted, strict=False)]
        runs = list(chain(*every))
        prompts = self._prompt_logprobs(runs, x_TC)
        rows = [range(firsts[i], firsts[i + 1]) for i in chosen]
        kept = torch.tensor(list(chain(*rows)), device=x_TC.device)
        self.observer.observe(
            [runs[i] for i in chosen], [len(own.choices) for own in accepted], x_TC[kept]
        )
        return StepResult(
            tuple(
                msgspec.structs.replace(_sampled(own.choices, prompts[i]), path=own.path)
                for i, own in zip(chosen, accepted, strict=True)
            )
        )

    def _named(self, tokens: Sequence[int], runs: Sequence[Run], x_TC: Tensor) -> StepResult:
        """What the runs give where every row named its token."""
        given = self.verifier.accept_argmax(tokens, runs)
        self.observer.observe(runs, list(map(len, given)), x_TC)
        return StepResult(tuple([RunOutput(each) for each in given]))

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Float32 logits_TV of one sequence from its start, by the weights and the attention of
        steps, in a cache of its own.

        For perplexity and divergence: memory grows with T·V, so keep sequences to about a thousand
        tokens.
        """
        return self.decoder.logits(self.states(tokens))

    @torch.inference_mode()
    def states(self, tokens: Sequence[int]) -> Tensor:
        """The last layer's states x_TC of one sequence from its start."""
        tokens_T = torch.tensor(tokens, device=self.decoder.device)
        positions_T = torch.arange(len(tokens), device=self.decoder.device)
        attend = self._alone(tokens)
        return self.decoder.hidden(tokens_T, positions_T, len(tokens), attend)

    def _sample(self, runs: Sequence[Run], x_TC: Tensor, batch: StepBatch) -> list[list[Choice]]:
        """What each run drew: nothing where it does not sample."""
        at = list(chain.from_iterable(map(sample_points, runs)))
        if not at:
            return [[]] * len(runs)
        rows_SC = x_TC if len(at) == len(x_TC) else x_TC.index_select(0, batch.sampled_rows())
        raw_SV = self.decoder.logits(rows_SC)
        logits_SV = self.masks.apply(raw_SV, at)
        drawn = self.verifier.accept(logits_SV, runs, at)
        return drawn if logits_SV is raw_SV else with_raw_logprobs(drawn, raw_SV, runs, at)

    def _prompt_logprobs(
        self, runs: Sequence[Run], x_TC: Tensor
    ) -> list[tuple[TokenLogprobs, ...]]:
        firsts = accumulate((len(run.tokens) for run in runs), initial=0)
        return [
            () if run.prompt_logprobs is None else self._score_run(run, first, x_TC)
            for run, first in zip(runs, firsts, strict=False)
        ]

    def _score_run(self, run: Run, first: int, x_TC: Tensor) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities of the prompt tokens that follow each of the run's positions."""
        assert run.prompt_logprobs is not None
        last = () if run.next_prompt_token is None else (run.next_prompt_token,)
        targets = (*run.tokens[1:], *last)
        scored: list[TokenLogprobs] = []
        for at in range(0, len(targets), LOGIT_ROWS):
            some = targets[at : at + LOGIT_ROWS]
            x_PC = x_TC[first + at : first + at + len(some)]
            scored += token_logprobs(self.decoder.logits(x_PC), some, run.prompt_logprobs)
        return tuple(scored)


def _sampled(drawn: list[Choice], prompt: tuple[TokenLogprobs, ...]) -> RunOutput:
    logprobs = tuple(each for _, each in drawn if each is not None)
    return RunOutput(tuple(token for token, _ in drawn), logprobs, prompt)
